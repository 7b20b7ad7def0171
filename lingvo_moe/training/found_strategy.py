"""--strategy=auto: searches a strategy for the devices here before a run begins; a resumed run keeps its own."""

from lingvo_moe.analysis.search.strategies.strategy_file import AUTO, PATHS, as_override
from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.console.command import say
from lingvo_moe.core.console.flags import Flags, join_overrides
from lingvo_moe.core.engine.engines import engine_class
from lingvo_moe.core.runs.run_dir import RunDir
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.training.checks import (
    UsageError,
    check_data_dir,
    check_data_exists,
    check_flags,
    full_override,
)
from lingvo_moe.training.same_run import has_begun, with_overrides_of_run


def override_with_strategy(args: Flags, defined: Params) -> str:
    """The override of a start with --strategy=auto: a strategy, what the run in --logdir remembers, and the flags'.

    The strategy is that of the run, if it has begun and its mesh has as many devices as there are; else one that is
    searched.

    `defined` are the Params of --model: see registry.AsDefined.

    Raises:
        UsageError: flags that do not go with a search, or with a run.
        StrategyError: nothing fits.
    """
    from lingvo_moe.analysis.search.parallelizing import check_override
    from lingvo_moe.core.engine import devices

    _check(args)
    check_override(args.model_params_override)
    args = args.With(strategy="")
    override = with_overrides_of_run(args, defined, full_override(args, defined))
    override = registry.without_strategy(override)
    try:
        params = registry.WithOverrides(defined, override)
    except registry.RegistryError:
        check_data_dir(args, defined)
        raise
    check_flags(args, params)
    check_data_exists(args, params)
    if args.num_devices:
        devices.request_cpu_devices(args.num_devices)
    devices.find_devices()
    count = devices.device_count()
    return join_overrides(_of_run(args, count) or _searched(args, override, count), override)


def _check(args: Flags) -> None:
    flag = f"--strategy={AUTO}"
    if args.mode != "sync":
        raise UsageError(f"{flag}: goes with --mode=sync, not with --mode={args.mode}")
    if args.mesh:
        raise UsageError(f"{flag}: chooses the mesh; leave out --mesh={args.mesh}")
    if args.num_processes > 1:
        raise UsageError(
            f"{flag}: needs one process; for several, run python -m tools.parallelize first and give its file"
        )
    if args.engine and not engine_class(args.engine).PJRT:
        raise UsageError(f"{flag}: goes with --engine=pjrt, not {args.engine}")


def _of_run(args: Flags, num_devices: int) -> str:
    """The strategy of the run in --logdir as an override; '' where there is none for so many devices."""
    run_dir = RunDir(args.logdir)
    if args.restart or not run_dir.exists or not has_begun(run_dir):
        return ""
    override = run_dir.experiment["params_override"]
    strategy = {path: value for path, value in registry.split_override(override) if path in PATHS}
    mesh = strategy.get("train.mesh")
    if not mesh or Mesh.parse(mesh, "train.mesh").size != num_devices:
        return ""
    say(f"--strategy={AUTO}: that of the run, over mesh {mesh}")
    return as_override(strategy, f"{run_dir.path}")


def _searched(args: Flags, override: str, num_devices: int) -> str:
    from lingvo_moe.analysis.search.parallelizing import Search, find

    search = Search(
        model=args.model,
        devices=num_devices,
        override=override,
        known_faults=args.known_faults,
        # Other devices round differently than the one that the step would be compared with.
        verify=engine_class("pjrt").RunsOnCpu(),
    )
    outcome = find(search, None, say)
    best = outcome.best
    say(f"--strategy={AUTO}: {best.name}")
    if outcome.ended:
        say(f"{outcome.ended}, as flags of tools.parallelize, whose file --strategy takes")
    return as_override(best.overrides, "the search")
