"""Layers that compute each element by itself: ActivationLayer, Dropout."""

import math
from collections.abc import Sequence

import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.base_layer import BaseLayer
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params as HyperParams
from lingvo_moe.core.layers.feed_forward import ACTIVATIONS
from lingvo_moe.core.nested_map import NestedMap

ELEMENTWISE = tuple(name for name, function in ACTIVATIONS.items() if not function.gated)
_DROPOUT_FLOPS = 10  # for each element, approximately


class ActivationLayer(BaseLayer):
    """An elementwise function, by name."""

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("activation", "relu", "The function.", checks.one_of(ELEMENTWISE))
        return p

    def FProp(self, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        """The function of each element of x, of any shape."""
        return ACTIVATIONS[self.p.activation].function(x)

    @classmethod
    def FPropMeta(cls, params: HyperParams, *input_shapes: Sequence[int]) -> NestedMap:
        """The function's operations for each element."""
        return elementwise_meta(ACTIVATIONS[params.activation].flops, input_shapes[0])


class Dropout(BaseLayer):
    """Zeroes elements at random in training, and scales the others by 1 / (1 - rate)."""

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("rate", 0.0, "The probability that an element is zeroed.", checks.SHARE)
        return p

    def FProp(self, theta: NestedMap, x: tf.Tensor, seed: tf.Tensor | None) -> tf.Tensor:
        """x, of a static shape, with elements zeroed by `seed` (int32 [2]); x itself where it is None."""
        return kernels.dropout(x, self.p.rate, seed)

    @classmethod
    def FPropMeta(cls, params: HyperParams, *input_shapes: Sequence[int]) -> NestedMap:
        """About ten operations for each element: random numbers are computed."""
        return elementwise_meta(_DROPOUT_FLOPS, input_shapes[0])


def elementwise_meta(flops_per_element: int, shape: Sequence[int]) -> NestedMap:
    """The result of FPropMeta for a layer whose output has its input's shape."""
    return NestedMap(flops=math.prod(shape) * flops_per_element, out_shapes=(tuple(shape),))
