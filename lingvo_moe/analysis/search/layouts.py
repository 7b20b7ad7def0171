"""--layout: a model's layout by name (strategies/named_layouts.py), and the commands that messages propose."""

import contextlib
import shlex
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lingvo_moe.analysis.search.strategies.named_layouts import FUNCTIONS, named_layout
from lingvo_moe.analysis.search.strategies.strategy_file import AUTO, StrategyError, as_override
from lingvo_moe.core.config import registry
from lingvo_moe.core.console import units
from lingvo_moe.core.console.command import say
from lingvo_moe.core.console.flags import Flags, join_overrides
from lingvo_moe.core.sharding import ShardingError
from lingvo_moe.core.task.meshes import check_divisible, make_mesh

if TYPE_CHECKING:  # it imports TensorFlow
    from lingvo_moe.core.task.base_task import BaseTask


def layouts(name: str, model: str, override: str, count: int) -> dict[str, str]:
    """Overrides that lay an experiment over `count` devices, by the names of the layouts.

    Args:
        name: of one layout; AUTO for all over which the model divides.
        override: as --model_params_override; it comes last, and may change a layout.

    Raises:
        StrategyError, ShardingError: the model has no blocks of equal layers, or does not divide so; for AUTO, in no
            layout.
    """
    task = registry.GetParams(model, override).task
    if task.cls.Strategy(task.cls.Strategy(task).Without()).OpenForms() is None:
        raise StrategyError(
            f"--layout={name}: is for models of equal blocks, which {task.cls.__name__} is not; give --mesh"
        )
    sizes = letter_sizes(task.Instantiate())
    overrides: dict[str, str] = {}
    refusal: ValueError | None = None
    for layout in FUNCTIONS if name == AUTO else [name]:
        try:
            parameters = named_layout(layout, sizes, count).Overrides()
            laid_out = join_overrides(as_override(parameters, f"--layout={layout}"), override)
            params = registry.GetParams(model, laid_out)
            check_divisible(params, params.task.Instantiate(), make_mesh(params, "", count))
        except ValueError as e:
            refusal = e
        else:
            overrides[layout] = laid_out
    if refusal and not overrides:
        raise refusal
    return overrides


def letter_sizes(task: "BaseTask") -> dict[str, set[int]]:
    """The sizes that the dimensions of each letter have in a task's variables."""
    sizes: dict[str, set[int]] = defaultdict(set)
    for spec in task.VariableSpecs().Flatten():
        for letter, size in zip(spec.letters, spec.shape, strict=True):
            sizes[letter].add(size)
    return sizes


def fastest_here(args: Flags, override: str, count: int) -> str:
    """The override of --layout; of AUTO the one whose step is fastest on the devices of this process."""
    from lingvo_moe.analysis.plans.measuring import measured_step
    from lingvo_moe.core.engine.device_memory import memory_of

    overrides = layouts(args.layout, args.model, override, count)
    if args.layout != AUTO:
        return overrides[args.layout]
    if args.num_processes > 1:
        raise StrategyError(
            f"--layout={AUTO}: measures in one process; give one of {', '.join(overrides)}"
        )
    seconds: dict[str, float] = {}
    for name, text in overrides.items():
        mesh = make_mesh(registry.GetParams(args.model, text), "", count)
        memory = memory_of("pjrt", mesh)
        limit = (memory.size or 2**62) // memory.devices
        time = measured_step(args.model, text, mesh, limit, args.known_faults)["time"]
        say(f"--layout={name}: {units.duration(time['step_seconds']) if time else 'does not fit'}")
        if time:
            seconds[name] = time["step_seconds"]
    if not seconds:
        raise StrategyError(f"--layout={AUTO}: {args.model} fits in none of {', '.join(overrides)}")
    return overrides[min(seconds, key=lambda name: seconds[name])]


@contextlib.contextmanager
def proposing(args: Flags, count: int) -> Iterator[None]:
    """Ends a message about a mesh with a command whose layout divides the model over `count` devices."""
    try:
        yield
    except ValueError as e:
        if count == 1 or "mesh" not in str(e) or not (command := proposal(args, count)):
            raise
        raise ShardingError(f"{e}. Try this layout: {command}") from None


def proposal(args: Flags, count: int) -> str:
    """The command of these flags with a layout over `count` devices instead of a mesh, and with more rows where the
    batch does not divide in any; '' where none divides the model."""
    override = registry.without_strategy(args.model_params_override)
    with contextlib.suppress(ValueError):
        rows = registry.GetParams(args.model, override).input.batch_size
        for batch in ("", f"input.batch_size={-(-rows // count) * count}"):
            wider = join_overrides(override, batch)
            with contextlib.suppress(ValueError):
                names = layouts(AUTO, args.model, wider, count)
                rest: dict[str, Any] = {"strategy": "", "mesh": "", "model_params_override": wider}
                layout = "fsdp+expert" if "fsdp+expert" in names else next(iter(names))
                if "num_processes" in args and args.num_processes == 1:  # which no flag said
                    rest |= dict.fromkeys(("num_processes", "process_id"))
                return command_of(args.With(**rest, layout=layout))
    return ""


def command_of(args: Flags) -> str:
    """The line for a shell that gives these flags; defaults are left out."""
    changed = (args[name] for name in args.Names() if args[name].value != args[name].default)
    return f"{args.command} {shlex.join(flag.serialize() for flag in changed)}"
