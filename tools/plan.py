"""Prints what a training step needs on a TPU slice or a GPU cluster, and how long it should take, without either.

    python -m tools.plan --model=mt.M4MoE2048E36L --topology=v3:32x32
    python -m tools.plan --model=mt.M4MoE2048E36L --topology=h100:64x8
    python -m tools.plan --model=mt.M4MoE2048E36L --topology=v5p --output=plan.json --html=plan.html
    python -m tools.plan --compare=plan.json,other.json

The step is the trainer's own, compiled by the real TPU or GPU compiler; the device itself is not needed.
Memory, operations and collectives are those of the compiled program; times are estimates. A topology without a size,
e.g. --topology=v5p or --topology=h100, looks for the smallest machine that the model fits. The exit status is
0, 1 or (in flags) 2 for a mistake, 3 where the model does not fit, 130 after Ctrl-C.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lingvo_moe.core import checks
from lingvo_moe.core.flags import Flags
from lingvo_moe.core.partitioner import known_faults
from tools import _cli


def define_flags() -> Flags:
    """The command's flags."""
    flags = Flags("python -m tools.plan", __doc__)
    flags.DEFINE_string("model", "", "experiment, e.g. mt.M4MoE2048E36L")
    flags.DEFINE_string(
        "topology",
        "",
        "e.g. v3:32x32, or h100:32x8 (32 nodes of 8 GPUs); v5p or h100 alone for the smallest one that fits",
    )
    flags.DEFINE_string("what", "train", "which program: train or decode")
    flags.DEFINE_string(
        "mesh", "", "axis:size,... (default: the experiment's, sized to the topology)"
    )
    flags.DEFINE_override()
    flags.DEFINE_float("token_budget", 1e12, "tokens of a whole run", checks.POSITIVE)
    flags.DEFINE_path("output", "", "write the plan to this file as JSON (docs/planning.md)")
    flags.DEFINE_path(
        "html", "", "write a page about this plan, or all compared ones, to this file"
    )
    flags.DEFINE_path(
        "compare", "", "JSON plans, comma-separated, to show in one table with the new one"
    )
    flags.DEFINE_enum(
        "known_faults", known_faults.ERROR, known_faults.ACTIONS, known_faults.FLAG_HELP
    )
    flags.DEFINE_path("cache_dir", None, "directory for compiled programs; '' keeps none")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    if bool(args.model) != bool(args.topology):
        args.Fail("--model and --topology go together")
    if not args.model and not args.compare:
        args.Fail("nothing to do: give --model and --topology, or --compare")
    if args.output and not args.model:
        args.Fail("--output is for a new plan: it goes with --model and --topology")
    return _cli.attempt_compiling("plan", lambda: run(args))


def run(args: Flags) -> int:
    """Plans, prints and writes what the flags ask for; returns the exit status."""
    for flag in ("output", "html"):
        if path := getattr(args, flag):
            _cli.check_output_file(path, f"--{flag}")
    if args.cache_dir:
        _cli.check_output_directory(args.cache_dir, "--cache_dir")
    plans = [read_plan(path) for path in _cli.names(args.compare)]
    if args.model:
        plans.insert(0, planned(args))
    from rich.console import Console

    from lingvo_moe.core import files
    from lingvo_moe.core.planner import report

    # Files first: minutes of work must not be lost because the terminal is gone.
    if args.output:
        files.write_atomic(args.output, (json.dumps(plans[0], indent=1) + "\n").encode())
    if args.html:
        files.write_atomic(args.html, report.html_report(plans).encode())
    console = Console()
    if args.model:
        report.print_plan(plans[0], console)
    if len(plans) > 1 or not args.model:
        report.print_comparison(plans, console)
    return 0 if not args.model or plans[0]["memory"]["fits"] else 3


def read_plan(path: str) -> dict[str, Any]:
    """Reads a plan that --output wrote. Raises ValueError, naming --compare, for any other file."""
    try:
        plan = json.loads(Path(path).read_text("utf-8"))
    except OSError as e:
        raise ValueError(f"--compare={path}: {e.strerror}") from None
    except ValueError as e:
        raise ValueError(f"--compare={path}: not JSON: {e}") from None
    if not isinstance(plan, dict) or plan.get("version") != 1 or "memory" not in plan:
        raise ValueError(f"--compare={path}: not a plan of version 1, as --output writes it")
    return plan


def planned(args: Flags) -> dict[str, Any]:
    """Makes the plan that the flags ask for, with progress on standard error."""
    with _cli.Progress() as progress:
        progress("loading TensorFlow and the compiler")
        return progress.Watch(lambda: make(args, progress))


def make(args: Flags, say: Any) -> dict[str, Any]:
    _cli.load_tensorflow()
    from lingvo_moe import planning
    from lingvo_moe.core.engine import aot_cache

    cache: Path | None = aot_cache.default_cache_dir()
    if args.cache_dir is not None:
        cache = Path(args.cache_dir) if args.cache_dir else None
    request = planning.Request(
        model=args.model,
        topology=args.topology,
        override=args.model_params_override,
        what=args.what,
        mesh=args.mesh,
        token_budget=args.token_budget,
        known_faults=args.known_faults,
    )
    if ":" in args.topology:
        return planning.make_plan(request, cache, say)
    return planning.smallest_slice(request, cache, say)


if __name__ == "__main__":
    _cli.run(main)
