"""LayerNorm. Letters: B batch, T time, M model."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from lingvo_moe.core import checks
from lingvo_moe.core.base_layer import BaseLayer, WeightParams
from lingvo_moe.core.hyperparams import InstantiableParams
from lingvo_moe.core.hyperparams import Params as HyperParams
from lingvo_moe.core.initializers import WeightInit
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.op_by_op import fused, is_op_by_op, rounded_alike


class LayerNorm(BaseLayer):
    """y = (x - mean) / sqrt(variance + epsilon) * scale + bias over the last dimension, M.

    Statistics and the result are computed in float32 whatever the activations' type, then rounded
    once.
    """

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("model_dim", 0, "M.", check=checks.SIZE)
        p.Define("epsilon", 1e-6, "Added to the variance.", check=checks.POSITIVE)
        return p

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        shape = (self.p.model_dim,)
        self.CreateVariable("scale", WeightParams(shape, "M", WeightInit.Constant(1.0)))
        self.CreateVariable("bias", WeightParams(shape, "M", WeightInit.Constant(0.0)))

    def FProp(self, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        """Normalizes x [..., M]; the result has the activations' type."""
        wide = tf.cast(x, tf.float32)
        if is_op_by_op():
            weights = (tf.cast(w, tf.float32) for w in (theta.scale, theta.bias))
            return tf.cast(_op_by_op(self.p.epsilon)(wide, *weights), self.fprop_dtype)
        centred, inverse = _statistics(wide, self.p.epsilon)
        normal = centred * inverse
        scale, bias = (tf.cast(w, tf.float32) for w in (theta.scale, theta.bias))
        return tf.cast(normal * scale + bias, self.fprop_dtype)

    @classmethod
    def FPropMeta(cls, params: HyperParams, *input_shapes: Sequence[int]) -> NestedMap:
        """No matrix multiplication: elementwise work is not counted."""
        return NestedMap(flops=0, out_shapes=(tuple(input_shapes[0]),))


def _statistics(x: tf.Tensor, epsilon: float) -> tuple[tf.Tensor, tf.Tensor]:
    """x without its mean, and 1 / sqrt(variance + epsilon)."""
    # Sums times 1/M: the gradient of tf.reduce_mean would make a constant as large as x.
    per_element = 1.0 / x.shape[-1]
    centred = x - tf.reduce_sum(x, axis=-1, keepdims=True) * per_element
    variance = tf.reduce_sum(centred * centred, axis=-1, keepdims=True) * per_element
    return centred, rounded_alike(tf.math.rsqrt, variance + epsilon)


def _op_by_op(epsilon: float) -> Callable:
    """For TensorFlow's own kernels: a gradient of two fused passes, and sums over tokens as products."""

    @tf.custom_gradient
    def normalize(x: tf.Tensor, scale: tf.Tensor, bias: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        centred, inverse = _statistics(x, epsilon)
        normal = centred * inverse

        def grad(dy: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            dx, terms = _gradient(dy, normal, inverse, scale)
            return dx, _sum_tokens(terms), _sum_tokens(dy)

        return normal * scale + bias, grad

    return normalize


@fused
def _gradient(
    dy: tf.Tensor, normal: tf.Tensor, inverse: tf.Tensor, scale: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Of x, and what sums over the tokens to that of the scale."""
    terms = dy * normal
    dnormal = dy * scale
    per_element = 1.0 / normal.shape[-1]
    mean = tf.reduce_sum(dnormal, -1, keepdims=True) * per_element
    along = tf.reduce_sum(dnormal * normal, -1, keepdims=True) * per_element
    return inverse * (dnormal - mean - normal * along), terms


def _sum_tokens(x: tf.Tensor) -> tf.Tensor:
    """[..., M] to [M]."""
    flat = tf.reshape(x, [-1, x.shape[-1]])
    return tf.reshape(tf.matmul(tf.ones([1, tf.shape(flat)[0]]), flat), [-1])
