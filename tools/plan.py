"""Says what a training step needs on a TPU slice, and how long it should take, without any TPU.

    python -m tools.plan --model=mt.M4MoE2048E36L --topology=v3:32x32
    python -m tools.plan --model=mt.M4MoE2048E36L --topology=v5p --output=plan.json --html=plan.html
    python -m tools.plan --compare=plan.json,other.json

The step is the trainer's own, compiled by the real TPU compiler for a machine that is not there.
Memory, operations and collectives are what the compiler made; times are estimates. A generation
without a size, e.g. --topology=v5p, looks for the smallest slice that the model fits.
Ends with status 0, 1 or (in flags) 2 for a mistake, 3 where the model does not fit, 130 where it was
interrupted.
"""

import json
from pathlib import Path
from typing import Any

from lingvo_moe.core import checks
from tools import _cli


def make_parser() -> _cli.Parser:
    """The flags."""
    parser = _cli.Parser(prog="python -m tools.plan", description=__doc__)
    add = parser.add_argument
    add("--model", default="", help="experiment, e.g. mt.M4MoE2048E36L")
    add(
        "--topology", default="", help="e.g. v3:32x32, v5p:4x4x8, or v5p for the smallest that fits"
    )
    add("--what", default="train", help="which program: train or decode (default: train)")
    add(
        "--mesh",
        default="",
        help="axis:size,... (default: the experiment's, sized to the topology)",
    )
    add("--model_params_override", default="", help="path=value;path=value, as for the trainer")
    add("--token_budget", type=float, default=1e12, help="tokens of a whole run (default: 1e12)")
    add(
        "--output",
        type=_cli.local_path,
        default="",
        help="write the plan here as JSON (docs/planning.md)",
    )
    add(
        "--html",
        type=_cli.local_path,
        default="",
        help="write a page about it here, or about all that are compared",
    )
    add(
        "--compare",
        type=_cli.local_path,
        default="",
        help="JSON plans, comma-separated, to set in one table beside it",
    )
    add(
        "--cache_dir",
        type=_cli.local_path,
        default=None,
        help="where compiled programs are kept; '' keeps none",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    if bool(args.model) != bool(args.topology):
        parser.error("--model and --topology go together")
    if not args.model and not args.compare:
        parser.error("nothing to do: give --model and --topology, or --compare")
    if args.output and not args.model:
        parser.error("--output is of a new plan: it goes with --model and --topology")
    _cli.check_numbers(parser, args, token_budget=checks.POSITIVE)
    return _cli.run_compiler("plan", run, args)


def run(args: Any) -> int:
    """As main, without turning errors into messages."""
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

    # Files first: what took minutes is not lost for a terminal that has gone.
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
    """A plan that --output wrote. Raises ValueError, naming --compare, where it is none."""
    try:
        plan = json.loads(Path(path).read_text("utf-8"))
    except OSError as e:
        raise ValueError(f"--compare={path}: {e.strerror}") from None
    except ValueError as e:
        raise ValueError(f"--compare={path}: not JSON: {e}") from None
    if not isinstance(plan, dict) or plan.get("version") != 1 or "memory" not in plan:
        raise ValueError(f"--compare={path}: no plan of version 1, as --output writes it")
    return plan


def planned(args: Any) -> dict[str, Any]:
    """The plan of the flags, with progress on standard error."""
    with _cli.Progress() as progress:
        progress("loading TensorFlow and the compiler")
        return progress.Watch(lambda: make(args, progress))


def make(args: Any, say: Any) -> dict[str, Any]:
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
    )
    if ":" in args.topology:
        return planning.make_plan(request, cache, say)
    return planning.smallest_slice(request, cache, say)


if __name__ == "__main__":
    _cli.run(main)
