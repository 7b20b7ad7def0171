"""The training step of a pipelined task: BaseTask.TrainStep for M micro-batches that pass through K stages.

Up to rounding it is the step of the same micro-batches without a pipeline (micro_batches.py): seeds are of the
micro-batch and the layer, whichever stage has it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import tensorflow as tf

from lingvo_moe.core import randomness
from lingvo_moe.core.base_layer import name_scope
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.pipeline.loops import Loops
from lingvo_moe.core.pipeline.params import schedule_on, settings_of
from lingvo_moe.core.pipeline.parts import Context, Parts, Stack
from lingvo_moe.core.pipeline.stage import Programs
from lingvo_moe.core.pipeline.stage_layout import StackTensors, StageLayout, dims_of, without_data
from lingvo_moe.core.sharding.annotate import mesh_of
from lingvo_moe.core.task.base_task import BaseTask, TaskError
from lingvo_moe.core.task.micro_batches import divided


def pipelined_step(
    task: BaseTask, batch_specs: NestedMap
) -> Callable[[NestedMap, NestedMap], tuple[NestedMap, NestedMap]]:
    """Returns the step of a task whose `pipeline` has two stages or more.

    Where the mesh has an axis `data`, which shards the rows, each of its D devices works on micro-batches of its own,
    so that M / D of them pass through the stages one after the other.

    `batch_specs` are of the whole batch, with `split`.

    Raises:
        MicroBatchError: the batch does not divide into micro-batches, or its groups do not.
        TaskError: the task has no PipelineParts.
        ScheduleError: (when the step is traced) stages, micro-batches and repeats do not go together, or not with the
            layers or the mesh.
    """
    settings, name = settings_of(task.p), type(task).__name__
    if settings is None or task.PipelineParts() is None:
        raise TaskError(f"{task.path}: {name} has no stacks of layers in task.pipeline.stages")
    num = settings.micro_batches
    division, small = divided(task, num, batch_specs, "task.pipeline.micro_batches")
    untraced = small.PipelineParts()
    assert untraced is not None
    paths = untraced.paths
    by_part = division.specs.Transform(lambda s: replace(s, split=without_data(s.split)))
    if not settings.cells:
        # Rows go to the device of `data` that has their micro-batch.
        division = replace(division, specs=by_part)
    specs = task.VariableSpecs()
    trainable = [[spec.trainable for spec in specs.Get(path).Flatten()] for path in paths]
    rest_splits = {f"g{i}": spec.split for i, spec in enumerate(_rest(specs, paths).Flatten())}

    def step(state: NestedMap, batch: NestedMap) -> tuple[NestedMap, NestedMap]:
        theta, mesh = state.theta, mesh_of(f"the pipeline of {task.path}", None)
        schedule = schedule_on(settings, untraced.sizes, task.p.activation_split, mesh)
        with name_scope(f"{task.path}.pipeline"):
            shared = NestedMap(
                rest=_rest(theta, paths),
                seed=randomness.make_seed(task.p.seed, state.step),
                units=task.Units(batch),
            )

            def first() -> Context:
                part = division.Part(division.Stacked(batch), tf.constant(0))
                return Context(part, shared.seed)

            devices = settings.Devices(task.p.activation_split, mesh)
            parts = untraced.Traced(shared.rest, first, num, devices)
            layout = StageLayout(
                schedule,
                by_part,
                [_tensors(task, stack, theta) for stack in parts.stacks],
                rest_splits,
                settings.splits,
                devices,
            )
            programs = Programs(small.path, small.Units, parts, trainable, shared)
            like = tf.cast(state.step, tf.float32)
            end = Loops(schedule, programs, layout, division.Stacked(batch), like).Run()
            loss, metrics = _loss_and_metrics(parts, layout, end)
            updates = metrics.pop("updates", NestedMap()).Transform(lambda x: x * (1.0 / num))
            metrics = task.Metrics().Combined(metrics)
            by_path = _gradients(theta, parts, layout, trainable, end)
        with name_scope("optimizer"):
            flat = [(path, spec.trainable) for path, spec in specs.FlattenItems()]
            grads = task.Gradients(theta, [by_path.get(path) for path, trains in flat if trains])
            return task.Apply(state, loss, metrics, grads, updates)

    return step


def _loss_and_metrics(
    parts: Parts, layout: StageLayout, end: NestedMap
) -> tuple[tf.Tensor, NestedMap]:
    """The sums over micro-batches, from the state after all ticks."""
    extras = {
        stack.name: mine.extras.Transform(lambda x, j=j: layout.InOrder(j, x))
        for j, (stack, mine) in enumerate(zip(parts.stacks, end.stacks, strict=True))
    }
    loss = tf.add_n([tf.reduce_sum(x) for x in (end.loss, *(s.loss for s in end.stacks))])
    sums = end.metrics.Transform(lambda x: tf.reduce_sum(x, 0))
    return loss, parts.metrics(sums, loss, NestedMap(extras))


def _tensors(task: BaseTask, stack: Stack, theta: NestedMap) -> StackTensors:
    splits = [spec.split for spec in task.VariableSpecs().Get(stack.weights).Flatten()]
    carry = dims_of(stack.carry, task.p.activation_split)
    return StackTensors(carry, theta.Get(stack.weights), splits)


def _gradients(
    theta: NestedMap,
    parts: Parts,
    layout: StageLayout,
    trainable: Sequence[Sequence[bool]],
    end: NestedMap,
) -> dict[str, tf.Tensor]:
    """The gradients by path in theta, from the state after all ticks."""
    by_path: dict[str, tf.Tensor] = {}
    for j, (stack, mine) in enumerate(zip(parts.stacks, end.stacks, strict=True)):
        items = theta.Get(stack.weights).FlattenItems()
        paths = [path for (path, _), t in zip(items, trainable[j], strict=True) if t]
        sums = layout.WeightsInOrder(j, trainable[j], mine.weights)
        by_path.update({f"{stack.weights}.{path}": g for path, g in zip(paths, sums, strict=True)})
    for i, (path, _) in enumerate(_rest(theta, parts.paths).FlattenItems()):
        name = f"g{i}"
        terms = [tf.reduce_sum(end.rest[name], 0)] if name in end.rest else []
        terms += [
            tf.reduce_sum(mine.of_rest[name], [0, 1]) for mine in end.stacks if name in mine.of_rest
        ]
        if terms:
            by_path[path] = tf.add_n(terms)
    return by_path


def _rest(tree: NestedMap, paths: Sequence[str]) -> NestedMap:
    """A tree in theta's structure without the weights of stacks, which are at `paths`."""
    rest = tree.Transform(lambda x: x)
    for path in paths:
        parent, _, name = path.rpartition(".")
        del (rest.Get(parent) if parent else rest)[name]
    return rest
