"""Times the MoE layer on a GPU, from program files: forward and backward, against the card's own matrix product.

    python -m benchmarks.gpu.layer --programs=PROGRAMS --torch=PEERS/bin/python --output=figures.json

PROGRAMS is a directory that `python -m benchmarks.gpu.programs` wrote. This command needs no TensorFlow; docs/gpus.md
names the packages that it needs. --torch is a Python with PyTorch for the GPU, whose grouped and batched experts are
timed on the same sizes. Contenders run one after another, each alone on the first GPU.

100% is the fastest large product of a format that was timed in the same run. Float32 products run in TF32 in both
libraries. Not run on a GPU: all that is known is that it works on a CPU.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import moe_layer_worker
from lingvo_moe.core.config import checks
from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.files import files
from lingvo_moe.core.pages.tables import Table, markdown, words
from tools import _cli

MANIFEST = "manifest.json"
VERSION = 1
FORMATS = ("float32", "bfloat16")
TORCH_KINDS = ("torch_grouped", "torch_batched", "torch_matmul")
NAMES = {
    "index": "here, index",
    "dropless": "here, dropless",
    "einsum": "here, einsum",
    "dense": "dense layer, here",
    "matmul": "product alone, here",
    "torch_grouped": "PyTorch, grouped_mm",
    "torch_batched": "PyTorch, batched products",
    "torch_matmul": "product alone, PyTorch",
}
_WARM_UP = 3
Point = dict[str, Any]


def define_flags() -> Flags:
    """The command's flags."""
    flags = Flags("python -m benchmarks.gpu.layer", __doc__)
    flags.DEFINE_path("programs", None, "what benchmarks.gpu.programs wrote", required=True)
    flags.DEFINE_path("torch", "", "a Python with PyTorch; '' leaves it out")
    flags.DEFINE_integer("rounds", 20, "measured rounds of each contender", checks.SIZE)
    flags.DEFINE_integer("steps", 5, "steps in a round, in one queue", checks.SIZE)
    flags.DEFINE_integer("ceiling", 8192, "rows and columns of the large product", checks.SIZE)
    flags.DEFINE_path("output", "", "a JSON file for the figures")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    return _cli.attempt("layer", lambda: run(args), "interrupted; nothing was written")


def run(args: Flags) -> int:
    """Times everything, prints the table, writes the figures; returns the exit status."""
    from lingvo_moe.core.engine import gpu_settings

    _cli.check_output_files(args, "output")
    manifest = read_manifest(Path(args.programs))
    gpu_settings.prepare()
    device = _device()
    points = our_points(Path(args.programs), manifest, args.rounds, args.steps, args.ceiling)
    if args.torch:
        points += torch_points(args, manifest)
    result = {"device": device, "size": manifest["size"], "points": points}
    if args.output:
        files.write_json(args.output, result)
    print(table(result))
    return 0


def read_manifest(directory: Path) -> dict[str, Any]:
    """Reads what benchmarks.gpu.programs wrote beside its programs. Raises ValueError, naming --programs."""
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_text("utf-8"))
    except OSError as e:
        raise ValueError(f"--programs={directory}: {path.name}: {e.strerror}") from None
    except ValueError as e:
        raise ValueError(f"--programs={directory}: {path.name} is not JSON: {e}") from None
    if not isinstance(manifest, dict) or manifest.get("version") != VERSION:
        raise ValueError(f"--programs={directory}: {path.name} is not of version {VERSION}")
    return manifest


def our_points(
    directory: Path, manifest: dict[str, Any], rounds: int, steps: int, ceiling: int
) -> list[Point]:
    """Times each program of the manifest, and the large product in each of their formats."""
    points = []
    for number_format in sorted({entry["format"] for entry in manifest["programs"]}):
        seconds = timed(_product(ceiling, number_format), rounds, steps)
        entry = {"kind": "matmul", "num_experts": 0, "format": number_format}
        points.append(point(entry, seconds, 2 * ceiling**3))
    for entry in manifest["programs"]:
        size = {**manifest["size"], "num_experts": entry["num_experts"]}
        step = _program_step(directory / entry["file"], entry["kind"], size)
        points.append(point(entry, timed(step, rounds, steps), moe_layer_worker.flops(size)))
        print(f"{entry['file']}: {1e3 * points[-1]['seconds']:.2f} ms", file=sys.stderr, flush=True)
    return points


def torch_points(args: Flags, manifest: dict[str, Any]) -> list[Point]:
    """Times PyTorch's contenders at the sizes of the programs; leaves out, and names, those that fail."""
    script = Path(__file__).parent.parent / "peers" / "moe_layer_torch_gpu.py"
    routed = [e for e in manifest["programs"] if e["kind"] != "dense"]
    wanted = sorted({(e["num_experts"], e["format"]) for e in routed})
    points = []
    for kind in TORCH_KINDS:
        alone = kind == "torch_matmul"
        for number, number_format in {(0, f): None for _, f in wanted} if alone else wanted:
            size = {**manifest["size"], "num_experts": number, "ceiling": args.ceiling}
            job = {"rounds": args.rounds, "steps": args.steps, "format": number_format, **size}
            command = [args.torch, str(script), kind, json.dumps(job)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                why = (done.stderr.strip().splitlines() or ["no message"])[-1]
                print(f"left out: {kind}, E={number}, {number_format}: {why}", file=sys.stderr)
                continue
            seconds = json.loads(done.stdout.strip().splitlines()[-1])["seconds"]
            entry = {"kind": kind, "num_experts": number, "format": number_format}
            num_flops = 2 * args.ceiling**3 if alone else moe_layer_worker.flops(size)
            points.append(point(entry, seconds, num_flops))
    return points


def point(entry: dict[str, Any], seconds: Sequence[float], num_flops: int) -> Point:
    """The figures of one contender at one size."""
    median = statistics.median(seconds)
    fields = {name: entry[name] for name in ("kind", "num_experts", "format")}
    return {**fields, "seconds": median, "rounds": list(seconds), "flops": num_flops}


def timed(step: Callable[[], Any], rounds: int, steps: int) -> list[float]:
    """Seconds of one step, for each round of `steps` that the device has in its queue together."""
    import jax

    for _ in range(_WARM_UP):
        jax.block_until_ready(step())
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        results = [step() for _ in range(steps)]
        jax.block_until_ready(results)
        found.append((time.perf_counter() - began) / steps)
    return found


def table(result: dict[str, Any]) -> str:
    """Markdown, a table for each format: milliseconds and the share of the large product, by number of experts."""
    device, size = result["device"], result["size"]
    lines = [
        f"{device['kind']} ({device['platform']}), M={size['model_dim']}, H={size['hidden_dim']}, "
        f"{size['groups']} groups of {size['group_size']} tokens."
    ]
    if device["platform"] != "gpu":
        lines.append("Not run on a GPU.")
    for number_format in sorted({p["format"] for p in result["points"]}):
        points = [p for p in result["points"] if p["format"] == number_format]
        lines += ["", _format_table(number_format, points, device["data_sheet_flops"])]
    return "\n".join(lines)


def _format_table(number_format: str, points: list[Point], data_sheet: float | None) -> str:
    products = [p for p in points if p["kind"].endswith("matmul")]
    peak = max(p["flops"] / p["seconds"] for p in products)
    experts = sorted({p["num_experts"] for p in points if _is_routed(p)})
    sheet = ""
    if number_format == "bfloat16" and data_sheet:
        sheet = f"; the data sheet's peak is {data_sheet / 1e12:.0f}"
    about = f"{number_format}: 100% is {peak / 1e12:.3g} TFLOP/s, the fastest large product{sheet}."
    heads = [f"{what}, E={e}" for what in ("ms", "%") for e in experts]
    rows = []
    for kind, label in NAMES.items():
        own = [p for p in points if p["kind"] == kind]
        if not own:
            continue
        by_experts = {e: p for p in own for e in ([p["num_experts"]] if _is_routed(p) else experts)}
        cells = [by_experts.get(e) for e in experts]
        milliseconds = [f"{1e3 * p['seconds']:.3g}" if p else "-" for p in cells]
        shares = [f"{100 * p['flops'] / p['seconds'] / peak:.3g}" if p else "-" for p in cells]
        rows.append([label, *milliseconds, *shares])
    return f"{about}\n\n{markdown(Table(words('', *heads), rows))}"


def _is_routed(found: Point) -> bool:
    """Whether a contender has experts; a dense layer and a product cost the same whatever their number."""
    return found["kind"] not in ("dense", "matmul", "torch_matmul")


def _device() -> dict[str, Any]:
    import jax

    from lingvo_moe.analysis.plans.machines.peaks import peak_flops

    first = jax.devices()[0]
    kind = first.device_kind
    return {"kind": kind, "platform": first.platform, "data_sheet_flops": peak_flops(kind)}


def _program_step(path: Path, kind: str, size: dict[str, Any]) -> Callable[[], Any]:
    """Compiles a program for the first device; returns a function that runs it once and does not wait."""
    from lingvo_moe.core.engine.lowering.program import Program
    from lingvo_moe.core.engine.lowering.specs import TensorSpec
    from lingvo_moe.core.engine.pjrt import PjrtEngine

    program = Program.Load(str(path))
    engine = PjrtEngine(program.mesh)
    compiled = engine.Compile(program)
    trees = [
        tree.Transform(lambda v: engine.PutLeaf(v, TensorSpec(v.shape, "float32")))
        for tree in moe_layer_worker.arguments(kind, size)
    ]
    return lambda: compiled(*trees).Flatten()


def _product(size: int, number_format: str) -> Callable[[], Any]:
    import jax
    import jax.numpy as jnp

    a, b = (jax.random.normal(jax.random.key(i), (size, size), number_format) for i in range(2))
    product = jax.jit(jnp.matmul)
    return lambda: product(a, b)


if __name__ == "__main__":
    _cli.run(main)
