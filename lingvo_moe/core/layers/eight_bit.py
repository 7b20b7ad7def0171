"""Weights of 8 bits in products of 8 bits, for TensorFlow's own kernels on a CPU (core/op_by_op.py).

A column of the weight and a row of the input each have a scale of their own, so that their largest number is the
largest integer; sums of products of integers are exact, in any order: a row's result does not depend on what rows
it is multiplied with, nor on how many there are.

The kernel (oneDNN's, as QuantizedMatMulWithBiasAndDequantize) takes inputs of 0 to 255 and weights of -128 to 127.
Inputs are moved up by 128, and what that adds to a sum is taken off again as a bias.

The kernel packs the weights in an order of its own. At each call that would take longer than the product; it does so
once only where the weight is a constant of the graph. So an `EightBit` is no variable but an array, which becomes a
constant where it is used.

Letters: R row, M and N the dimensions of a weight, P panel, W column of a panel.
"""

import numpy as np
import tensorflow as tf

_MOVED = 128
# Processors without VNNI instructions add two products in 16 bits: 2 x 255 x 64 is the most that these hold.
_LARGEST_WEIGHT = 64
_LARGEST_INPUT = 127


class EightBit:
    """A weight [M,N] as int8 and a scale for each column; a leaf of arranged weights, used like panels.

    Args:
        w_MN: float, with values (no tensor of a graph). Products with a column that holds NaN or infinity are NaN.
        width: W, how many columns are a panel.

    Attributes:
        int8_MN: the integers, from -64 to 64.
        scale_N: float32; int8_MN * scale_N is about w_MN.
        shape: that of the panels, (P, M, W).
    """

    def __init__(self, w_MN: tf.Tensor | np.ndarray, width: int):
        w_MN = np.asarray(w_MN, np.float32)
        most_N = np.max(np.abs(w_MN), 0)
        finite_N = np.isfinite(most_N)
        scale_N = np.where(finite_N & (most_N > 0), most_N / _LARGEST_WEIGHT, 1)
        self.int8_MN = np.round(np.where(finite_N, w_MN, 0) / scale_N).astype(np.int8)
        self.scale_N = np.where(finite_N, scale_N, np.nan).astype(np.float32)
        self.shape = (-(-w_MN.shape[1] // width), w_MN.shape[0], width)

    @property
    def nbytes(self) -> int:
        """What it takes, in bytes."""
        return self.int8_MN.nbytes + self.scale_N.nbytes

    def Product(self, x_RM: tf.Tensor) -> tf.Tensor:
        """[R,M] by the weight: [R,N], in the type of the rows."""
        kind, x_RM = x_RM.dtype, tf.cast(x_RM, tf.float32)
        scale_R1 = tf.reduce_max(tf.abs(x_RM), 1, keepdims=True) / _LARGEST_INPUT
        # Casts cut what lies behind the point, so that a half more rounds.
        moved_RM = tf.math.divide_no_nan(x_RM, scale_R1) + (_MOVED + 0.5)
        sums_N = np.sum(self.int8_MN, 0, dtype=np.int64)
        y_RN = tf.raw_ops.QuantizedMatMulWithBiasAndDequantize(
            a=tf.bitcast(tf.cast(moved_RM, tf.uint8), tf.quint8),
            b=_constant(self.int8_MN),
            bias=(-_MOVED * sums_N).astype(np.float32),
            # The ranges at which an integer stands for itself.
            min_a=0.0,
            max_a=255.0,
            min_b=-127.0,
            max_b=127.0,
            min_freezed_output=0.0,
            max_freezed_output=1.0,
            Toutput=tf.float32,
            input_quant_mode="SCALED",
        )
        return tf.cast(y_RN * scale_R1 * self.scale_N, kind)


def _constant(int8_MN: np.ndarray) -> tf.Tensor:
    proto = tf.make_tensor_proto(int8_MN)
    proto.dtype = tf.qint8.as_datatype_enum
    if tf.inside_function():
        return tf.constant(proto)
    return tf.bitcast(tf.constant(int8_MN), tf.qint8)


def check_supported() -> None:
    """Raises ValueError where TensorFlow has no such kernel: on processors other than x86-64, or without oneDNN."""
    try:
        EightBit(np.ones([4, 4]), 4).Product(tf.ones([1, 4]))
    except (tf.errors.OpError, TypeError) as e:
        raise ValueError(
            "this TensorFlow has no products of 8 bits (QuantizedMatMulWithBiasAndDequantize), which its builds for"
            f" x86-64 have unless TF_ENABLE_ONEDNN_OPTS=0 is set; take float32 weights instead of int8: {e}"
        ) from e
