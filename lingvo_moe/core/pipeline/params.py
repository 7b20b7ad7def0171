"""The parameters of a pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass

from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params
from lingvo_moe.core.pipeline.schedule import (
    DATA,
    SCHEDULES,
    STAGE,
    Schedule,
    ScheduleError,
    make_schedule,
)
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.sharding.letters import SplitMap, axes_of

# Paths in a task's Params, for BaseTask.MAY_CHANGE.
PARAMETERS = tuple(
    f"pipeline.{name}" for name in ("stages", "micro_batches", "schedule", "repeats", "splits")
)


def pipeline_params() -> Params:
    """Params(stages, micro_batches, schedule, repeats, splits)."""
    p = Params()
    p.Define(
        "stages",
        1,
        "K: how many parts each stack of layers has, one after the other on the devices of mesh axis 'stage'. 1: no "
        "pipeline.",
        checks.SIZE,
    )
    p.Define(
        "micro_batches",
        1,
        "M: how many parts a batch has, which pass through the stages one after the other; with a mesh axis 'data', "
        "M / its size on each of its devices. The share of time in which a stage waits is (K - 1) / (M + K - 1).",
        checks.SIZE,
    )
    p.Define(
        "schedule",
        "1f1b",
        f"In which order stages work, one of {', '.join(SCHEDULES)}: see docs/pipelines.md.",
        checks.one_of(SCHEDULES),
    )
    p.Define(
        "repeats",
        1,
        "V: how often a micro-batch passes through all stages, with schedule=interleaved or gpipe; each has V parts of "
        "a stack.",
        checks.SIZE,
    )
    p.Define(
        "splits",
        [],
        "The blocks at which the stages end, e.g. [2, 5] for two blocks and then three; with experts a block is two "
        "layers. []: stages as equal as can be. Each stage takes the time of the largest.",
        checks.ListOf(checks.SIZE, "a list of numbers of blocks"),
    )
    p.OnlyWith("micro_batches schedule repeats splits", one_stage)
    return p


def one_stage(p: Params) -> str:
    """The parameter because of which there is no pipeline, or '': a condition of Params.OnlyWith."""
    return "stages=1" if p.stages == 1 else ""


def with_stage_axes(task: InstantiableParams, **sizes: Sequence[int]) -> InstantiableParams:
    """Params of a pipelined task whose layers, L, are sharded along the axis of stages, unless it says otherwise.

    Args:
        sizes: for further letters of what lies outside of the stages, e.g. V, the sizes of their dimensions; they are
            sharded likewise if the number of stages divides these.
    """
    others = [n for n, values in sizes.items() if not any(i % task.pipeline.stages for i in values)]
    of_weights = {**dict.fromkeys(["L", *others], STAGE), **(task.weight_split or {})}
    of_activations = {**dict.fromkeys(others, STAGE), **(task.activation_split or {})}
    return task.Copy().Set(weight_split=of_weights, activation_split=of_activations)


@dataclass(frozen=True)
class Settings:
    """The settings of a pipeline, as the Params of a task have them."""

    stages: int  # K
    micro_batches: int  # the micro-batches of a batch
    schedule: str  # one of SCHEDULES
    repeats: int  # V
    # Whether the stages are cells of different shapes (cell_stack.py). Then the devices along axis `data` work on parts
    # of the rows of one micro-batch; else each of them works on micro-batches of its own.
    cells: bool = False
    splits: tuple[int, ...] = ()  # the blocks at which stages end; () for stages as equal as can be

    @classmethod
    def Of(cls, p: Params, cells: bool = False) -> "Settings | None":
        """The settings in `pipeline_params`; None for one stage."""
        if p.stages == 1:
            return None
        splits = () if cells else tuple(p.splits)
        return cls(p.stages, p.micro_batches, p.schedule, p.repeats, cells, splits)

    def Devices(self, activation_split: SplitMap, mesh: Mesh) -> int:
        """D, how many devices of a stage have rows of their own."""
        by_rows = DATA in mesh.axis_names and DATA in axes_of(activation_split.get("B"))
        return mesh.axis_size(DATA) if by_rows else 1

    def Replicas(self, activation_split: SplitMap, mesh: Mesh) -> int:
        """The number of micro-batches that are worked on at the same time: D, but 1 where the stages are cells."""
        return 1 if self.cells else self.Devices(activation_split, mesh)


def settings_of(task: InstantiableParams) -> Settings | None:
    """Reads the settings of a pipeline from Params of a task; None if they ask for none."""
    return task.cls.Strategy(task).PipelineSettings()


def micro_batches_of(params: Params) -> tuple[str, int]:
    """M of an experiment and the path of the parameter that sets it: that of a pipeline, if there is one.

    Raises ScheduleError: both are set.
    """
    num, settings = params.train.num_micro_batches, settings_of(params.task)
    if settings is None:
        return "train.num_micro_batches", num
    if num > 1:
        raise ScheduleError(
            f"train.num_micro_batches={num}: a pipeline has micro-batches of its own; leave it at 1 and set "
            "task.pipeline.micro_batches"
        )
    return "task.pipeline.micro_batches", settings.micro_batches


def schedule_on(
    settings: Settings,
    stacks: Sequence[tuple[str, int]],
    activation_split: SplitMap,
    mesh: Mesh,
) -> Schedule:
    """The schedule of a task's equal stages on a mesh.

    Args:
        stacks: the name of each stack and its number of blocks.
        mesh: of one device, which has all stages; or with an axis 'stage' of as many devices as there are stages.

    Raises:
        ScheduleError: a schedule that does not exist, more parts than layers, or a mesh that does not have the stages;
            names task.pipeline's parameter.
    """
    schedule = _schedule(settings, len(stacks), settings.Replicas(activation_split, mesh))
    stages, repeats = settings.stages, settings.repeats
    for name, blocks in stacks:
        if blocks < stages * repeats:
            passes = f" x task.pipeline.repeats={repeats}" if repeats > 1 else ""
            most = f"stages x repeats of at most {blocks}" if passes else f"at most {blocks} stages"
            raise ScheduleError(
                f"task.pipeline.stages={stages}{passes}: the {name} has {blocks} block{'s' * (blocks > 1)}, fewer than "
                f"{stages * repeats} parts; choose {most}"
            )
        _check_splits(settings, name, blocks)
    if mesh.size == 1:
        return schedule
    if STAGE not in mesh.axis_names:
        raise ScheduleError(
            f"task.pipeline.stages={stages}: mesh {mesh} has no axis {STAGE!r} of that size; e.g. "
            f"--mesh={STAGE}:{stages},{mesh}"
        )
    if mesh.axis_size(STAGE) != stages:
        raise ScheduleError(
            f"task.pipeline.stages={stages}: the axis {STAGE!r} of mesh {mesh} has {mesh.axis_size(STAGE)} devices, "
            "and needs one for each stage"
        )
    return schedule


def _check_splits(settings: Settings, name: str, blocks: int) -> None:
    """Raises ScheduleError if stages cannot end where `splits` says."""
    splits = settings.splits
    if not splits:
        return
    setting = f"task.pipeline.splits={list(splits)}"
    if settings.repeats > 1:
        raise ScheduleError(f"{setting}: goes with task.pipeline.repeats=1")
    ascending = all(a < b for a, b in zip((0, *splits), splits, strict=False))
    if len(splits) != settings.stages or not ascending or splits[-1] != blocks:
        raise ScheduleError(
            f"{setting}: must be {settings.stages} ascending numbers of blocks, one for each of "
            f"task.pipeline.stages, of which the last is the {blocks} of the {name}"
        )


def _schedule(settings: Settings, stacks: int, replicas: int) -> Schedule:
    num = settings.micro_batches
    if num % replicas:
        raise ScheduleError(
            f"task.pipeline.micro_batches={num}: must be a multiple of {replicas}, since each of the {replicas} "
            f"devices of axis {DATA!r} works on micro-batches of its own"
        )
    name, stages, repeats = settings.schedule, settings.stages, settings.repeats
    try:
        return make_schedule(name, stages, num // replicas, repeats, stacks)
    except ScheduleError as e:
        among = f" (micro_batches are those of one of the {replicas} devices of axis {DATA!r})"
        raise ScheduleError(f"task.pipeline.{e}{among if replicas > 1 else ''}") from None
