"""Compile time and program size against the number of partitions (the paper's figure 2).

    python -m benchmarks.partition_scaling

Two programs, each in two forms, for 2 to 2048 partitions:

* dot: matrices sharded along the contracted dimension, so that partial results have to be summed;
* reshard: a tensor sharded along rows that is needed along columns: every part goes to every device.

'spmd' is one annotated program, lowered by our path and partitioned by XLA. 'mpmd' is what a partitioner
without SPMD has to emit: the operations of every device, written out, with the transfers between them.
The dot takes N products and a chain of N additions: O(N) operations. The reshard takes N slices on each of
N devices and N concatenations: O(N^2). Each device's shard has the same size for every N.

The same XLA compiles both, for virtual CPU devices ('mpmd' for one device, which holds all shards). 'spmd_tpu'
is the program of 'spmd', compiled by the TPU's compiler for slices of N devices: there an all-to-all is one
operation, where the CPU's compiler emits N slices. Each number is measured in a process of its own, one at a
time. A form that took longer than --limit is not tried with more partitions.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.compile_time import host
from benchmarks.contenders import ROOT
from lingvo_moe.core.config import checks
from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.files import files
from lingvo_moe.core.pages import drawing
from lingvo_moe.core.pages.tables import Table, markdown, words
from tools import _cli

COUNTS = (2, 8, 32, 128, 512, 2048)
FORMS = ("spmd", "mpmd", "spmd_tpu")
# TPU slices of as many devices, for 'spmd_tpu'.
TOPOLOGIES = {8: "v3:2x2", 32: "v3:4x4", 128: "v3:8x8", 512: "v3:16x16", 2048: "v3:32x32"}
PROGRAMS = ("dot", "reshard")
_MEASURED = ("trace_seconds", "compile_seconds", "instructions", "program_bytes")
# Of a device: rows and columns of its part.
_ROWS, _COLUMNS = 8, 16


def define_flags() -> Flags:
    """The command's flags."""
    flags = Flags("python -m benchmarks.partition_scaling", __doc__)
    flags.DEFINE_numbers("partitions", COUNTS, "numbers of partitions", checks.Integer(2))
    flags.DEFINE_list("forms", FORMS, f"some of {', '.join(FORMS)}", FORMS)
    flags.DEFINE_integer("rounds", 1, "compile each this many times; the best counts", checks.SIZE)
    flags.DEFINE_integer("limit", 120, "seconds for one compilation at most", checks.SIZE)
    flags.DEFINE_path("output", "", "a JSON file for the figures")
    flags.DEFINE_path("plot", "", "a PNG file for a picture of them")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    interrupted = "interrupted; nothing was written"
    return _cli.attempt("partition_scaling", lambda: _run(args), interrupted)


def _run(args: Flags) -> int:
    _cli.check_output_files(args, "output", "plot")
    result = run(sorted({*args.partitions}), args.forms, args.rounds, args.limit)
    print("\n" + table(result))
    if args.output:
        files.write_json(args.output, result)
    if args.plot:
        files.write_atomic(args.plot, drawing.png(plot(result)))
    return 0


def run(counts: list[int], forms: Sequence[str], rounds: int, limit: int) -> dict[str, Any]:
    """Measures every form of every program, from few partitions to many."""
    entries = []
    for program in PROGRAMS:
        for form in forms:
            for partitions in counts:
                if form == "spmd_tpu" and partitions not in TOPOLOGIES:
                    continue
                print(f"{program}, {form}, {partitions} partitions ... ", end="", flush=True)
                runs = [_in_own_process(form, program, partitions, limit) for _ in range(rounds)]
                ended = [run for run in runs if run is not None]
                if len(ended) < rounds:
                    print(f"more than {limit} s")
                    entries.append({"program": program, "form": form, "partitions": partitions})
                    break
                best = min(ended, key=lambda run: run["compile_seconds"])
                print(f"compiled in {best['compile_seconds']:.2f} s")
                entries.append({"program": program, "form": form, "partitions": partitions, **best})
    return {"rounds": rounds, "limit_seconds": limit, "host": host(), "entries": entries}


def _in_own_process(form: str, program: str, partitions: int, limit: int) -> dict | None:
    """The figures, or None where they took too long."""
    code = f"from benchmarks import partition_scaling as p; p.measure{form, program, partitions}"
    devices = partitions if form == "spmd" else 1
    env = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        return None
    if done.returncode:
        raise ValueError(
            f"{program}, {form}, {partitions} partitions failed:\n{done.stderr[-2000:]}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def measure(form: str, program: str, partitions: int) -> None:
    """Prints the figures of one lowering and compilation as a line of JSON."""
    trace = _mpmd if form == "mpmd" else _spmd
    trace(program, 2)  # loads what is loaded but once
    started = time.perf_counter()
    lowered, num_bytes = trace(program, partitions)
    traced = time.perf_counter()
    if form == "spmd_tpu":
        from lingvo_moe.analysis.programs.aot import aot

        aot.devices_of(TOPOLOGIES[partitions])  # loads the compiler
        compiled = aot.compile_for_topology(lowered, TOPOLOGIES[partitions])
        text, compile_seconds = compiled.hlo_text, compiled.compile_seconds
    elif form == "spmd":
        from lingvo_moe.core.engine.pjrt import PjrtEngine

        engine = PjrtEngine(lowered.mesh)
        before = time.perf_counter()
        text = engine.Compile(lowered).HloText()
        compile_seconds = time.perf_counter() - before
    else:
        text = lowered.compile().as_text()
        compile_seconds = time.perf_counter() - traced
    instructions = len(re.findall(r"^\s*(?:ROOT )?%?[\w.-]+ = ", text, re.MULTILINE))
    figures = (traced - started, compile_seconds, instructions, num_bytes)
    print(json.dumps(dict(zip(_MEASURED, figures, strict=True))))


def _spmd(program: str, partitions: int) -> tuple[Any, int]:
    """The annotated program, lowered, and the length of its text."""
    _cli.load_tensorflow()
    import tensorflow as tf

    from lingvo_moe.core.engine.lowering.lowering import lower
    from lingvo_moe.core.engine.lowering.specs import TensorSpec
    from lingvo_moe.core.sharding import Mesh, replicate, split

    def dot(a: Any, b: Any) -> Any:
        return replicate(split(a, 1, partitions) @ split(b, 0, partitions))

    def reshard(x: Any) -> Any:
        return split(tf.tanh(split(x, 0, partitions)), 1, partitions)

    rows, long = ("d", None), partitions * _COLUMNS
    if program == "dot":
        specs = [
            TensorSpec((_ROWS, long), "float32", (None, "d")),
            TensorSpec((long, _ROWS), "float32", rows),
        ]
        fn: Callable[..., Any] = dot
        results = [TensorSpec((_ROWS, _ROWS), "float32")]
    else:
        shape = (partitions * _ROWS, long)
        specs, fn = [TensorSpec(shape, "float32", rows)], reshard
        results = [TensorSpec(shape, "float32", (None, "d"))]
    mesh = Mesh(("d",), (partitions,))
    lowered = lower(lambda *args: [fn(*args)], specs, mesh, results=results, name=program)
    return lowered, len(lowered.Text())


def _mpmd(program: str, partitions: int) -> tuple[Any, int]:
    """The operations of all devices, written out, and the length of the text; arguments and results are
    the devices' parts."""
    import jax
    import jax.numpy as jnp

    def dot(parts_a: list, parts_b: list) -> list:
        products = [a @ b for a, b in zip(parts_a, parts_b)]
        total = products[0]
        for product in products[1:]:
            total = total + product
        return [jax.lax.optimization_barrier(total) for _ in parts_a]  # every device has it

    def reshard(parts: list) -> list:
        parts = [jnp.tanh(x) for x in parts]
        columns = [slice(i * _COLUMNS, (i + 1) * _COLUMNS) for i in range(partitions)]
        return [jnp.concatenate([x[:, c] for x in parts]) for c in columns]

    def shapes(*shape: int) -> list:
        return [jax.ShapeDtypeStruct(shape, jnp.float32)] * partitions

    if program == "dot":
        lowered = jax.jit(dot).lower(shapes(_ROWS, _COLUMNS), shapes(_COLUMNS, _ROWS))
    else:
        lowered = jax.jit(reshard).lower(shapes(_ROWS, partitions * _COLUMNS))
    return lowered, len(lowered.as_text())


def table(result: dict[str, Any]) -> str:
    """The figures in Markdown."""
    lines = []
    found = {(e["program"], e["form"], e["partitions"]): e for e in result["entries"]}
    for program in PROGRAMS:
        for partitions in sorted({key[2] for key in found if key[0] == program}):
            cells = []
            for form in FORMS:
                e = found.get((program, form, partitions), {})
                cells += (
                    [
                        f"{e['trace_seconds']:.2f}",
                        f"{e['compile_seconds']:.2f}",
                        f"{e['instructions']:,}",
                        f"{e['program_bytes'] / 1000:,.1f}",
                    ]
                    if "compile_seconds" in e
                    else ["-", f"> {result['limit_seconds']}" if e else "-", "-", "-"]
                )
            lines.append([program, f"{partitions}", *cells])
    heads = [n for f in FORMS for n in (f"{f}: trace s", "compile s", "instructions", "KB")]
    table = markdown(Table(words("program", "partitions", *heads), lines))
    return f"{table}\nMeasured on {result['host']}."


@drawing.styled
def plot(result: dict[str, Any]) -> drawing.Figure:
    """Compile time and instructions, both axes logarithmic."""
    figure, axes = drawing.plt.subplots(1, 2, figsize=(10, 4))
    for axis, key in zip(axes, ("compile_seconds", "instructions"), strict=True):
        for program in PROGRAMS:
            for form in FORMS:
                points = [
                    (e["partitions"], e[key])
                    for e in result["entries"]
                    if (e["program"], e["form"]) == (program, form) and key in e
                ]
                if points:
                    axis.loglog(*zip(*points), marker="o", label=f"{program}, {form}")
        axis.set_xlabel("partitions")
        axis.set_ylabel(key.replace("_", " "))
        axis.legend()
    return figure


if __name__ == "__main__":
    _cli.run(main)
