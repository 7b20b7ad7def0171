"""Is the strategy that tools.parallelize would find the best one? Compiles, and runs, every layout of a tiny model.

    python -m benchmarks.strategies --model=mt.M4Tiny --topology=v5e:2x4

Every layout of the model over the machine's devices is compiled for it, with the whole state on each device and full
recomputation; --run also runs each on as many virtual CPU devices. Prints the rank correlations of estimates, compiled
and measured seconds, and by how much the layout with the best estimate, and the best of the first few, miss the best
compiled one.
"""

from collections.abc import Sequence
from typing import Any

from lingvo_moe.core.config import checks
from lingvo_moe.core.console.flags import Flags
from tools import _cli

# A layout's name, and its seconds by estimate, by the compiled program, and measured.
_Row = tuple[str, float, float, float | None]


def define_flags() -> Flags:
    """The command's flags."""
    flags = Flags("python -m benchmarks.strategies", __doc__)
    flags.DEFINE_string("model", "mt.M4Tiny", "the experiment")
    flags.DEFINE_override()
    flags.DEFINE_string("topology", "v5e:2x4", "the machine that is compiled for")
    flags.DEFINE_boolean("run", False, "whether each layout also runs on virtual CPU devices")
    flags.DEFINE_integer(
        "first", 6, "the best estimates, of which the best is also shown", checks.SIZE
    )
    _cli.define_cache_flag(flags)
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    return _cli.attempt_compiling("strategies", lambda: _run(args))


def _run(args: Flags) -> int:
    from lingvo_moe.analysis.plans.machines.machine import parse_machine

    machine = parse_machine(args.topology)
    with _cli.CompilerProgress() as progress:
        _cli.load_tensorflow()
        _cli.request_devices(machine.num_devices)
        rows = progress.Watch(lambda: _rows(args, machine, progress))
    if not rows:
        _cli.say(f"strategies: no layout of {args.model} could be compiled for {args.topology}")
        return 1
    _show(args, rows)
    return 0


def _rows(args: Flags, machine: Any, say: Any) -> list[_Row]:
    """Every layout that can be compiled."""
    from lingvo_moe.analysis.plans import step_plan
    from lingvo_moe.analysis.plans.measuring import measured_step
    from lingvo_moe.analysis.search import parallelizing
    from lingvo_moe.analysis.search.result_cache import cached_plan
    from lingvo_moe.analysis.search.strategies.candidate import Candidate
    from lingvo_moe.analysis.search.strategies.estimates import Correction
    from lingvo_moe.analysis.search.strategies.mesh_layout import layouts
    from lingvo_moe.analysis.search.strategies.space import Space
    from lingvo_moe.analysis.search.strategies.workload import read_workload
    from lingvo_moe.core.config import registry

    params = registry.GetParams(args.model, args.model_params_override)
    work = read_workload(params)
    estimates = Space(params, work, machine).estimator
    cache = _cli.plan_cache(args.cache_dir)
    found: list[_Row] = []
    for layout in layouts(work, machine.num_devices):
        candidate = Candidate(layout, micro_batches=layout.stages)
        override = parallelizing.joined(args.model_params_override, candidate.Overrides())
        say(f"{len(found) + 1}: {candidate}")
        request = step_plan.Request(args.model, args.topology, override)
        try:
            plan = cached_plan(request, cache, say)
            seconds = None
            if args.run:
                one = measured_step(args.model, override, layout.mesh, 2**34, "error")
                seconds = one["time"] and one["time"]["step_seconds"]
        except ValueError as e:
            _cli.say(f"{candidate}: {e}")
            continue
        if plan["time"] is None:
            _cli.say(f"{candidate}: does not fit {args.topology}")
            continue
        estimate = estimates.Of(candidate).Seconds(Correction())
        found.append((str(candidate), estimate, plan["time"]["step_seconds"], seconds))
    return found


def _show(args: Flags, rows: list[_Row]) -> None:
    from scipy.stats import spearmanr

    from lingvo_moe.core.console import units
    from lingvo_moe.core.pages.tables import Table, numbers, show, words

    columns = words("layout") + numbers("estimate", "compiled", "measured")
    ordered = sorted(rows, key=lambda row: row[2])
    show(Table(columns, [[name, *map(units.duration, times)] for name, *times in ordered]))
    by_estimate = sorted(rows, key=lambda row: row[1])
    best = min(row[2] for row in rows)
    print(f"layouts: {len(rows)}")
    print(f"best estimate, compiled: {by_estimate[0][2] / best:.3f} times the best")
    few = min(row[2] for row in by_estimate[: args.first])
    print(f"best of the first {args.first} estimates, compiled: {few / best:.3f} times the best")
    _, estimated, compiled, measured = zip(*rows, strict=True)
    print(
        f"rank correlation, estimated and compiled: {spearmanr(estimated, compiled).statistic:.3f}"
    )
    if args.run:
        print(
            f"rank correlation, compiled and measured: {spearmanr(compiled, measured).statistic:.3f}"
        )
        print(
            f"rank correlation, estimated and measured: {spearmanr(estimated, measured).statistic:.3f}"
        )


if __name__ == "__main__":
    _cli.run(main)
