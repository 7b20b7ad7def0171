"""--strategy=auto: searches a strategy for the devices here before a run begins, and keeps it with the run."""

from pathlib import Path

from lingvo_moe.core import files
from lingvo_moe.core.command import say
from lingvo_moe.core.flags import Flags
from lingvo_moe.core.strategies.strategy_file import AUTO
from lingvo_moe.trainer_checks import UsageError

_FILE = "strategy.txt"


def with_found_strategy(args: Flags) -> None:
    """Puts the file of a strategy that is found in the place of --strategy=auto.

    The file is in --logdir. A run that is resumed takes the one that is there.

    Raises:
        UsageError: flags that do not go with a search.
        StrategyError: nothing fits.
    """
    if args.strategy != AUTO:
        return
    _check(args)
    path = Path(args.logdir) / _FILE
    if not path.exists():
        _search(args, path)
    args["strategy"].value = str(path)


def _check(args: Flags) -> None:
    given = f"--strategy={AUTO}"
    if args.mode != "sync":
        raise UsageError(
            f"{given}: goes with --mode=sync; give {args.logdir or '--logdir'}/{_FILE} otherwise"
        )
    if not args.logdir:
        raise UsageError(f"{given}: --logdir is needed, where the strategy is kept")
    if args.mesh:
        raise UsageError(f"{given}: chooses the mesh; leave out --mesh={args.mesh}")
    if args.num_processes > 1:
        raise UsageError(
            f"{given}: needs one process; for several, run python -m tools.parallelize first and give its file"
        )
    if args.engine not in (None, "pjrt"):
        raise UsageError(f"{given}: goes with --engine=pjrt, not {args.engine}")


def _search(args: Flags, path: Path) -> None:
    from lingvo_moe.core.engine import devices
    from lingvo_moe.parallelizing import Search, find
    from lingvo_moe.trainer import find_devices

    if args.num_devices:
        devices.request_cpu_devices(args.num_devices)
    find_devices()
    count = devices.device_count()
    search = Search(
        model=args.model,
        devices=count,
        override=args.model_params_override,
        known_faults=args.known_faults,
        # Other devices round differently than the one that the step would be compared with.
        verify=devices.runs_on_cpu("pjrt"),
    )
    found = find(search, None, say)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_atomic(path, found.ToText().encode())
    say(f"--strategy={AUTO}: {found.best.name}; see {path}")
