"""Pooling. Letters: B batch, Y rows, X columns, O channels, M model."""

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import tensorflow as tf

from lingvo_moe.core.base_layer import BaseLayer
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params as HyperParams
from lingvo_moe.core.layers.convolution import PADDINGS, num_windows
from lingvo_moe.core.nested_map import NestedMap

_KINDS = ("max", "average")
_ROWS, _COLUMNS = 1, 2  # dimensions of an image


class Pool2D(BaseLayer):
    """The maximum or the average of each window of an image, channel by channel.

    Padding is no part of a window: it changes neither its maximum nor its average. Of equal largest
    elements the first one, row by row, gets the gradient. Windows are taken as shifted slices, first
    along rows, then along columns: XLA partitions these rightly, forward and backward, where its own
    gradient of maxima of windows that overlap by their stride is wrong.
    """

    PART: ClassVar[str] = "pooling"

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("kind", "max", "max or average.", checks.one_of(_KINDS))
        p.Define("window", 2, "Rows and columns of a window.", checks.SIZE)
        p.Define("stride", 2, "Rows and columns from one window to the next.", checks.SIZE)
        p.Define("padding", "SAME", "SAME or VALID, as Conv2D's.", checks.one_of(PADDINGS))
        return p

    def FProp(self, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        """Pools x [B, Y, X, O], of static rows and columns; returns [B, Y', X', O]."""
        height, width = x.shape[_ROWS], x.shape[_COLUMNS]
        for dim in (_COLUMNS, _ROWS):
            x = self.Shard(self._Along(x, dim), "BYXO")
        if self.p.kind == "max":
            return x
        rows, columns = self._Counts(height), self._Counts(width)
        return x * tf.constant(1 / (rows[:, None, None] * columns[:, None]), x.dtype)

    def _Along(self, x: tf.Tensor, dim: int) -> tf.Tensor:
        """The maximum or the sum of each window along one dimension."""
        p = self.p
        count = num_windows(x.shape[dim], p.window, p.stride, p.padding)
        before, after = self._Padding(x.shape[dim])
        if before or after:
            paddings = [[before, after] if d == dim else [0, 0] for d in range(4)]
            x = tf.pad(x, paddings, constant_values=-np.inf if p.kind == "max" else 0)
        combine = tf.maximum if p.kind == "max" else tf.add
        pooled = None
        for first in range(p.window):
            elements = slice(first, first + (count - 1) * p.stride + 1, p.stride)
            part = x[(slice(None),) * dim + (elements,)]
            pooled = part if pooled is None else combine(pooled, part)
        return pooled

    def _Padding(self, size: int) -> tuple[int, int]:
        """The number of elements of padding before and after `size` elements."""
        p = self.p
        count = num_windows(size, p.window, p.stride, p.padding)
        missing = max((count - 1) * p.stride + p.window - size, 0)
        return missing // 2, missing - missing // 2

    def _Counts(self, size: int) -> np.ndarray:
        """The number of elements of each window along a dimension of `size`, without padding."""
        p = self.p
        first = np.arange(num_windows(size, p.window, p.stride, p.padding)) * p.stride
        first = first - self._Padding(size)[0]
        return np.minimum(first + p.window, size) - np.maximum(first, 0)

    @classmethod
    def FPropMeta(cls, params: HyperParams, *input_shapes: Sequence[int]) -> NestedMap:
        """One operation for each element of each window."""
        p = params
        batch, height, width, channels = input_shapes[0]
        rows, columns = (num_windows(n, p.window, p.stride, p.padding) for n in (height, width))
        shape = (batch, rows, columns, channels)
        return NestedMap(flops=math.prod(shape) * p.window**2, out_shapes=(shape,))


class GlobalAveragePool(BaseLayer):
    """The average of each channel over an image."""

    PART: ClassVar[str] = "pooling"
    NAMES_ITS_PARTS: ClassVar[bool] = True

    def FProp(self, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        """Averages x [B, Y, X, O], of static rows and columns, in float32; returns [B, O]."""
        pixels = x.shape[_ROWS] * x.shape[_COLUMNS]
        mean = tf.reduce_sum(tf.cast(x, tf.float32), axis=[_ROWS, _COLUMNS]) * (1 / pixels)
        return self.Shard(tf.cast(mean, self.fprop_dtype), "BO")

    @classmethod
    def FPropMeta(cls, params: HyperParams, *input_shapes: Sequence[int]) -> NestedMap:
        """One operation for each element."""
        shape = input_shapes[0]
        return NestedMap(flops=math.prod(shape), out_shapes=((shape[0], shape[3]),))
