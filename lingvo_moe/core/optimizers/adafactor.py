"""Adafactor (Shazeer and Stern 2018): second moments in two vectors instead of a matrix.

Letters follow the variable: for wi 'EMH' the slots are row 'EM' and col 'EH', cut along E as wi is;
for a query's 'MNK' they are row 'MN' and col 'NK', a matrix for each head.
"""

import math

import tensorflow as tf

from lingvo_moe.core import checks
from lingvo_moe.core.base_layer import VariableSpec
from lingvo_moe.core.hyperparams import InstantiableParams
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.op_by_op import fused
from lingvo_moe.core.optimizers.base import Change, Optimizer, slot_spec


class Adafactor(Optimizer):
    """The paper's optimizer, with the recipe of its M4 experiments as defaults.

    For a gradient g at update t = 1, 2, ...:

    * decay: b = min(beta2, 1 - t^-decay_exponent), 0.99 and 0.8 here: the average reaches back over
      all steps at first (no bias correction is needed: b is 0 at t = 1) and over about 100 later.
    * second moment v of g^2 + epsilon1, as the outer product of its row and column means over the
      two largest dimensions (never those that count layers or experts), divided by the mean of both;
      in full where one of them is small.
    * u = g / sqrt(v), divided by max(1, rms(u) / clip_threshold).
    * the weight loses rate * max(epsilon2, rms(weight)) * u, or rate * u without
      `multiply_by_parameter_scale`.

    There is no first moment (beta1 = 0), so no slot of a weight's own size. Each rms is that of one
    variable of one layer: the leading dimensions that count the layers of a `repeat` are kept apart,
    and scanned layers learn exactly as unrolled ones do.
    """

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define(
            "beta2",
            0.99,
            "Upper limit of the second moment's decay; 1.0: none.",
            check=checks.Number(0, 1, open_low=True),
        )
        p.Define(
            "decay_exponent", 0.8, "The decay rises as 1 - t^-exponent.", check=checks.POSITIVE
        )
        p.Define(
            "clip_threshold",
            1.0,
            "Largest root mean square of u; 0: no clipping of updates.",
            check=checks.NOT_NEGATIVE,
        )
        p.Define("multiply_by_parameter_scale", True, "Steps relative to the weight's size.")
        p.Define("epsilon1", 1e-30, "Added to squared gradients.", check=checks.POSITIVE)
        p.Define(
            "epsilon2",
            1e-3,
            "The least size of a weight, for its steps.",
            check=checks.NOT_NEGATIVE,
        )
        p.Define(
            "min_dim_size_to_factor",
            128,
            "Both dimensions must be this large; smaller ones would save little.",
            check=checks.COUNT,
        )
        return p

    def _Factored(self, spec: VariableSpec) -> tuple[int, int] | None:
        """The two dimensions, in order, whose product stands for the second moment; None: it is kept in full."""
        own = [d for d in range(spec.stack_dims, len(spec.shape)) if spec.letters[d] != "E"]
        largest = sorted(own, key=lambda d: (-spec.shape[d], -d))[:2]
        if len(largest) < 2 or min(spec.shape[d] for d in largest) < self.p.min_dim_size_to_factor:
            return None
        return min(largest), max(largest)

    def _SlotSpecs(self, spec: VariableSpec) -> NestedMap:
        dims = self._Factored(spec)
        if dims is None:
            return NestedMap(full=slot_spec(spec, "full"))
        return NestedMap(
            row=slot_spec(spec, "row", without=dims[1]), col=slot_spec(spec, "col", without=dims[0])
        )

    def _UpdateOne(
        self,
        spec: VariableSpec,
        weight: tf.Tensor,
        grad: tf.Tensor,
        slot: NestedMap,
        rate: tf.Tensor,
        step: tf.Tensor,
    ) -> tuple[tf.Tensor, NestedMap]:
        p = self.p
        t = tf.cast(step, tf.float32) + 1.0
        decay = tf.minimum(1.0 - tf.pow(t, -p.decay_exponent), p.beta2)
        square = tf.square(grad) + p.epsilon1

        def average(old: tf.Tensor, new: tf.Tensor) -> tf.Tensor:
            return decay * old + (1.0 - decay) * new

        dims = self._Factored(spec)
        if dims is not None:
            first, second = dims
            row = average(slot.row, tf.reduce_mean(square, second))
            col = average(slot.col, tf.reduce_mean(square, first))
            relative_row = row / tf.reduce_mean(row, first, keepdims=True)
            update = grad * tf.expand_dims(tf.math.rsqrt(relative_row), second)
            update *= tf.expand_dims(tf.math.rsqrt(col), first)
            new_slot = NestedMap(row=row, col=col)
        else:
            full = average(slot.full, square)
            update = grad * tf.math.rsqrt(full)
            new_slot = NestedMap(full=full)
        if p.clip_threshold:
            excess = _rms(update, spec.stack_dims) * (1.0 / p.clip_threshold)
            update *= tf.math.reciprocal(tf.maximum(excess, 1.0))
        if p.multiply_by_parameter_scale:
            update *= tf.maximum(_rms(weight, spec.stack_dims), p.epsilon2)
        return update * rate, new_slot

    def _InFewPasses(
        self,
        spec: VariableSpec,
        weight: tf.Tensor,
        grad: tf.Tensor,
        slot: NestedMap,
        rate: tf.Tensor,
        step: tf.Tensor,
    ) -> Change | None:
        """See Optimizer: here for float32 weights whose moment is factored over the last two dimensions."""
        rank = len(spec.shape)
        if self._Factored(spec) != (rank - 2, rank - 1) or weight.dtype != tf.float32:
            return None
        if not spec.stack_dims:
            weights, grads, slots = [weight], [grad], [slot]
        else:
            # Layer by layer: what fits in a cache is read faster.
            num = spec.shape[0]
            weights, grads = [weight[i] for i in range(num)], [grad[i] for i in range(num)]
            rows, cols = tf.unstack(slot.row), tf.unstack(slot.col)
            slots = [NestedMap(row=r, col=c) for r, c in zip(rows, cols, strict=True)]
        parts = [self._Factors(*part, rate, step) for part in zip(weights, grads, slots)]
        factors = [part.factors for part in parts]
        new = _subtract(weights, grads, factors, bool(spec.stack_dims))
        if not spec.stack_dims:
            new_slot = parts[0].slot
        else:
            names = ("row", "col")
            new_slot = NestedMap({n: tf.stack([part.slot[n] for part in parts]) for n in names})
        return Change(
            new,
            new_slot,
            square=tf.add_n([part.square for part in parts]),
            grad_square=tf.add_n([part.grad_square for part in parts]),
        )

    def _Factors(
        self,
        weight: tf.Tensor,
        grad: tf.Tensor,
        slot: NestedMap,
        rate: tf.Tensor,
        step: tf.Tensor,
    ) -> NestedMap:
        """For a weight [..., R, C] of one layer: `factors` (a [..., R], b [..., C]), so that a b grad is
        to be subtracted; `slot`, the new one; and the sums of squares of that product and of grad.

        u is the product of g and two vectors, so that sum u^2 = a^2 . g^2 . b^2: the same matrix product
        that sums the columns of g^2 gives it, and u itself is never written.
        """
        p = self.p
        t = tf.cast(step, tf.float32) + 1.0
        decay = tf.minimum(1.0 - tf.pow(t, -p.decay_exponent), p.beta2)
        rows, columns = grad.shape[-2:]
        square = tf.square(tf.cast(grad, tf.float32))
        sums = tf.reduce_sum(square, -1)
        row = decay * slot.row + (1.0 - decay) * (sums * (1.0 / columns) + p.epsilon1)
        a_square = tf.reduce_mean(row, -1, keepdims=True) / row
        both = tf.matmul(tf.stack([tf.fill(tf.shape(row), 1.0 / rows), a_square], -2), square)
        means, weighted = tf.unstack(both, axis=-2)
        col = decay * slot.col + (1.0 - decay) * (means + p.epsilon1)
        total = tf.reduce_sum(weighted / col)
        per_element = 1.0 / math.prod(weight.shape)
        scale = rate
        if p.clip_threshold:
            excess = tf.sqrt(total * per_element) * (1.0 / p.clip_threshold)
            scale *= tf.math.reciprocal(tf.maximum(excess, 1.0))
        if p.multiply_by_parameter_scale:
            size = tf.sqrt(tf.nn.l2_loss(weight) * (2.0 * per_element))
            scale *= tf.maximum(size, p.epsilon2)
        return NestedMap(
            factors=[tf.sqrt(a_square) * scale, tf.math.rsqrt(col)],
            slot=NestedMap(row=row, col=col),
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


def _rms(x: tf.Tensor, stack_dims: int) -> tf.Tensor:
    """The root mean square of each layer's part of x, broadcastable to x."""
    axes = list(range(stack_dims, x.shape.rank))
    count = math.prod(x.shape[stack_dims:])
    return tf.sqrt(tf.reduce_sum(tf.square(x), axes, keepdims=True) * (1.0 / count))
