"""Finds how a model should lie on the devices of a machine, and writes that down as a strategy file.

    python -m tools.parallelize --model=mt.M4MoE128E36L --topology=v5p:4x4x4 --output=strategy.txt
    python -m tools.parallelize --model=mt.T96L --topology=h100 --objective=smallest
    python -m lingvo_moe.trainer --model=mt.M4MoE128E36L --strategy=strategy.txt ...

Mesh, sharding of weights and activations, stages of a pipeline, sharded state, recomputation, offload where nothing
else fits, and, if it is allowed, the type of activations are searched: all combinations are estimated, the best few are
compiled for the machine, and the winner is run, shrunk, against one device. The machine is not needed. The exit status
is 0, 1 or (in flags) 2 for a mistake, 3 where no strategy fits, 130 after Ctrl-C.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lingvo_moe.analysis.search.strategies.objectives import OBJECTIVES, SPEED
from lingvo_moe.core.config import checks
from lingvo_moe.core.console.flags import Flags, same_place
from lingvo_moe.training.flags import define_experiment_flag

from . import _cli

if TYPE_CHECKING:  # it imports TensorFlow
    from lingvo_moe.analysis.search.parallelizing import Found

# Virtual devices for the winner's run: two along each axis of a layout.
_VERIFYING = 16
_MOST_DEVICES = 64


def define_flags() -> Flags:
    flags = Flags("python -m tools.parallelize", __doc__)
    define_experiment_flag(flags, "experiment, e.g. mt.M4MoE2048E36L")
    flags.DEFINE_string(
        "topology",
        "",
        "e.g. v3:32x32, v5p:4x4x4*2 or h100:32x8; v5p or h100 alone where --objective chooses the machine",
    )
    flags.DEFINE_integer(
        "devices",
        None,
        "instead of --topology: virtual devices of this machine's CPU; the best strategies are measured there",
        checks.Integer(1, _MOST_DEVICES),
    )
    flags.DEFINE_enum(
        "objective",
        SPEED,
        OBJECTIVES,
        "speed: the shortest step on the machine; smallest: the smallest machine that fits, and the shortest step "
        "there; chip_days: the machine with the fewest chip-seconds a step. The batch is the experiment's",
    )
    flags.DEFINE_list(
        "activations",
        (),
        "types of activations that are allowed beside the experiment's own, e.g. bfloat16",
    )
    flags.DEFINE_float(
        "memory", 0.0, "GiB of a device that may be used (default: all)", checks.NOT_NEGATIVE
    )
    flags.DEFINE_integer("compiles", 6, "programs that are compiled at most", checks.SIZE)
    flags.DEFINE_float(
        "minutes",
        10.0,
        "no program is begun that should end, and be verified, after these; the first one always is",
        checks.POSITIVE,
    )
    flags.DEFINE_boolean("verify", True, "whether the winner is run, shrunk, against one device")
    flags.DEFINE_override()
    flags.DEFINE_path("output", "", "write the strategy to this file")
    flags.DEFINE_path("json", "", "write all that was compiled, with its plans, to this file")
    _cli.define_cache_flag(flags)
    _cli.define_known_faults_flag(flags)
    flags.Refuse(["output", "json"], same_place)
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    if bool(args.topology) == (args.devices is not None):
        args.Fail("give one of --topology and --devices")
    return _cli.attempt_compiling("parallelize", lambda: run(args))


def run(args: Flags) -> int:
    """Searches, prints and writes what the flags ask for; returns the exit status."""
    _cli.check_output_files(args, "output", "json")
    cache = _cli.plan_cache(args.cache_dir)
    with _cli.CompilerProgress() as progress:
        _cli.load_tensorflow()
        if args.devices or args.verify:
            _cli.request_devices(max(args.devices or 0, _VERIFYING if args.verify else 0))
        from lingvo_moe.analysis.search.parallelizing import NoneFits

        try:
            outcome = progress.Watch(lambda: searched(args, cache, progress))
        except NoneFits as e:
            _cli.say(f"parallelize: {e}")
            return 3
    write(args, outcome)
    show(outcome)
    if args.output or args.json:
        command = f"python -m lingvo_moe.trainer --model={args.model} --strategy={args.output}"
        _cli.made(*filter(None, (args.output, args.json)), next=command if args.output else "")
    return 0


def searched(args: Flags, cache: Path | None, say: Callable[[str], None]) -> "Found":
    """The search that the flags ask for."""
    from lingvo_moe.analysis.search import parallelizing

    search = parallelizing.Search(
        model=args.model,
        topology=args.topology,
        devices=args.devices or 0,
        override=args.model_params_override,
        dtypes=args.activations,
        objective=args.objective,
        memory=round(args.memory * 2**30),
        compiles=args.compiles,
        seconds=60 * args.minutes,
        known_faults=args.known_faults,
        verify=args.verify,
    )
    return parallelizing.find(search, cache, say)


def write(args: Flags, outcome: "Found") -> None:
    """Writes the files that the flags ask for."""
    from lingvo_moe.core.files import files

    if args.output:
        files.write_atomic(args.output, outcome.ToText().encode())
    if args.json:
        files.write_json(args.json, outcome.ToJson())


def show(outcome: "Found") -> None:
    """Prints the ranking, then the strategy."""
    from lingvo_moe.core.console import units
    from lingvo_moe.core.pages import tables

    rows = []
    for tried, why in outcome.Ranked():
        plan = tried.plan
        seconds = (plan["time"] if plan else None) or {}
        needed = plan["memory"]["needed"] if plan else None
        step, network = seconds.get("step_seconds"), seconds.get("collective_seconds")
        times = map(units.duration, (step, network, tried.seconds))
        rows.append([tried.name, units.size(needed), *times, why])
    columns = tables.words("strategy") + tables.numbers("memory", "step", "network", "estimate")
    print(
        f"{outcome.search.model} on {outcome.machine.name}: {outcome.candidates[0]} candidates, of which "
        f"{outcome.candidates[1]} may fit; {len(outcome.tried)} compiled"
    )
    tables.show(tables.Table(columns + tables.words(""), rows))
    if outcome.ended:
        print(f"{outcome.ended}.")
    print(outcome.ToText(), end="")


if __name__ == "__main__":
    _cli.run(main)
