"""Adafactor for TensorFlow's own kernels, in few passes over memory. Letters: R row and C column of a weight."""

import math
from dataclasses import dataclass

import tensorflow as tf

from lingvo_moe.core.kernels import xla
from lingvo_moe.core.kernels.xla import AdafactorRecipe, Delta
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.tensors import fused


@dataclass(frozen=True)
class _AppliedDelta:
    """A `Delta` whose new weight was computed with the update."""

    new: tf.Tensor
    square: tf.Tensor
    grad_square: tf.Tensor

    def SumOfSquares(self) -> tf.Tensor:
        return self.square

    def SubtractFrom(self, weight: tf.Tensor) -> tf.Tensor:
        return tf.cast(self.new, weight.dtype)


def adafactor(
    weight: tf.Tensor, grad: tf.Tensor, slots: NestedMap, recipe: AdafactorRecipe
) -> tuple[Delta, NestedMap]:
    """See `Kernels`; in few passes where the moment is factored over the last two dimensions."""
    rank = weight.shape.rank
    if recipe.dims != (rank - 2, rank - 1):
        return xla.adafactor(weight, grad, slots, recipe)
    if not recipe.stack_dims:
        weights, grads, each = [weight], [grad], [slots]
    else:
        # Layer by layer: a layer that fits in a cache is read faster.
        num = weight.shape[0]
        weights, grads = [weight[i] for i in range(num)], [grad[i] for i in range(num)]
        rows, cols = tf.unstack(slots.row), tf.unstack(slots.col)
        each = [NestedMap(row=r, col=c) for r, c in zip(rows, cols, strict=True)]
    parts = [_factors(*part, recipe) for part in zip(weights, grads, each, strict=True)]
    factors = [part.factors for part in parts]
    new = _subtract(weights, grads, factors, bool(recipe.stack_dims))
    new_slots = parts[0].slots
    if recipe.stack_dims:
        names = ("row", "col")
        new_slots = NestedMap({n: tf.stack([part.slots[n] for part in parts]) for n in names})
    square = tf.add_n([part.square for part in parts])
    return _AppliedDelta(new, square, tf.add_n([part.grad_square for part in parts])), new_slots


def _factors(
    weight: tf.Tensor, grad: tf.Tensor, slots: NestedMap, recipe: AdafactorRecipe
) -> NestedMap:
    """For a weight [..., R, C] of one layer: `factors` (a [..., R], b [..., C]), so that a b grad is to be subtracted;
    `slots`, the new ones; and the sums of squares of that product and of grad.

    The update u is the product of the gradient g and two vectors, so that sum u^2 = a^2 . g^2 . b^2: the same matrix
    product that sums the columns of g^2 gives it, and u itself is never written.
    """
    rows, columns = grad.shape[-2:]
    square = tf.square(grad)
    sums = tf.reduce_sum(square, -1)
    row = recipe.Average(slots.row, sums * (1.0 / columns) + recipe.epsilon1)
    a_square = tf.reduce_mean(row, -1, keepdims=True) / row
    both = tf.matmul(tf.stack([tf.fill(tf.shape(row), 1.0 / rows), a_square], -2), square)
    means, weighted = tf.unstack(both, axis=-2)
    col = recipe.Average(slots.col, means + recipe.epsilon1)
    total = tf.reduce_sum(weighted / col)
    per_element = 1.0 / math.prod(weight.shape)
    scale = recipe.rate
    if recipe.clip_threshold:
        excess = tf.sqrt(total * per_element) * (1.0 / recipe.clip_threshold)
        scale *= tf.math.reciprocal(tf.maximum(excess, 1.0))
    if recipe.multiply_by_parameter_scale:
        size = tf.sqrt(tf.nn.l2_loss(weight) * (2.0 * per_element))
        scale *= tf.maximum(size, recipe.epsilon2)
    return NestedMap(
        factors=[tf.sqrt(a_square) * scale, tf.math.rsqrt(col)],
        slots=NestedMap(row=row, col=col),
        square=total * tf.square(scale),
        grad_square=tf.reduce_sum(sums),
    )


@fused
def _subtract(
    weights: list[tf.Tensor], grads: list[tf.Tensor], factors: list[list[tf.Tensor]], stack: bool
) -> tf.Tensor:
    """weight [..., R, C] - a [..., R] grad b [..., C], of each layer; `stack`: all in one tensor."""
    new = [
        weight - grad * a[..., tf.newaxis] * b[..., tf.newaxis, :]
        for weight, grad, (a, b) in zip(weights, grads, factors, strict=True)
    ]
    return tf.stack(new) if stack else new[0]
