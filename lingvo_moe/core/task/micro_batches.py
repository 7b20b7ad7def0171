"""Gradient accumulation: a batch is divided into M micro-batches, and one loop sums what each of them gives.

The loop is `tf.while_loop`: program size and compile time do not depend on M. Its body computes loss and gradients of
one micro-batch, with the tape inside, so that nothing is kept from one micro-batch to the next but the sums.

Letters: B batch, M micro-batches, D blocks of rows.
"""

import functools
import math
from collections.abc import Callable, Mapping

import tensorflow as tf

from lingvo_moe.core import randomness
from lingvo_moe.core.base_layer import name_scope
from lingvo_moe.core.input.division import (
    Division,
    MicroBatchError,
    check_divides,
    num_rows,
    shares_of,
)
from lingvo_moe.core.nested_map import NestedMap, map_structure
from lingvo_moe.core.sharding import DimsMapping
from lingvo_moe.core.sharding.annotate import mesh_of, sharded
from lingvo_moe.core.sharding.letters import HOST
from lingvo_moe.core.task.base_task import BaseTask
from lingvo_moe.core.tensors import runtime_zeros, sum_type

_SCOPE = "micro_batches"  # of the loop's name, by which analysis/programs/hlo/module.py finds it


def divided(
    task: BaseTask, num: int, batch_specs: NestedMap, name: str
) -> tuple[Division, BaseTask]:
    """The division of a batch, and the task with the sizes of a micro-batch; its variables are the same.

    `num` is M, `name` the parameter that sets it; `batch_specs` are of the whole batch, with `split`.

    Raises:
        MicroBatchError: the batch does not divide into M parts, or its groups do not.
    """
    sizes = {size: task.p.Get(size) for size in task.Strategy(task.p).MicroBatchSizes()}
    rows = num_rows(batch_specs)
    by_path = {task.SIZES["B"][0]: rows, **{f"task.{n}": s for n, s in sizes.items()}}
    check_divides(num, by_path, name)
    division = Division(num, math.gcd(rows, *sizes.values()) // num, batch_specs)
    smaller = {size: whole // num for size, whole in sizes.items()}
    return division, type(task)(task.p.Copy().Set(**smaller))


def accumulating_step(
    task: BaseTask, num: int, batch_specs: NestedMap
) -> Callable[[NestedMap, NestedMap], tuple[NestedMap, NestedMap]]:
    """Returns BaseTask.TrainStep for M micro-batches: one loop over them, then one update.

    Where nothing is random, and FProp's `updates` do not depend on the batch, it is the step of the whole batch up to
    rounding. An update is the mean of those of the micro-batches, each of which starts from the state. Seeds are folded
    with the micro-batch's number. Gradients are summed in float32.

    `num` is M, 2 or more; `batch_specs` are of the whole batch, with `split`.

    Raises:
        MicroBatchError: the batch does not divide into M parts, or its groups do not.
    """
    division, part = divided(task, num, batch_specs, "train.num_micro_batches")
    trainable = [spec for spec in task.GradientSpecs().Flatten() if spec.trainable]
    there = next((spec.path for spec in trainable if spec.memory == HOST), None)
    if there is not None:
        raise MicroBatchError(
            f"train.num_micro_batches={num}: the gradients of {there} are in the hosts' memory (train.offload), where "
            "those of micro-batches cannot be added up; set train.num_micro_batches=1, or offload slots alone"
        )

    def step(state: NestedMap, batch: NestedMap) -> tuple[NestedMap, NestedMap]:
        with name_scope(f"{task.path}.{_SCOPE}"):
            seed = randomness.make_seed(task.p.seed, state.step)
            shared = NestedMap(theta=state.theta, seed=seed, units=task.Units(batch))
            terms = functools.partial(_terms, part)
            mesh = mesh_of(f"the micro-batches of {task.path}", None)
            splits = {f"gradients[{i}]": s.StoredSplit(mesh) for i, s in enumerate(trainable)}
            sums = accumulate(terms, division, batch, shared, splits)
            updates = sums.updates.Transform(lambda total: total * (1.0 / num))
            metrics = task.Metrics().Combined(sums.metrics)
        with name_scope("optimizer"):
            grads = task.Gradients(state.theta, sums.gradients)
            return task.Apply(state, sums.loss, metrics, grads, updates)

    return step


def _terms(task: BaseTask, i: tf.Tensor, batch: NestedMap, shared: NestedMap) -> NestedMap:
    """The terms that micro-batch i adds to loss, metrics, updates and gradients (a list of the trainable variables').

    Args:
        task: with the sizes of a micro-batch.
        shared: theta; the step's seed; units, those of the whole batch.
    """
    mesh = mesh_of(f"the micro-batches of {task.path}", None)
    specs = task.VariableSpecs()
    theta = map_structure(lambda w, s: sharded(w, s.StoredSplit(mesh)), shared.theta, specs)
    shares = shares_of(task.Units(batch), shared.units)
    seed = randomness.fold_in(shared.seed, i)
    loss, metrics, grads = task.Differentiate(
        theta, lambda: task.MicroBatchTerms(task.InUse(theta), batch, seed, shares)
    )
    updates = metrics.pop("updates", NestedMap())
    dense = [grad for grad in grads.Flatten() if grad is not None]
    return NestedMap(loss=loss, metrics=metrics, updates=updates, gradients=dense)


def accumulate(
    terms: Callable[[tf.Tensor, NestedMap, NestedMap], NestedMap],
    division: Division,
    batch: NestedMap,
    shared: NestedMap,
    splits: Mapping[str, DimsMapping],
) -> NestedMap:
    """Sums `terms` over micro-batches, in float32 or wider.

    Args:
        terms: (micro-batch's number, micro-batch, shared) -> a tree of floating-point tensors of static shape. It is
            traced once.
        shared: a tree of tensors that every micro-batch sees, one of them floating point.
        splits: for terms that are sharded, by their path: the mesh axes of their dimensions.

    Returns:
        The sums, in the structure of what `terms` returns.

    Raises:
        TypeError: a term is not floating point.
    """
    stacked = division.Stacked(batch)
    inputs = NestedMap(part=stacked, shared=shared)
    structure = NestedMap()

    def run(i: tf.Tensor, *flat: tf.Tensor) -> list[tf.Tensor]:
        nonlocal structure
        values = inputs.Pack(list(flat))
        structure = terms(i, values.part, values.shared)
        return structure.Flatten()

    specs = NestedMap(part=division.PartSpecs(), shared=shared).Flatten()
    traced = tf.function(run, autograph=False).get_concrete_function(
        tf.TensorSpec([], tf.int32), *(tf.TensorSpec(x.shape, x.dtype) for x in specs)
    )
    names = [path for path, _ in structure.FlattenItems()]
    term_splits = [splits.get(name, ()) for name in names]

    def body(i: tf.Tensor, sums: list[tf.Tensor]) -> tuple[tf.Tensor, list[tf.Tensor]]:
        micro_batch = NestedMap(part=division.Part(stacked, i), shared=shared)
        added = traced(i, *micro_batch.Flatten())
        sums = [
            sharded(total + tf.cast(term, total.dtype), split)
            for total, term, split in zip(sums, added, term_splits, strict=True)
        ]
        return i + 1, sums

    floating = next(x for x in shared.Flatten() if x.dtype.is_floating)
    zeros = [
        sharded(_zeros(name, term, floating), split)
        for name, term, split in zip(names, traced.outputs, term_splits, strict=True)
    ]
    _, sums = tf.while_loop(lambda i, _: i < division.num, body, (tf.constant(0), zeros))
    return structure.Pack(sums)


def _zeros(name: str, term: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Zeros for the sum of one term; `like` as for runtime_zeros."""
    if not term.dtype.is_floating:
        raise TypeError(f"{name} is {term.dtype.name}; what micro-batches add up is floating point")
    return runtime_zeros(like, sum_type(term.dtype), term.shape)
