"""Updates a stack of layers whose slots are in the host's memory, one layer at a time.

A whole array that is moved at once needs as much of the device's memory as if it had stayed there. So a loop moves the
slots of one layer to the device, updates the layer, and moves them back.

Letters: L layers.
"""

from collections.abc import Callable
from dataclasses import replace

import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.base_layer import VariableSpec, name_scope
from lingvo_moe.core.kernels.xla import AppliedDelta
from lingvo_moe.core.nested_map import NestedMap, flatten, pack_as
from lingvo_moe.core.sharding import DimsMapping, current_mesh
from lingvo_moe.core.sharding.annotate import sharded
from lingvo_moe.core.sharding.letters import HOST
from lingvo_moe.core.state.host_memory import to_device, to_host
from lingvo_moe.core.tensors import with_row

# (spec, weight, gradient, slots) of one layer -> its new weight, new slots, and the sum of squares of the update
UpdateLayer = Callable[
    [VariableSpec, tf.Tensor, tf.Tensor, NestedMap], tuple[tf.Tensor, NestedMap, tf.Tensor]
]


class AppliedByLayer(AppliedDelta):
    """A `kernels.Delta` that was subtracted already, from the slot MASTER too, layer by layer."""


def is_by_layer(spec: VariableSpec, slot_specs: NestedMap) -> bool:
    """Whether a variable or slots of it are in the host's memory."""
    return any(variable.memory == HOST for variable in (spec, *slot_specs.Flatten()))


def squares_by_layer(grad: tf.Tensor, spec: VariableSpec) -> tf.Tensor:
    """The sum of squares of the gradient of a stack [L, ...] that is in the host's memory, a float32 scalar."""
    split = _split(spec)

    def body(i: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        row = tf.cast(_row(grad, i, split, True), tf.float32)
        return i + 1, total + kernels.current().sum_of_squares(row)

    start = (tf.constant(0), tf.constant(0.0))
    with name_scope(f"optimizer.{spec.path}"):
        return tf.while_loop(lambda i, _: i < spec.shape[0], body, start)[1]


def update_by_layer(
    update: UpdateLayer,
    specs: tuple[VariableSpec, NestedMap],
    values: tuple[tf.Tensor, NestedMap],
    grad: tf.Tensor,
    finite: tf.Tensor,
) -> tuple[AppliedByLayer, NestedMap]:
    """The update of a stack.

    Args:
        specs: of the stack's weight and of its slots.
        values: the same tensors [L, ...].
        grad: of the weight, [L, ...].
        finite: bool scalar; False: weight and slots keep their values.
    """
    spec, places = specs[0], [(_split(s), s.memory == HOST) for s in flatten(specs)]
    layer = replace(
        spec,
        shape=spec.shape[1:],
        letters=spec.letters[1:],
        split=spec.split[1:],
        stack_dims=spec.stack_dims - 1,
        free_dims=tuple(d - 1 for d in spec.free_dims),
    )

    def body(
        i: tf.Tensor, stacks: list[tf.Tensor], square: tf.Tensor
    ) -> tuple[tf.Tensor, list[tf.Tensor], tf.Tensor]:
        w, g = (_row(x, i, *places[0]) for x in (stacks[0], grad))
        rows = [w, *(_row(x, i, *place) for x, place in zip(stacks[1:], places[1:], strict=True))]
        weight, slots, row_square = update(layer, w, g, pack_as(values, rows)[1])
        after = [tf.cast(weight, w.dtype), *slots.Flatten()]
        new_rows = kernels.current().select(finite, after, rows)
        new_rows = [sharded(x, split) for x, (split, _) in zip(new_rows, places, strict=True)]
        new_rows = [
            to_host(x) if host else x for x, (_, host) in zip(new_rows, places, strict=True)
        ]
        stacks = [with_row(x, i, row) for x, row in zip(stacks, new_rows, strict=True)]
        return i + 1, stacks, square + row_square

    start = (tf.constant(0), flatten(values), tf.constant(0.0))
    _, stacks, square = tf.while_loop(lambda i, *_: i < spec.shape[0], body, start)
    weight, slots = pack_as(values, stacks)
    return AppliedByLayer(weight, square), slots


def _row(x: tf.Tensor, i: tf.Tensor, split: DimsMapping, host: bool) -> tf.Tensor:
    """Layer i of a stack, on the device."""
    row = tf.gather(x, i)
    return sharded(to_device(row) if host else row, split)


def _split(spec: VariableSpec) -> DimsMapping:
    """The mesh axes of a layer's part of a stack."""
    mesh = current_mesh()
    return (spec.split if mesh is None else spec.StoredSplit(mesh))[1:]
