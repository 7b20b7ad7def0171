"""8-bit weights in 8-bit products, for TensorFlow's kernels on a CPU.

Each column of the weight and each row of the input has its own scale, so that its largest number becomes the largest
integer. Sums of products of integers are exact in any order and are rounded once, to float32. A row's result therefore
does not depend on the other rows, nor on their number (left unknown in the graph, as a search does).

The kernel (oneDNN's, as `_QuantizedMatMul`) takes inputs of 0 to 255 and weights of -128 to 127. Inputs are shifted up
by 128, and a bias subtracts what the shift adds to a sum.

The kernel packs the weights in an order of its own. Packing at each call would take longer than the product; the
kernel packs once only if an attribute says that the weight is constant. The public operations of the same kernel set
that attribute where the weight is a constant of the graph, but TensorFlow's graph optimizer writes such constants out
as text, which takes seconds and gigabytes. The operation with an underscore has the attribute `is_weight_const` for a
variable too. The packed weight belongs to the operation's node in the graph, which must always see the same weight: no
argument of a function with several callers, no slice in a loop, and no variable that is assigned later.

Letters: R row, M and N the dimensions of a weight.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_moe.core.kernels.weights import Matrix
from lingvo_moe.core.private import tensorflow as private

_SHIFT = 128
# Processors without VNNI instructions add two products in 16 bits: 2 x 255 x 64 is the most that these hold.
_LARGEST_WEIGHT = 64
_LARGEST_INPUT = 127
_ZERO = 1e-35  # columns with max|w| at or below this get scale 1: theirs would be no normal float32


class EightBit(Matrix):
    """A weight [M,N] as int8 and a scale for each column; a leaf of packed weights, used like `FloatBlocks`.

    Attributes:
        int8_MN: the integers, from -64 to 64.
        scale_N: float32; int8_MN * scale_N is about the weight.
        bias_N: float32, which subtracts what the shift of the inputs adds.
    """

    def __init__(self, int8_MN: Any, scale_N: Any, bias_N: Any):
        self.int8_MN, self.scale_N, self.bias_N = int8_MN, scale_N, bias_N

    @classmethod
    def Of(cls, w_MN: tf.Tensor | np.ndarray) -> "EightBit":
        """Rounds a float weight, an array or an eager tensor [M,N].

        Products with a column that contains NaN or infinity are NaN.
        """
        w_MN = np.asarray(w_MN, np.float32)
        most_N = np.max(np.abs(w_MN), 0)
        finite_N = np.isfinite(most_N)
        scale_N = np.where(finite_N & (most_N > _ZERO), most_N / _LARGEST_WEIGHT, 1)
        int8_MN = np.round(np.where(finite_N, w_MN, 0) / scale_N).astype(np.int8)
        scale_N = np.where(finite_N, scale_N, np.nan).astype(np.float32)
        bias_N = (-_SHIFT * np.sum(int8_MN, 0, dtype=np.int64)).astype(np.float32)
        return cls(tf.constant(int8_MN), tf.constant(scale_N), tf.constant(bias_N))

    @property
    def tensors(self) -> tuple[Any, ...]:
        return self.int8_MN, self.scale_N, self.bias_N

    @property
    def rows_alike(self) -> bool:
        return True  # sums of integers are exact

    def With(self, int8_MN: Any, scale_N: Any, bias_N: Any) -> "EightBit":
        return EightBit(int8_MN, scale_N, bias_N)

    def HeadsProduct(self, x_RM: tf.Tensor, heads: int) -> tf.Tensor:
        size = self.int8_MN.shape[1] // heads
        return tf.transpose(tf.reshape(self.Product(x_RM), [-1, heads, size]), [1, 0, 2])

    def Product(self, x_RM: tf.Tensor) -> tf.Tensor:
        if not tf.inside_function():  # the operation exists in graphs only
            return tf.function(self.Product, autograph=False)(x_RM)
        kind, x_RM = x_RM.dtype, tf.cast(x_RM, tf.float32)
        scale_R1 = tf.reduce_max(tf.abs(x_RM), 1, keepdims=True) / _LARGEST_INPUT
        # Casts round towards zero, so that a half more rounds to the nearest.
        shifted_RM = tf.math.divide_no_nan(x_RM, scale_R1) + (_SHIFT + 0.5)
        y_RN = private.integers_product(tf.cast(shifted_RM, tf.uint8), self.int8_MN, self.bias_N)
        return tf.cast(y_RN * scale_R1 * self.scale_N, kind)


def check_supported() -> None:
    """Raises ValueError where TensorFlow has no such kernel: it is oneDNN's, of builds for x86-64."""
    try:
        EightBit.Of(np.ones([4, 4])).Product(tf.ones([1, 4]))
    except (tf.errors.OpError, RuntimeError, ValueError) as e:
        raise ValueError(
            f"this TensorFlow has no products of 8 bits ({private.QUANTIZED_PRODUCT}), which its builds for x86-64 "
            f"have; take float32 weights instead of int8: {e}"
        ) from e
