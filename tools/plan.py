"""Prints what a training step needs on a TPU slice or a GPU cluster, and how long it should take, without either.

    python -m tools.plan --model=mt.M4MoE2048E36L --topology=v3:32x32
    python -m tools.plan --model=mt.M4MoE2048E36L --topology=h100:64x8
    python -m tools.plan --model=mt.M4MoE2048E36L --topology=v5p --output=plan.json --html=plan.html
    python -m tools.plan --compare=plan.json,other.json
    python -m tools.plan --model=mt.M4MoE512E36L --topology=v3:16x16 --variants='|task.fprop_dtype="bfloat16"'

The step is the trainer's own, compiled by the real TPU or GPU compiler; the device itself is not needed.
Memory, operations and collectives are those of the compiled program; times are estimates. A topology without a size,
e.g. --topology=v5p or --topology=h100, looks for the smallest machine that the model fits. The exit status is
0, 1 or (in flags) 2 for a mistake, 3 where the model does not fit, 130 after Ctrl-C.
"""

import itertools
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lingvo_moe.core import checks
from lingvo_moe.core.flags import Flags, join_overrides
from lingvo_moe.core.partitioner import known_faults
from lingvo_moe.trainer_checks import strategy_override
from lingvo_moe.trainer_flags import define_strategy_flag

from . import _cli


def define_flags() -> Flags:
    """The command's flags."""
    flags = Flags("python -m tools.plan", __doc__)
    flags.DEFINE_string("model", "", "experiment, e.g. mt.M4MoE2048E36L")
    flags.DEFINE_string(
        "topology",
        "",
        "e.g. v3:32x32, v5p:4x4x4*2 (two slices) or h100:32x8 (32 nodes of 8 GPUs); v5p or h100 alone for the smallest "
        "one that fits",
    )
    flags.DEFINE_string("what", "train", "which program: train or decode")
    flags.DEFINE_string(
        "mesh", "", "axis:size,... (default: the experiment's, sized to the topology)"
    )
    flags.DEFINE_override()
    define_strategy_flag(flags)
    flags.DEFINE_float("token_budget", 1e12, "tokens of a whole run", checks.POSITIVE)
    flags.DEFINE_path("output", "", "write the plan to this file as JSON (docs/planning.md)")
    flags.DEFINE_path(
        "html", "", "write a page about this plan, or all compared ones, to this file"
    )
    flags.DEFINE_path(
        "compare", "", "JSON plans, comma-separated, to show in one table with the new one"
    )
    flags.DEFINE_string(
        "variants",
        "",
        "overrides separated by |: plans each, added to --model_params_override, and shows all in one table",
    )
    flags.DEFINE_enum(
        "known_faults", known_faults.ERROR, known_faults.ACTIONS, known_faults.FLAG_HELP
    )
    flags.DEFINE_path("cache_dir", None, "directory for compiled programs; '' keeps none")
    flags.Distinct("output", "html")
    of_new = "output variants what mesh model_params_override strategy token_budget known_faults"
    flags.OnlyWith(f"{of_new} cache_dir", "it is of a new plan", model=True)
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    if bool(args.model) != bool(args.topology):
        args.Fail("--model and --topology go together")
    if not args.model and not args.compare:
        args.Fail("nothing to do: give --model and --topology, or --compare")
    return _cli.attempt_compiling("plan", lambda: run(args))


def run(args: Flags) -> int:
    """Plans, prints and writes what the flags ask for; returns the exit status."""
    variants = args.variants.split("|") if args.variants else [""]
    outputs = output_files(args.output, len(variants)) if args.output else []
    for flag, path in [*(("output", path) for path in outputs), ("html", args.html)]:
        if path:
            _cli.check_output_file(path, f"--{flag}")
    if args.cache_dir:
        _cli.check_output_directory(args.cache_dir, "--cache_dir")
    old = [read_plan(path) for path in _cli.names(args.compare)]
    new = planned(args, variants, outputs) if args.model else []
    plans = new + old
    from rich.console import Console

    from lingvo_moe.core import files
    from lingvo_moe.core.planner import report

    # Files first: minutes of work must not be lost because the terminal is gone.
    if args.html:
        files.write_atomic(args.html, report.html_report(plans).encode())
    console = Console()
    if len(new) == 1:
        report.print_plan(plans[0], console)
    if len(plans) > 1 or not args.model:
        report.print_comparison(plans, console)
    return 0 if all(plan["memory"]["fits"] for plan in new) else 3


def output_files(path: str, count: int) -> list[str]:
    """Where the plans go: `path` or, for several variants, plan-1.json, plan-2.json, ... for plan.json."""
    if count == 1:
        return [path]
    file = Path(path)
    return [str(file.with_name(f"{file.stem}-{i + 1}{file.suffix}")) for i in range(count)]


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


def planned(args: Flags, variants: Sequence[str], outputs: Sequence[str]) -> list[dict[str, Any]]:
    """Makes the plans that the flags ask for, one for each variant, with progress on standard error.

    Each is written to its file of `outputs`, if there is one, before the next is made.
    """
    from lingvo_moe.core import files

    plans = []
    with _cli.Progress() as progress:
        progress("loading TensorFlow and the compiler")
        for variant, path in itertools.zip_longest(variants, outputs):
            plans.append(progress.Watch(partial(make, args, variant, progress)))
            if path:
                files.write_atomic(path, (json.dumps(plans[-1], indent=1) + "\n").encode())
    return plans


def make(args: Flags, variant: str, say: Any) -> dict[str, Any]:
    _cli.load_tensorflow()
    from lingvo_moe import planning

    cache = _cli.plan_cache(args)
    request = planning.Request(
        model=args.model,
        topology=args.topology,
        override=join_overrides(strategy_override(args), variant.strip()),
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
