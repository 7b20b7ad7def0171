"""Prints what a training step needs on a TPU slice or a GPU cluster, and how long it should take, without either.

    python -m tools.plan --model=mt.M4MoE2048E36L --topology=v3:32x32
    python -m tools.plan --model=mt.M4MoE2048E36L --topology=v3:32x32,v5p:8x8x8,h100:32x8 --price=v5p:4.2,h100:3
    python -m tools.plan --model=mt.M4MoE2048E36L --topology=v5p --output=plan.json --html=plan.html
    python -m tools.plan --what=serve --model=lm.OLMoE1B7B --topology=v5e:2x4 --prompt=1024 --reply=256 --slo=200ms/30ms
    python -m tools.plan --compare=plan.json,other.json
    python -m tools.plan --validate --output=errors.json
    python -m tools.plan --model=mt.M4MoE512E36L --topology=v3:16x16 --variants='|task.fprop_dtype="bfloat16"'

The step is the trainer's own, compiled by the real TPU or GPU compiler; the device itself is not needed.
Memory, operations and collectives are those of the compiled program; times are estimates, which --validate holds
against steps that others measured. A topology without a size, e.g. --topology=v5p or --topology=h100, looks for the
smallest machine that the model fits. The exit status is 0, 1 or (in flags) 2 for a mistake, 3 where the model does
not fit, 130 after Ctrl-C and 143 after SIGTERM.
"""

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lingvo_moe.analysis.plans.machines.machine import parse_machine
from lingvo_moe.analysis.plans.machines.slices import machines
from lingvo_moe.analysis.plans.prices import check_prices, kind_of, priced, read_limits, read_prices
from lingvo_moe.core.config import checks, registry
from lingvo_moe.core.console.command import say
from lingvo_moe.core.console.flags import Flags, same_place
from lingvo_moe.core.console.mistakes import is_refusal, places
from lingvo_moe.core.topology_names import TopologyName
from lingvo_moe.training.checks import strategy_override
from lingvo_moe.training.flags import define_experiment_flag, define_strategy_flag

from . import _cli, _published

if TYPE_CHECKING:  # it imports TensorFlow
    from lingvo_moe.analysis.plans.step_plan import Lowering

PLANS = Path(__file__).resolve().parent.parent / "docs" / "plans"  # in a checkout


def define_flags() -> Flags:
    flags = Flags("python -m tools.plan", __doc__)
    define_experiment_flag(flags, "experiment, e.g. mt.M4MoE2048E36L", required=False)
    _published.define_from_model_flag(flags)
    flags.DEFINE_list(
        "topology",
        (),
        "e.g. v3:32x32, v5p:4x4x4*2 (two slices) or h100:32x8 (32 nodes of 8 GPUs); v5p or h100 alone for the smallest "
        "one that fits; several, comma-separated, are shown in one table",
    )
    flags.DEFINE_parsed(
        "price",
        (),
        "of a chip-hour, e.g. v5p:4.2,h100:3: shows what steps and the budget cost",
        read_prices,
    )
    flags.DEFINE_string(
        "what",
        "train",
        "which program: train; decode, a step of it; prefill, what comes before the first one; serve: both, by layout "
        "and batch (docs/planning.md)",
    )
    _define_serving_flags(flags)
    flags.DEFINE_string(
        "mesh", "", "axis:size,... (default: the experiment's, sized to the topology)"
    )
    flags.DEFINE_override()
    define_strategy_flag(flags)
    flags.DEFINE_float("token_budget", 1e12, "tokens of a whole run", checks.POSITIVE)
    flags.DEFINE_boolean(
        "validate",
        False,
        "show estimates beside published steps, from the recorded plans of a checkout (docs/validation.md)",
    )
    flags.DEFINE_path(
        "output",
        "",
        "write the plan, or the validated steps, to this file as JSON (docs/plan_json.md)",
    )
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
    _cli.define_known_faults_flag(flags)
    _cli.define_cache_flag(flags)
    flags.Refuse(["output", "html"], same_place)
    flags.OnlyWith(
        "variants mesh layout strategy token_budget compare html",
        "plans of serving have layouts of their own",
        what=("train", "decode", "prefill"),
    )
    of_new = "variants what mesh layout model_params_override strategy token_budget known_faults"
    flags.OnlyWith(f"{of_new} cache_dir", "it is of a new plan", model=True)
    flags.OnlyWith(
        "from model topology compare html price", "it takes recorded plans", validate=False
    )
    return flags


def _define_serving_flags(flags: Flags) -> None:
    """Defines the sizes of what is decoded, and what a plan of serving takes beside them."""
    flags.DEFINE_integer("prompt", 0, "tokens of a prompt, or of a text to translate", checks.COUNT)
    flags.DEFINE_integer("reply", 0, "new tokens, for which caches have room", checks.COUNT)
    flags.DEFINE_numbers(
        "batches",
        (),
        "rows that are served at once; default: 1, 8, 32, 128, ... until the memory is full",
        checks.SIZE,
    )
    flags.DEFINE_parsed(
        "slo",
        None,
        "the longest times to the first token and between tokens, e.g. 200ms/30ms: marks the largest batch that keeps "
        "both",
        read_limits,
    )
    flags.OnlyWith("prompt reply", what=("serve", "decode", "prefill"))
    flags.OnlyWith("batches slo", what="serve")


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    if args.validate:
        if not PLANS.is_dir():
            args.Fail(
                "--validate reads the recorded plans docs/plans of the repository, which an installed package does not "
                "have; run it in a checkout"
            )
        return _cli.attempt("plan", lambda: validate(args.output))
    if args.output and not args.model:
        args.Fail(f"--output={args.output} goes with --model or --validate")
    if bool(args.model) != bool(args.topology):
        args.Fail(f"--{'from' if args['from'].value else 'model'} and --topology go together")
    if args.what == "serve" and not (args.prompt and args.reply):
        args.Fail("--what=serve goes with --prompt and --reply, e.g. --prompt=1024 --reply=256")
    if not args.model and not args.compare:
        args.Fail("nothing to do: give --model and --topology, or --compare")
    work = serve if args.what == "serve" else run
    return _cli.attempt_compiling("plan", lambda: work(args))


def validate(output: str) -> int:
    """Prints estimates beside published steps, and writes them to a file, if there is one; returns the exit status."""
    _cli.load_tensorflow()
    from lingvo_moe.core.files import files
    from lingvo_moe.core.pages import tables
    from lingvo_moe.reproduction import validation

    if output:
        _cli.check_output_file(output)
    rows = validation.held(PLANS)
    for table in (validation.table(rows), validation.errors(rows), validation.ratios(rows)):
        print(*tables.lines(table), sep="\n", end="\n\n")
    if output:
        files.write_json(output, [row.Entry() for row in rows])
        _cli.made(output)
    return 0


def run(args: Flags) -> int:
    """Plans, prints and writes what the flags ask for; returns the exit status."""
    variants = args.variants.split("|") if args.variants else [""]
    check_topologies(args.topology)
    cases = list(itertools.product(args.topology, variants))
    outputs = output_files(args.output, len(cases)) if args.output else []
    for path in outputs:
        _cli.check_output_file(path)
    _cli.check_output_files(args, "html")
    prices, old = dict(args.price), [read_plan(path) for path in _cli.names(args.compare)]
    kinds = [TopologyName.parse(name.lower()).kind for name in args.topology]
    check_prices(prices, [*kinds, *map(kind_of, old)])
    new, failed = planned(args, cases, outputs) if args.model else ([], {})
    plans = [*new, *(priced(plan, prices) for plan in old)]
    from rich.console import Console

    from lingvo_moe.analysis.plans import report
    from lingvo_moe.core.files import files

    # Files first: minutes of work must not be lost because the terminal is gone.
    if args.html:
        files.write_atomic(args.html, report.html_report(plans).encode())
    console = Console()
    if len(new) == 1:
        report.print_plan(plans[0], console)
    if len(plans) > 1 or not args.model:
        report.print_comparison(plans, console)
    written = [path for case, path in zip(cases, outputs) if case not in failed]
    if written or args.html:
        _cli.made(*written, *filter(None, [args.html]))
    for (topology, _), error in failed.items():
        say(f"plan: {topology}: {error}")
    if failed:
        return 1
    return 0 if all(plan["memory"]["fits"] for plan in new) else 3


def serve(args: Flags) -> int:
    """Plans how a model is served, prints a table for each machine; returns the exit status."""
    check_topologies(args.topology)
    prices = dict(args.price)
    check_prices(prices, [TopologyName.parse(name.lower()).kind for name in args.topology])
    outputs = output_files(args.output, len(args.topology)) if args.output else []
    for path in outputs:
        _cli.check_output_file(path)
    cache = _cli.plan_cache(args.cache_dir)
    _cli.load_tensorflow()
    from lingvo_moe.analysis.plans.step_plan import Request
    from lingvo_moe.analysis.search import serving_plan
    from lingvo_moe.core.files import files
    from lingvo_moe.core.pages import tables

    _published.name_experiment(args)
    fit = False
    with _cli.CompilerProgress() as progress:
        for name, path in itertools.zip_longest(args.topology, outputs, fillvalue=""):
            sizes = {"prompt": args.prompt, "reply": args.reply}
            faults = {"known_faults": args.known_faults}
            request = Request(args.model, name, args.model_params_override, **sizes, **faults)
            make = partial(serving_plan.make_serving_plan, request, args.batches, cache, progress)
            plan = progress.Watch(make)
            if path:
                files.write_json(path, plan)
            fit |= any(row["fits"] for row in plan["rows"])
            price = prices.get(TopologyName.parse(name.lower()).kind)
            shown = serving_plan.table(plan, args.slo, price)
            print(
                f"{args.model} on {name}, prompts of {args.prompt}, replies of {args.reply} tokens"
            )
            print(*tables.lines(shown), sep="\n", end="\n\n")
    if outputs:
        _cli.made(*outputs)
    return 0 if fit else 3


def check_topologies(names: Sequence[str]) -> None:
    """Raises PlanError for a name of no machine and no kind of machines, before anything is compiled."""
    for name in names:
        if ":" in name:
            parse_machine(name)
        else:
            machines(name)


def output_files(path: str, count: int) -> list[str]:
    """The files for the plans: `path` or, for several variants, plan-1.json, plan-2.json, ... for plan.json."""
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


def planned(
    args: Flags, cases: Sequence[tuple[str, str]], outputs: Sequence[str]
) -> tuple[list[dict[str, Any]], dict[tuple[str, str], ValueError]]:
    """Makes the plans that the flags ask for, with progress on standard error.

    Args:
        cases: the topology and the override of each plan.
        outputs: a file for each, or none: a plan is written before the next is made.

    Returns:
        The plans, and the cases of those machines among several that cannot be planned for, with the reason.

    Raises:
        ValueError: none can be planned.
    """
    from lingvo_moe.analysis.plans.step_plan import Lowering
    from lingvo_moe.core.files import files

    lowering = Lowering()
    plans, failed = list[dict[str, Any]](), dict[tuple[str, str], ValueError]()
    cache = _cli.plan_cache(args.cache_dir)
    _cli.load_tensorflow()
    _published.name_experiment(args)
    defined = registry.AsDefined(args.model)
    for variant in dict.fromkeys(variant for _, variant in cases):
        # A mistake in any of them is found before the first is compiled.
        registry.WithOverrides(defined, strategy_override(args, defined, variant.strip()))
    with _cli.CompilerProgress() as progress:
        for case, path in zip(cases, outputs or itertools.repeat("")):
            try:
                plan = progress.Watch(partial(make, args, *case, cache, progress, lowering))
            except ValueError as e:
                if len(args.topology) == 1 or (places(e) and not is_refusal(e)):
                    raise
                failed[case] = e
                continue
            plans.append(priced(plan, dict(args.price)))
            if path:
                files.write_json(path, plans[-1])
    if not plans:
        reasons = dict.fromkeys(f"{topology}: {e}" for (topology, _), e in failed.items())
        raise ValueError(f"no machine can be planned for: {'; '.join(reasons)}")
    return plans, failed


def make(
    args: Flags,
    topology: str,
    variant: str,
    cache: Path | None,
    say: Callable[[str], None],
    lowering: "Lowering",
) -> dict[str, Any]:
    """The plan of one machine and one variant."""
    from lingvo_moe.analysis.plans import step_plan
    from lingvo_moe.analysis.search import best_plan
    from lingvo_moe.analysis.search.layouts import command_of, proposing

    override = strategy_override(args, registry.AsDefined(args.model), variant.strip())
    named = args.With(
        topology=(topology,),
        model_params_override=override,
        variants="",
        output="",
        html="",
        compare="",
        price=(),
    )
    request = step_plan.Request(
        model=args.model,
        topology=topology,
        override=override,
        what=args.what,
        mesh=args.mesh,
        token_budget=args.token_budget,
        known_faults=args.known_faults,
    )
    if ":" in topology:
        with proposing(named, parse_machine(topology).num_devices):
            return best_plan.laid_out(args.layout, request, cache, say, lowering)
    try:
        return best_plan.smallest_slice(request, cache, say, args.layout)
    except best_plan.FitsNone as e:
        plain = registry.without_strategy(override)
        other = replace(request, mesh="", override=plain)
        if args.layout or not any(best_plan.slices_to_try(other, "fsdp")):
            raise
        fsdp = named.With(mesh="", strategy="", layout="fsdp", model_params_override=plain)
        command = command_of(fsdp)
        raise ValueError(f"{e}. Try this layout: {command}") from None


if __name__ == "__main__":
    _cli.run(main)
