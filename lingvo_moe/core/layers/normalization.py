"""Layer and RMS normalization. Letters: B batch, T time, M model."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.base_layer import BaseLayer, WeightParams
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params as HyperParams
from lingvo_moe.core.nested_map import NestedMap


class LayerNorm(BaseLayer):
    """y = (x - mean) / sqrt(variance + epsilon) * scale + bias over the last dimension, M.

    Statistics and the result are computed in float32 whatever the activations' type, then rounded
    once.
    """

    PART: ClassVar[str] = "normalization"
    BIASED: ClassVar[bool] = True  # has a bias, and subtracts the mean

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("model_dim", 0, "M.", checks.SIZE)
        p.Define("epsilon", 1e-6, "Added to the variance, or to the mean square.", checks.POSITIVE)
        return p

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        shape = (self.p.model_dim,)
        self.CreateVariable("scale", WeightParams.Vector(shape, "M", 1.0))
        if self.BIASED:
            self.CreateVariable("bias", WeightParams.Vector(shape, "M", 0.0))

    def FProp(self, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        """Normalizes x [..., M]; the result has the activations' type."""
        bias = theta.bias if self.BIASED else None
        return normalized(x, theta.scale, bias, self.p.epsilon, self.fprop_dtype)

    @classmethod
    def FPropMeta(cls, params: HyperParams, *input_shapes: Sequence[int]) -> NestedMap:
        """No matrix multiplication: elementwise work is not counted."""
        return NestedMap(flops=0, out_shapes=(tuple(input_shapes[0]),))


class RmsNorm(LayerNorm):
    """y = x / sqrt(mean(x^2) + epsilon) * scale over the last dimension, M (Zhang and Sennrich 2019, "Root Mean Square
    Layer Normalization"), in float32 like LayerNorm."""

    BIASED: ClassVar[bool] = False


def normalized(
    x: tf.Tensor, scale: tf.Tensor, bias: tf.Tensor | None, epsilon: float, dtype: tf.DType
) -> tf.Tensor:
    """LayerNorm's y for weights [M], RmsNorm's where there is no bias: in float32, then rounded to `dtype`."""
    y = kernels.current().normalize(tf.cast(x, tf.float32), scale, bias, epsilon)
    return tf.cast(y, dtype)


NORMS: Mapping[str, type[LayerNorm]] = {"layer": LayerNorm, "rms": RmsNorm}
