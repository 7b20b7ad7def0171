"""BatchNorm. Letters: B batch, Y rows, X columns, O channels."""

from collections.abc import Sequence
from typing import ClassVar

import tensorflow as tf

from lingvo_moe.core.base_layer import BaseLayer, WeightParams
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params as HyperParams
from lingvo_moe.core.initializers import WeightInit
from lingvo_moe.core.layers.elementwise import elementwise_meta
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding.row_parts import num_row_parts, sum_over_row_parts

_FLOPS_PER_ELEMENT = 10  # approximately


class BatchNorm(BaseLayer):
    """y = (x - mean) / sqrt(variance + epsilon) * scale + bias for each channel.

    In training, mean and variance are those of the whole batch, however it is sharded: the sums over
    its parts are added up over the devices, also where a manual region has its rows only (sharding/row_parts.py).
    A pipeline gives it one micro-batch at a time, and so does gradient accumulation: then the batch is the micro-batch.
    Inference uses moving averages of both, which are variables
    that no gradient changes: their next values are returned. Statistics and the result are computed in
    float32 whatever the activations' type, then rounded once.
    """

    PART: ClassVar[str] = "normalization"

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("channels", 0, "O.", checks.SIZE)
        p.Define("epsilon", 1e-5, "Added to the variance.", checks.POSITIVE)
        p.Define("decay", 0.9, "The share of a moving average that one step keeps.", checks.SHARE)
        p.Define("initial_scale", 1.0, "The scale before training.", checks.NOT_NEGATIVE)
        return p

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        start = {"scale": self.p.initial_scale, "bias": 0.0}
        for name, value in start.items():
            self.CreateVariable(name, WeightParams.Vector((self.p.channels,), "O", value))
        for name, value in {"moving_mean": 0.0, "moving_variance": 1.0}.items():
            init = WeightInit.Constant(value)
            average = WeightParams((self.p.channels,), "O", init, "float32", trainable=False)
            self.CreateVariable(name, average)

    def FProp(self, theta: NestedMap, x: tf.Tensor, training: bool) -> tuple[tf.Tensor, NestedMap]:
        """Normalizes x [B, Y, X, O].

        Args:
            x: activations, of a static shape in training.
            training: whether to use the batch's statistics; else the moving averages.

        Returns:
            The normalized activations, and extras: in training `updates`, the next moving averages by
            their variables' paths; see BaseTask.
        """
        wide = tf.cast(x, tf.float32)
        extras = NestedMap()
        if training:
            mean, variance = self._Statistics(wide)
            extras.updates = NestedMap()
            for name, value in {"moving_mean": mean, "moving_variance": variance}.items():
                moved = theta[name] + (1 - self.p.decay) * (tf.stop_gradient(value) - theta[name])
                extras.updates.Set(f"{self.path}.{name}", moved)
        else:
            mean, variance = theta.moving_mean, theta.moving_variance
        scale, bias = (tf.cast(w, tf.float32) for w in (theta.scale, theta.bias))
        y = (wide - mean) * (tf.math.rsqrt(variance + self.p.epsilon) * scale) + bias
        return self.Shard(tf.cast(y, self.fprop_dtype), "BYXO"), extras

    def _Statistics(self, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The mean and the variance of each channel, [O]."""
        # Sums times 1/n: the gradient of tf.reduce_mean would make a constant as large as x.
        per_element = self.p.channels / (x.shape.num_elements() * num_row_parts())
        mean = sum_over_row_parts(tf.reduce_sum(x, axis=[0, 1, 2])) * per_element
        squares = tf.reduce_sum(tf.square(x - mean), axis=[0, 1, 2])
        return mean, sum_over_row_parts(squares) * per_element

    @classmethod
    def FPropMeta(cls, params: HyperParams, *input_shapes: Sequence[int]) -> NestedMap:
        """About ten operations for each element."""
        return elementwise_meta(_FLOPS_PER_ELEMENT, input_shapes[0])
