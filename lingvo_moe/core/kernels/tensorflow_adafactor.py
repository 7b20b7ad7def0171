"""Adafactor for TensorFlow's own kernels, in few passes over memory. Letters: R row and C column of a weight."""

import math

import tensorflow as tf

from lingvo_moe.core.kernels import xla
from lingvo_moe.core.kernels.xla import AdafactorRecipe, AppliedDelta, Delta
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.tensors import fused

_SLOTS = ("row", "col")
_MOST_BLOCKS = 32  # of a layer: XLA takes 25 ms to compile the update of each


def adafactor(
    weight: tf.Tensor, grad: tf.Tensor, slots: NestedMap, recipe: AdafactorRecipe
) -> tuple[Delta, NestedMap]:
    """See `Kernels`; in few passes where the moment is factored over the last two dimensions.

    It goes block by block, which a cache holds: gradients of experts come as such, and TensorFlow then need not stack
    them.
    """
    rank = weight.shape.rank
    if recipe.dims != (rank - 2, rank - 1):
        return xla.adafactor(weight, grad, slots, recipe)
    weights, grads = _layers(weight, recipe), _layers(grad, recipe)
    lead = [len(weights), len(weights[0]), *weights[0][0].shape[:-2]]
    rows, cols = (
        tf.unstack(tf.reshape(slots[name], [*lead, slots[name].shape[-1]])) for name in _SLOTS
    )
    parts = [_factors(*part, recipe) for part in zip(weights, grads, rows, cols, strict=True)]
    factors = [part.factors for part in parts]
    new = tf.reshape(_subtract(weights, grads, factors), weight.shape)
    stacked = {name: tf.stack([part[name] for part in parts]) for name in _SLOTS}
    new_slots = NestedMap({n: tf.reshape(x, slots[n].shape) for n, x in stacked.items()})
    square = tf.add_n([part.square for part in parts])
    return AppliedDelta(new, square, tf.add_n([part.grad_square for part in parts])), new_slots


def _layers(value: tf.Tensor, recipe: AdafactorRecipe) -> list[list[tf.Tensor]]:
    """The blocks of a weight or a gradient by layer: one list for each layer of a stack, or one in all."""
    layers = [value[i] for i in range(value.shape[0])] if recipe.stack_dims else [value]
    return [_blocks(layer) for layer in layers]


def _blocks(value: tf.Tensor) -> list[tf.Tensor]:
    """The matrices of [E, ..., R, C], or as many together as it takes for no more than _MOST_BLOCKS."""
    if value.shape.rank == 2:
        return [value]
    count = value.shape[0]
    size = next(n for n in range(1, count + 1) if count % n == 0 and count // n <= _MOST_BLOCKS)
    if size == 1:
        return [value[i] for i in range(count)]
    return [value[i : i + size] for i in range(0, count, size)]


def _factors(
    weights: list[tf.Tensor],
    grads: list[tf.Tensor],
    row: tf.Tensor,
    col: tf.Tensor,
    recipe: AdafactorRecipe,
) -> NestedMap:
    """Computes, of the P blocks [..., R, C] of one layer: `factors` (a [P, ..., R], b [P, ..., C]), so that a b grad is
    to be subtracted; `row` and `col`, the new slots; and the sums of squares of that product and of grad.

    The update u is the product of the gradient g and two vectors, so that sum u^2 = a^2 . g^2 . b^2: the same matrix
    product that sums the columns of g^2 gives it, and u itself is never written.
    """
    rows, columns = grads[0].shape[-2:]
    squares = [tf.square(grad) for grad in grads]
    sums = tf.stack([tf.reduce_sum(square, -1) for square in squares])
    row = recipe.Average(row, sums * (1.0 / columns) + recipe.epsilon1)
    a_square = tf.reduce_mean(row, -1, keepdims=True) / row
    left = tf.unstack(tf.stack([tf.fill(tf.shape(row), 1.0 / rows), a_square], -2))
    both = [tf.matmul(vectors, square) for vectors, square in zip(left, squares, strict=True)]
    means, weighted = tf.unstack(tf.stack(both), axis=-2)
    col = recipe.Average(col, means + recipe.epsilon1)
    total = tf.reduce_sum(weighted / col)
    per_element = 1.0 / (len(grads) * math.prod(grads[0].shape))
    scale = recipe.rate
    if recipe.clip_threshold:
        excess = tf.sqrt(total * per_element) * (1.0 / recipe.clip_threshold)
        scale *= tf.math.reciprocal(tf.maximum(excess, 1.0))
    if recipe.multiply_by_parameter_scale:
        halves = tf.add_n([tf.nn.l2_loss(weight) for weight in weights])
        scale *= tf.maximum(tf.sqrt(halves * (2.0 * per_element)), recipe.epsilon2)
    return NestedMap(
        factors=[tf.sqrt(a_square) * scale, tf.math.rsqrt(col)],
        row=row,
        col=col,
        square=total * tf.square(scale),
        grad_square=tf.reduce_sum(sums),
    )


@fused
def _subtract(
    weights: list[list[tf.Tensor]], grads: list[list[tf.Tensor]], factors: list[list[tf.Tensor]]
) -> tf.Tensor:
    """weight - a grad b of each block [..., R, C] of each layer, all in one tensor."""
    new = [
        weight - grad * a[..., tf.newaxis] * b[..., tf.newaxis, :]
        for layer, of_layer, (a_P, b_P) in zip(weights, grads, factors, strict=True)
        for weight, grad, a, b in zip(
            layer, of_layer, tf.unstack(a_P), tf.unstack(b_P), strict=True
        )
    ]
    return tf.stack(new) if len(new) > 1 else new[0]
