"""Runs a small copy of a model's training step over a mesh and on one device, and compares all that it computes.

    python -m tools.verify --model=mt.M4Tiny
    python -m tools.verify --model=mt.M4MoE2048E36L --mesh=expert:8
    python -m tools.verify --model=mt.T96L --mesh=batch:2,model:4

XLA's SPMD partitioner computes a few programs wrongly, without a word. This needs to know no pattern: the step is
the trainer's own, annotations included, with the experiment's sizes shrunk to the smallest ones that the mesh
divides. Virtual CPU devices stand for the mesh. Loss, metrics, the gradient of every variable and the new state
are compared; the first tensor that differs is named. Where none does, the collectives of the step's program are
counted. The exit status is 0, 1 where something differs or in a
mistake, 2 for a mistake in flags, 130 after Ctrl-C.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from lingvo_moe.core.console.flags import Flags
from lingvo_moe.training.checks import strategy_override
from lingvo_moe.training.flags import define_experiment_flag, define_strategy_flag

from . import _cli

if TYPE_CHECKING:  # it imports NumPy
    from lingvo_moe.analysis.explain.verifying import Verified
    from lingvo_moe.core.sharding import Mesh

_MOST_DEVICES = 64  # virtual devices, all of which run a step


def define_flags() -> Flags:
    flags = Flags("python -m tools.verify", __doc__)
    define_experiment_flag(flags, "experiment, e.g. mt.M4Tiny")
    _cli.define_mesh_flags(flags, _MOST_DEVICES)
    flags.DEFINE_override()
    define_strategy_flag(flags)
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    return _cli.attempt_compiling("verify", lambda: run(args))


def run(args: Flags) -> int:
    """Verifies the model and prints what was compared; returns the exit status."""
    with _cli.CompilerProgress() as progress:
        outcomes = progress.Watch(lambda: list(verified(args, progress)))
    for mesh, outcome in outcomes:
        print(f"{args.model} over mesh {mesh}: {outcome}")
    return 0


def verified(args: Flags, say: Callable[[str], None]) -> "Iterator[tuple[Mesh, Verified]]":
    """The mesh, or that of each layout, and what was compared on it."""
    _cli.load_tensorflow()
    from lingvo_moe.analysis.explain import verifying
    from lingvo_moe.analysis.search.layouts import layouts, proposing
    from lingvo_moe.core.config import registry
    from lingvo_moe.core.task.meshes import check_divisible

    overrides = [strategy_override(args, registry.AsDefined(args.model))]
    if args.layout:
        overrides = list(
            layouts(
                args.layout, args.model, overrides[0], args.num_devices or _cli.DEVICES
            ).values()
        )
    for override in overrides:
        mesh = _cli.mesh_of(args, registry.GetParams(args.model, override))
        if not 1 < mesh.size <= _MOST_DEVICES:
            raise ValueError(
                f"mesh {mesh} has {mesh.size} devices; give --mesh of 2 to {_MOST_DEVICES}"
            )
        _cli.request_devices(mesh.size)
        with proposing(args.With(num_devices=mesh.size), mesh.size):
            small = verifying.shrunk(args.model, mesh, override)
            check_divisible(small, small.task.Instantiate(), mesh)
        say(f"running a small train step of {args.model} over mesh {mesh} and on one device")
        yield mesh, verifying.verify_model(args.model, mesh, override)


if __name__ == "__main__":
    _cli.run(main)
