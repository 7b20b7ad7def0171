"""The parameters of a pipeline."""

from collections.abc import Sequence

from lingvo_moe.core import checks
from lingvo_moe.core.hyperparams import InstantiableParams, Params
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
    f"pipeline.{name}" for name in ("stages", "micro_batches", "schedule", "repeats")
)


def pipeline_params() -> Params:
    """Params(stages, micro_batches, schedule, repeats)."""
    p = Params()
    p.Define(
        "stages",
        1,
        "K: how many parts each stack of layers has, one after the other on the devices of mesh axis 'stage'. 1: no "
        "pipeline.",
        check=checks.SIZE,
    )
    p.Define(
        "micro_batches",
        1,
        "M: how many parts a batch has, which pass through the stages one after the other; with a mesh axis 'data', "
        "M / its size on each of its devices. The share of time in which a stage waits is (K - 1) / (M + K - 1).",
        check=checks.SIZE,
    )
    p.Define(
        "schedule",
        "1f1b",
        f"In which order stages work, one of {', '.join(SCHEDULES)}: see docs/pipelines.md.",
        check=checks.one_of(SCHEDULES),
    )
    p.Define(
        "repeats",
        1,
        "V: how often a micro-batch passes through all stages, with schedule=interleaved or gpipe; each has V parts of "
        "a stack.",
        check=checks.SIZE,
    )
    return p


def with_stage_axes(task: InstantiableParams, **sizes: Sequence[int]) -> InstantiableParams:
    """Params of a pipelined task whose layers, L, are sharded along the axis of stages, unless it says otherwise.

    Args:
        task: its Params.
        sizes: for further letters of what lies outside of the stages, e.g. V, the sizes of their dimensions; they are
            sharded likewise if the number of stages divides these.
    """
    others = [n for n, each in sizes.items() if not any(i % task.pipeline.stages for i in each)]
    of_weights = {**dict.fromkeys(["L", *others], STAGE), **(task.weight_split or {})}
    of_activations = {**dict.fromkeys(others, STAGE), **(task.activation_split or {})}
    return task.Copy().Set(weight_split=of_weights, activation_split=of_activations)


def is_pipelined(task: Params) -> bool:
    """Whether Params of a task ask for a pipeline."""
    return "pipeline" in task and task.pipeline.stages > 1


def micro_batches_of(params: Params) -> tuple[str, int]:
    """M of an experiment and the path of the parameter that sets it: that of a pipeline, if there is one.

    Raises:
        ScheduleError: both are set.
    """
    num = params.train.num_micro_batches
    if not is_pipelined(params.task):
        return "train.num_micro_batches", num
    if num > 1:
        raise ScheduleError(
            f"train.num_micro_batches={num}: a pipeline has micro-batches of its own; leave it at 1 and set "
            "task.pipeline.micro_batches"
        )
    return "task.pipeline.micro_batches", params.task.pipeline.micro_batches


def check_stages(
    p: Params, stacks: Sequence[tuple[str, int]], activation_split: SplitMap, mesh: Mesh
) -> None:
    """Raises ScheduleError as schedule_of, or if the mesh has no axis for the stages.

    Args:
        p, stacks: as for schedule_of.
        activation_split: of the task.
        mesh: of one device, which has all stages; or with an axis 'stage' of as many devices as there are stages.
    """
    schedule_of(p, stacks, replicas_of(activation_split, mesh))
    if mesh.size == 1:
        return
    if STAGE not in mesh.axis_names:
        raise ScheduleError(
            f"task.pipeline.stages={p.stages}: mesh {mesh} has no axis {STAGE!r} of that size; e.g. "
            f"--mesh={STAGE}:{p.stages},{mesh}"
        )
    if mesh.axis_size(STAGE) != p.stages:
        raise ScheduleError(
            f"task.pipeline.stages={p.stages}: the axis {STAGE!r} of mesh {mesh} has {mesh.axis_size(STAGE)} devices, "
            "and needs one for each stage"
        )


def replicas_of(activation_split: SplitMap, mesh: Mesh | None) -> int:
    """D, how many micro-batches are worked on at the same time: the size of axis `data` if it shards the rows."""
    if mesh is None or DATA not in mesh.axis_names:
        return 1
    return mesh.axis_size(DATA) if DATA in axes_of(activation_split.get("B")) else 1


def schedule_of(p: Params, stacks: Sequence[tuple[str, int]], replicas: int = 1) -> Schedule:
    """The schedule that Params ask for.

    Args:
        p: pipeline_params.
        stacks: the name of each stack and its number of blocks.
        replicas: D.

    Raises:
        ScheduleError: a schedule that does not exist, or layers that do not divide into stages; names task.pipeline's
            parameter.
    """
    if p.micro_batches % replicas:
        raise ScheduleError(
            f"task.pipeline.micro_batches={p.micro_batches}: must be a multiple of {replicas}, since each of the "
            f"{replicas} devices of axis {DATA!r} works on micro-batches of its own"
        )
    num = p.micro_batches // replicas
    try:
        schedule = make_schedule(p.schedule, p.stages, num, p.repeats, len(stacks))
    except ScheduleError as e:
        among = f" (micro_batches are those of one of the {replicas} devices of axis {DATA!r})"
        raise ScheduleError(f"task.pipeline.{e}{among if replicas > 1 else ''}") from None
    parts = p.stages * p.repeats
    for name, blocks in stacks:
        if blocks % parts:
            repeats = f" x task.pipeline.repeats={p.repeats}" if p.repeats > 1 else ""
            good = [str(k) for k in range(1, blocks + 1) if blocks % (k * p.repeats) == 0]
            raise ScheduleError(
                f"task.pipeline.stages={p.stages}{repeats}: the {name} has {blocks} blocks, which do not divide into "
                f"{parts} equal parts; choose stages from {', '.join(good) or 'none'}"
            )
    return schedule
