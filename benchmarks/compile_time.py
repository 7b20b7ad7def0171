"""Does compile time depend on the number of devices? Times the training step for 8 to 2048 of them.

    python -m benchmarks.compile_time

Lowers and compiles the 36-layer model with as many experts as devices (the paper's figure 2) for five
TPU v3 slices: each time in a fresh process and without a cache, one after the other, from few devices
to many and back. Writes docs/plans/compile_time.json. About ten compiles of a minute or two; on a busy
machine the figures mean little.
"""

import json
import os
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lingvo_moe.core import files
from reproduction import goldens, making
from reproduction.requests import COMPILED, REQUESTS
from tools import _cli

PLANS = Path(__file__).resolve().parent.parent / "docs" / "plans"
_MEASURED = ("lower_seconds", "compile_seconds", "program_bytes")


def main(argv: list[str] | None = None) -> int:
    parser = _cli.Parser(prog="python -m benchmarks.compile_time", description=__doc__)
    add = parser.add_argument
    add("--rounds", type=int, default=2, help="times that each is compiled (%(default)s)")
    add("--devices", default="", help=f"some of {', '.join(map(str, COMPILED))}, comma-separated")
    add(
        "--output",
        type=_cli.local_path,
        default=str(PLANS / f"{goldens.COMPILE_TIME}.json"),
        help="(%(default)s)",
    )
    args = parser.parse_args(argv)
    _cli.check_at_least(parser, args, rounds=1)
    devices = _cli.names(args.devices) or tuple(map(str, COMPILED))
    if not set(devices) <= set(map(str, COMPILED)):
        parser.error(f"--devices={args.devices}: some of {', '.join(map(str, COMPILED))}")
    try:
        _cli.check_output_file(args.output)
        result = run([int(d) for d in devices], args.rounds)
    except (ValueError, OSError) as e:
        print(f"compile_time: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ncompile_time: interrupted; nothing was written", file=sys.stderr)
        return 130
    files.write_atomic(args.output, (goldens.to_text(goldens.compact(result))).encode())
    tell(result)
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
    from lingvo_moe import planning
    from lingvo_moe.core import registry
    from lingvo_moe.core.engine import aot
    from lingvo_moe.core.engine.steps import lower_step

    request = planning.Request(**asdict(REQUESTS[name]))
    devices = aot.devices_of(request.topology)  # loads the compiler
    params = registry.GetParams(request.model, request.override)
    step, _ = planning.describe_job(request, params, params.task.Instantiate())
    mesh = planning.planned_mesh(params, len(devices))
    started = time.monotonic()
    program = lower_step(step, mesh)
    lower_seconds = time.monotonic() - started
    compiled = aot.compile_for_topology(program, request.topology)
    measured = {
        "lower_seconds": lower_seconds,
        "compile_seconds": compiled.compile_seconds,
        "program_bytes": len(program.exported),
    }
    files.write_atomic(path, json.dumps(measured).encode())


def host() -> str:
    """This machine, in words."""
    cores = len(os.sched_getaffinity(0))
    with open("/proc/cpuinfo", encoding="ascii", errors="replace") as info:
        names = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    return f"{cores} CPU cores" + (f" ({names[0]})" if names else "")


def tell(result: dict[str, Any]) -> None:
    """Prints medians, and the last by the first."""
    first, last = result["entries"][0], result["entries"][-1]
    for entry in result["entries"]:
        figures = ", ".join(f"{key} {entry[key]:,.1f}" for key in _MEASURED)
        print(f"{entry['devices']:5} devices: {figures}")
    ratios = ", ".join(f"{key} {last[key] / first[key]:.2f}" for key in _MEASURED)
    print(f"{last['devices']} by {first['devices']} devices: {ratios}")


if __name__ == "__main__":
    sys.exit(main())
