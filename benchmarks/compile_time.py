"""Does compile time depend on the number of devices? Times the training step for 8 to 2048 of them.

    python -m benchmarks.compile_time

Lowers and compiles the 36-layer model with as many experts as devices (the paper's figure 2) for five
TPU v3 slices: each time in a fresh process and without a cache, one after the other, from few devices
to many and back. Writes docs/plans/compile_time.json. About ten compiles of a minute or two; on a busy
machine the figures mean little.
"""

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lingvo_moe.core import processor
from lingvo_moe.core.config import checks
from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.files import files
from lingvo_moe.reproduction import goldens, making
from lingvo_moe.reproduction.requests import COMPILED, REQUESTS
from tools import _cli

PLANS = Path(__file__).resolve().parent.parent / "docs" / "plans"
_INSTRUCTIONS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_vnni": "VNNI",
    "amx_bf16": "AMX",
}
_MEASURED = ("lower_seconds", "compile_seconds", "program_bytes")


def define_flags() -> Flags:
    """The command's flags."""
    flags = Flags("python -m benchmarks.compile_time", __doc__)
    flags.DEFINE_integer("rounds", 2, "compile each program this many times", checks.SIZE)
    known = tuple(map(str, COMPILED))
    flags.DEFINE_list("devices", known, f"numbers of devices: {', '.join(known)}", known)
    flags.DEFINE_path("output", str(PLANS / f"{goldens.COMPILE_TIME}.json"), "the file to write")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    return _cli.attempt("compile_time", lambda: _run(args), "interrupted; nothing was written")


def _run(args: Flags) -> int:
    _cli.check_output_file(args.output)
    result = run([int(d) for d in args.devices], args.rounds)
    files.write_atomic(args.output, goldens.to_text(goldens.compact(result)).encode())
    show(result)
    return 0


def run(devices: list[int], rounds: int) -> dict[str, Any]:
    """Times each number of devices `rounds` times, every second round in opposite order."""
    runs: dict[int, list[dict[str, float]]] = {d: [] for d in devices}
    order = [d for r in range(rounds) for d in (devices if r % 2 == 0 else devices[::-1])]
    for i, number in enumerate(order, 1):
        name = COMPILED[number]
        print(f"[{i}/{len(order)}] {number} devices, {REQUESTS[name].topology}", flush=True)
        measured = making.in_own_process(name, measure, name)
        print(
            f"    lowered in {measured['lower_seconds']:.1f} s, compiled in "
            f"{measured['compile_seconds']:.1f} s",
            flush=True,
        )
        runs[number].append(measured)
    entries = [
        {
            "devices": number,
            "topology": REQUESTS[COMPILED[number]].topology,
            **{key: statistics.median(r[key] for r in runs[number]) for key in _MEASURED},
            "runs": runs[number],
        }
        for number in devices
    ]
    return {"rounds": rounds, "host": host(), "entries": entries}


def measure(path: Path, name: str) -> None:
    """Writes the figures of one lowering and compilation to `path`; runs in a process of its own."""
    _cli.load_tensorflow()
    from lingvo_moe.analysis.plans import step_plan
    from lingvo_moe.analysis.programs.aot import aot
    from lingvo_moe.core.config import registry
    from lingvo_moe.core.engine.lowering.lowering import lower_step

    request = step_plan.Request(**asdict(REQUESTS[name]))
    devices = aot.devices_of(request.topology)  # loads the compiler
    params = registry.GetParams(request.model, request.override)
    step, _ = step_plan.describe_job(request, params, params.task.Instantiate())
    mesh = step_plan.planned_mesh(params, len(devices))
    started = time.monotonic()
    program = lower_step(step, mesh)
    lower_seconds = time.monotonic() - started
    compiled = aot.compile_for_topology(program, request.topology)
    measured = {
        "lower_seconds": lower_seconds,
        "compile_seconds": compiled.compile_seconds,
        "program_bytes": len(program.exported),
    }
    files.write_json(path, measured)


def host() -> str:
    """This machine, in words, with the instruction sets that products run on."""
    cores = len(os.sched_getaffinity(0))
    with open("/proc/cpuinfo", encoding="ascii", errors="replace") as info:
        names = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    flags = processor.features().split()
    names[1:] = [name for flag, name in _INSTRUCTIONS.items() if flag in flags]
    return f"{cores} CPU cores" + (f" ({', '.join(names)})" if names else "")


def show(result: dict[str, Any]) -> None:
    """Prints the medians, and the ratios of the last to the first."""
    first, last = result["entries"][0], result["entries"][-1]
    for entry in result["entries"]:
        figures = ", ".join(f"{key} {entry[key]:,.1f}" for key in _MEASURED)
        print(f"{entry['devices']:5} devices: {figures}")
    ratios = ", ".join(f"{key} {last[key] / first[key]:.2f}" for key in _MEASURED)
    print(f"{last['devices']} by {first['devices']} devices: {ratios}")


if __name__ == "__main__":
    _cli.run(main)
