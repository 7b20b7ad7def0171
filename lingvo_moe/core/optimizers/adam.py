"""Adam (Kingma and Ba 2015) and AdamW (Loshchilov and Hutter 2019). A slot has the letters of its variable."""

import math

import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.base_layer import VariableSpec
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.optimizers.base_optimizer import BaseOptimizer, Numbers, slot_spec
from lingvo_moe.core.optimizers.schedules import InverseSqrt


class Adam(BaseOptimizer):
    """Steps along the mean of the gradients, relative to the root of the mean of their squares.

    For a gradient g at update t = 1, 2, ..., with weight_decay * w added where w decays:

    * m = beta1 * m + (1 - beta1) * g and v = beta2 * v + (1 - beta2) * g^2, both 0 at first.
    * the weight loses rate * m' / (sqrt(v') + epsilon), where m' = m / (1 - beta1^t) and v' = v / (1 - beta2^t).

    With beta1 = 0 there is no slot for m.
    """

    DECOUPLED = False
    ELEMENTWISE = True

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("beta1", 0.9, "The share that the mean keeps at a step.", checks.SHARE)
        p.Define("beta2", 0.999, "The same, of the mean of squares.", checks.SHARE)
        p.Define("epsilon", 1e-8, "Added to the root of the mean square.", checks.POSITIVE)
        return p.Set(learning_rate=InverseSqrt.Params().Set(value=1e-3, warmup_steps=4000))

    def _SlotSpecs(self, spec: VariableSpec) -> NestedMap:
        slots = NestedMap(square=slot_spec(spec, "square"))
        if self.p.beta1:
            slots.mean = slot_spec(spec, "mean")
        return slots

    def _UpdateOne(
        self,
        spec: VariableSpec,
        weight: tf.Tensor,
        grad: tf.Tensor,
        slot: NestedMap,
        numbers: Numbers,
    ) -> tuple[kernels.Delta, NestedMap]:
        p = self.p
        t = tf.cast(numbers.step, tf.float32) + 1.0
        rate = numbers.rate / _weights_so_far(p.beta1, t) if p.beta1 else numbers.rate

        def one(
            grad: tf.Tensor, square: tf.Tensor, mean: tf.Tensor, rate: tf.Tensor, share: tf.Tensor
        ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            square = p.beta2 * square + (1.0 - p.beta2) * tf.square(grad)
            mean = p.beta1 * mean + (1.0 - p.beta1) * grad if p.beta1 else grad
            return square, mean, rate * mean / (tf.sqrt(square / share) + p.epsilon)

        share = _weights_so_far(p.beta2, t)
        old = slot.mean if p.beta1 else grad
        square, mean, delta = kernels.current().one_pass(one, grad, slot.square, old, rate, share)
        new = NestedMap(square=square, mean=mean) if p.beta1 else NestedMap(square=square)
        return kernels.DenseDelta(delta), new


def _weights_so_far(beta: float, t: tf.Tensor) -> tf.Tensor:
    """1 - beta^t, without the cancellation of float32 at small t."""
    return -tf.math.expm1(t * math.log(beta)) if beta else tf.ones_like(t)


class AdamW(Adam):
    """Adam with decoupled weight decay: the weight loses rate * weight_decay * w beside Adam's step."""

    DECOUPLED = True

    @classmethod
    def Params(cls) -> InstantiableParams:
        return super().Params().Set(weight_decay=0.01)
