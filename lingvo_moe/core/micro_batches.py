"""Gradient accumulation: a batch is divided into M micro-batches, and one loop sums what each of them gives.

The loop is `tf.while_loop`: program size and compile time do not depend on M. Its body computes loss and gradients of
one micro-batch, with the tape inside, so that nothing is kept from one micro-batch to the next but the sums.

Letters: B batch, M micro-batches, D blocks of rows.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import tensorflow as tf

from lingvo_moe.core import randomness
from lingvo_moe.core.base_input import ArraySpec
from lingvo_moe.core.base_layer import name_scope
from lingvo_moe.core.base_task import BaseTask
from lingvo_moe.core.nested_map import NestedMap, map_structure
from lingvo_moe.core.sharding import DimsMapping, current_mesh
from lingvo_moe.core.sharding.annotate import mesh_split
from lingvo_moe.core.suggest import either
from lingvo_moe.core.tensors import runtime_zeros

_SCOPE = "micro_batches"  # of the loop's name, by which core/hlo/module.py finds it


class MicroBatchError(ValueError):
    """Raised for a batch that does not divide into the micro-batches that are asked for."""


def check_divides(num: int, sizes: Mapping[str, int]) -> None:
    """Raises MicroBatchError unless the number of micro-batches divides all sizes.

    Args:
        num: M, train.num_micro_batches.
        sizes: what is divided, by the path of its parameter, e.g. input.batch_size and task.num_groups.
    """
    if not any(size % num for size in sizes.values()):
        return
    common = math.gcd(*sizes.values())
    good = [n for n in range(1, common + 1) if common % n == 0]
    given = " and ".join(f"{path}={size}" for path, size in sizes.items())
    raise MicroBatchError(
        f"train.num_micro_batches={num}: {given} do{'es' if len(sizes) == 1 else ''} not divide into that many equal "
        f"parts; choose {either(good)}"
    )


@dataclass(frozen=True)
class Division:
    """How a batch falls into micro-batches.

    The rows are D equal blocks, and each block is M equal parts; micro-batch m has part m of every block. Where D is a
    multiple of the devices that shard the batch, no row changes its device. Where D divides the groups of a
    micro-batch, each group of the batch is a group of one micro-batch, with the same rows.

    Attributes:
        num: M.
        blocks: D.
        specs: the ArraySpecs of the batch, with `split`. Those whose first letter is B are divided; each micro-batch
            gets all of the others.
    """

    num: int
    blocks: int
    specs: NestedMap

    def Stacked(self, batch: NestedMap) -> NestedMap:
        """The batch with arrays [M, B/M, ...] in place of those that are divided."""
        return map_structure(self._Stack, batch, self.specs)

    def Part(self, stacked: NestedMap, i: tf.Tensor) -> NestedMap:
        """Micro-batch i (int32 scalar) out of Stacked's result."""

        def part(x: tf.Tensor, spec: ArraySpec) -> tf.Tensor:
            return _sharded(tf.gather(x, i), spec.split) if _divided(spec) else x

        return map_structure(part, stacked, self.specs)

    def PartSpecs(self) -> NestedMap:
        """The ArraySpecs of a micro-batch."""

        def part(spec: ArraySpec) -> ArraySpec:
            if not _divided(spec):
                return spec
            return replace(spec, shape=(spec.shape[0] // self.num, *spec.shape[1:]))

        return self.specs.Transform(part)

    def _Stack(self, x: tf.Tensor, spec: ArraySpec) -> tf.Tensor:
        if not _divided(spec):
            return x
        rows, *rest = spec.shape
        by_rows, *splits = spec.split or [None] * len(spec.shape)
        shape = [self.blocks, self.num, rows // (self.blocks * self.num), *rest]
        x = _sharded(tf.reshape(x, shape), (by_rows, None, None, *splits))
        x = tf.transpose(x, [1, 0, *range(2, len(shape))])
        x = _sharded(x, (None, by_rows, None, *splits))
        return _sharded(tf.reshape(x, [self.num, rows // self.num, *rest]), (None, *spec.split))


def accumulating_step(
    task: BaseTask, num: int, batch_specs: NestedMap
) -> Callable[[NestedMap, NestedMap], tuple[NestedMap, NestedMap]]:
    """Returns BaseTask.TrainStep for M micro-batches: one loop over them, then one update.

    Where nothing is random, and FProp's `updates` do not depend on the batch, it is the step of the whole batch up to
    rounding. An update is the mean of those of the micro-batches, each of which starts from the state. Seeds are folded
    with the micro-batch's number. Gradients are summed in float32.

    Args:
        task: what is trained.
        num: M, 2 or more.
        batch_specs: ArraySpecs of the whole batch, with `split`.

    Raises:
        MicroBatchError: the batch does not divide into M parts, or its groups do not.
    """
    sizes = {name: task.p.Get(name) for name in task.MicroBatchSizes(task.p)}
    rows = _num_rows(batch_specs)
    check_divides(num, {task.SIZES["B"][0]: rows, **{f"task.{n}": s for n, s in sizes.items()}})
    division = Division(num, math.gcd(rows, *sizes.values()) // num, batch_specs)
    smaller = {name: size // num for name, size in sizes.items()}
    part = type(task)(task.p.Copy().Set(**smaller))  # the same variables
    trainable = [spec for spec in task.VariableSpecs().Flatten() if spec.trainable]
    splits = {f"gradients[{i}]": spec.split for i, spec in enumerate(trainable)}

    def step(state: NestedMap, batch: NestedMap) -> tuple[NestedMap, NestedMap]:
        with name_scope(f"{task.path}.{_SCOPE}"):
            seed = randomness.make_seed(task.p.seed, state.step)
            shared = NestedMap(theta=state.theta, seed=seed, units=task.Units(batch))
            terms = functools.partial(_terms, part)
            sums = accumulate(terms, division, batch, shared, splits)
            updates = sums.updates.Transform(lambda total: total * (1.0 / num))
            metrics = task.CombinedMetrics(sums.metrics)
        with name_scope("optimizer"):
            grads = task.Gradients(state.theta, sums.gradients)
            return task.Apply(state, sums.loss, metrics, grads, updates)

    return step


def _terms(task: BaseTask, i: tf.Tensor, batch: NestedMap, shared: NestedMap) -> NestedMap:
    """What micro-batch i adds to loss, metrics, updates and gradients (a list of the trainable variables').

    Args:
        task: with the sizes of a micro-batch.
        i: int32 scalar.
        batch: the micro-batch.
        shared: theta; the step's seed; units, those of the whole batch.
    """
    weights = zip(shared.theta.Flatten(), task.VariableSpecs().Flatten(), strict=True)
    theta = shared.theta.Pack([_sharded(w, spec.split) for w, spec in weights])
    shares = NestedMap(
        {name: n / tf.maximum(shared.units[name], 1.0) for name, n in task.Units(batch).items()}
    )
    seed = randomness.fold_in(shared.seed, i)
    loss, metrics, grads = task.Differentiate(
        theta, lambda: task.MicroBatchTerms(theta, batch, seed, shares)
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
        division: of the batch.
        batch: a tree of tensors.
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
        given = inputs.Pack(list(flat))
        structure = terms(i, given.part, given.shared)
        return structure.Flatten()

    given = NestedMap(part=division.PartSpecs(), shared=shared).Flatten()
    traced = tf.function(run, autograph=False).get_concrete_function(
        tf.TensorSpec([], tf.int32), *(tf.TensorSpec(x.shape, x.dtype) for x in given)
    )
    names = [path for path, _ in structure.FlattenItems()]
    kept = [splits.get(name, ()) for name in names]

    def body(i: tf.Tensor, sums: list[tf.Tensor]) -> tuple[tf.Tensor, list[tf.Tensor]]:
        now = NestedMap(part=division.Part(stacked, i), shared=shared)
        found = traced(i, *now.Flatten())
        sums = [
            _sharded(total + tf.cast(term, total.dtype), split)
            for total, term, split in zip(sums, found, kept, strict=True)
        ]
        return i + 1, sums

    floating = next(x for x in shared.Flatten() if x.dtype.is_floating)
    zeros = [
        _sharded(_zeros(name, term, floating), split)
        for name, term, split in zip(names, traced.outputs, kept, strict=True)
    ]
    _, sums = tf.while_loop(lambda i, _: i < division.num, body, (tf.constant(0), zeros))
    return structure.Pack(sums)


def _num_rows(specs: NestedMap) -> int:
    """B, the rows of a batch of these ArraySpecs.

    Raises:
        MicroBatchError: no array has rows, or they do not agree.
    """
    rows = {spec.shape[0] for spec in specs.Flatten() if _divided(spec)}
    if len(rows) != 1:
        raise MicroBatchError(
            f"train.num_micro_batches: the arrays of a batch whose first letter is B have {sorted(rows)} rows; "
            "what is divided has one number of rows"
        )
    return rows.pop()


def _sharded(x: tf.Tensor, split: DimsMapping) -> tf.Tensor:
    """Annotates x; where no dimension is sharded, XLA decides."""
    mesh = current_mesh()
    if mesh is None or mesh.size == 1 or not any(split):
        return x
    return mesh_split(x, mesh, split)


def _zeros(name: str, term: tf.Tensor, given: tf.Tensor) -> tf.Tensor:
    """Zeros for the sum of one term; `given` as for runtime_zeros."""
    if not term.dtype.is_floating:
        raise TypeError(f"{name} is {term.dtype.name}; what micro-batches add up is floating point")
    return runtime_zeros(given, term.dtype if term.dtype.size > 4 else tf.float32, term.shape)


def _divided(spec: ArraySpec) -> bool:
    return spec.letters.startswith("B")
