"""Weights of 8 bits in products of 8 bits, for TensorFlow's own kernels on a CPU (core/op_by_op.py).

A column of the weight and a row of the input each have a scale of their own, so that their largest number is the
largest integer. Sums of products of integers are exact in any order, and rounded once, to float32: a row's result does
not depend on what rows it is multiplied with, nor on how many there are (that number left open, as a search does).

The kernel (oneDNN's, as `_QuantizedMatMul`) takes inputs of 0 to 255 and weights of -128 to 127. Inputs are moved up
by 128, and what that adds to a sum is taken off again as a bias.

The kernel packs the weights in an order of its own. At each call that would take longer than the product; it does so
once only where it is told that the weight is a constant. The public operations of the same kernel are told so where
the weight is a constant of the graph, which TensorFlow's graph optimizer writes out as text, for seconds and gigabytes.
Hence the operation with an underscore, whose attribute `is_weight_const` says it of a variable too. What is packed
belongs to the place in a graph where the product stands: there the weight must always be the same one. So it is no
argument of a function that is called with several, no slice in a loop, and no variable that is assigned another value.

Letters: R row, M and N the dimensions of a weight, P panel, W column of a panel.
"""

from typing import Any

import numpy as np
import tensorflow as tf

_OPERATION = "_QuantizedMatMul"
_MOVED = 128
# Processors without VNNI instructions add two products in 16 bits: 2 x 255 x 64 is the most that these hold.
_LARGEST_WEIGHT = 64
_LARGEST_INPUT = 127
_ZERO = 1e-35  # columns of no larger numbers have none; their scale would be no normal float32


class EightBit:
    """A weight [M,N] as int8 and a scale for each column; a leaf of arranged weights, used like panels.

    Attributes:
        int8_MN: the integers, from -64 to 64.
        scale_N: float32; int8_MN * scale_N is about the weight.
        bias_N: float32, what takes off again that inputs are moved up.
        width: W, how many columns are a panel.
    """

    def __init__(self, int8_MN: Any, scale_N: Any, bias_N: Any, width: int):
        self.int8_MN, self.scale_N, self.bias_N, self.width = int8_MN, scale_N, bias_N, width

    @classmethod
    def Of(cls, w_MN: tf.Tensor | np.ndarray, width: int) -> "EightBit":
        """A float weight, with values (no tensor of a graph). Products with a column that holds NaN or infinity are
        NaN."""
        w_MN = np.asarray(w_MN, np.float32)
        most_N = np.max(np.abs(w_MN), 0)
        finite_N = np.isfinite(most_N)
        scale_N = np.where(finite_N & (most_N > _ZERO), most_N / _LARGEST_WEIGHT, 1)
        int8_MN = np.round(np.where(finite_N, w_MN, 0) / scale_N).astype(np.int8)
        scale_N = np.where(finite_N, scale_N, np.nan).astype(np.float32)
        bias_N = (-_MOVED * np.sum(int8_MN, 0, dtype=np.int64)).astype(np.float32)
        return cls(tf.constant(int8_MN), tf.constant(scale_N), tf.constant(bias_N), width)

    @property
    def tensors(self) -> tuple[Any, Any, Any]:
        """What is to be held of it, in the order that `With` takes."""
        return self.int8_MN, self.scale_N, self.bias_N

    def With(self, int8_MN: Any, scale_N: Any, bias_N: Any) -> "EightBit":
        """The same of other tensors: those that a variable was made of each."""
        return EightBit(int8_MN, scale_N, bias_N, self.width)

    @property
    def shape(self) -> tuple[int, int, int]:
        """That of the panels, (P, M, W)."""
        rows, columns = self.int8_MN.shape
        return -(-columns // self.width), rows, self.width

    def Product(self, x_RM: tf.Tensor) -> tf.Tensor:
        """[R,M] by the weight: [R,N], in the type of the rows."""
        if not tf.inside_function():  # the operation is one of graphs alone
            return tf.function(self.Product, autograph=False)(x_RM)
        kind, x_RM = x_RM.dtype, tf.cast(x_RM, tf.float32)
        scale_R1 = tf.reduce_max(tf.abs(x_RM), 1, keepdims=True) / _LARGEST_INPUT
        # Casts cut what lies behind the point, so that a half more rounds.
        moved_RM = tf.math.divide_no_nan(x_RM, scale_R1) + (_MOVED + 0.5)
        y_RN = _integers_product(tf.cast(moved_RM, tf.uint8), self.int8_MN, self.bias_N)
        return tf.cast(y_RN * scale_R1 * self.scale_N, kind)


def _integers_product(x_RM: tf.Tensor, w_MN: tf.Tensor, bias_N: tf.Tensor) -> tf.Tensor:
    """uint8 [R,M] by int8 [M,N] and a float32 bias: float32 [R,N]. It may be packed when it is first multiplied."""
    graph = tf.compat.v1.get_default_graph()
    # The ranges at which an integer stands for itself.
    ranges = [tf.constant(end) for end in (0.0, 255.0, -127.0, 127.0)]
    inputs = [tf.bitcast(x_RM, tf.quint8), tf.bitcast(w_MN, tf.qint8), bias_N, *ranges]
    attributes = {
        "Tdevice_inputs": _attribute(type=[x.dtype.as_datatype_enum for x in inputs]),
        "Thost_inputs": _attribute(type=[]),
        "Tdevice_outputs": _attribute(type=[tf.float32.as_datatype_enum]),
        "Thost_outputs": _attribute(type=[]),
        "T1": tf.compat.v1.AttrValue(type=tf.quint8.as_datatype_enum),
        "T2": tf.compat.v1.AttrValue(type=tf.qint8.as_datatype_enum),
        "fused_ops": _attribute(s=[b"BiasAdd", b"Dequantize"]),
        "is_weight_const": tf.compat.v1.AttrValue(b=True),
        "is_bias_const": tf.compat.v1.AttrValue(b=True),
    }
    product = graph.create_op(
        _OPERATION, inputs, [tf.float32], attrs=attributes, name="quantized_matmul"
    )
    y_RN = product.outputs[0]
    y_RN.set_shape([x_RM.shape[0], w_MN.shape[1]])
    return y_RN


def _attribute(**values: list) -> tf.compat.v1.AttrValue:
    return tf.compat.v1.AttrValue(list=tf.compat.v1.AttrValue.ListValue(**values))


def check_supported() -> None:
    """Raises ValueError where TensorFlow has no such kernel: it is oneDNN's, of builds for x86-64."""
    try:
        EightBit.Of(np.ones([4, 4]), 4).Product(tf.ones([1, 4]))
    except (tf.errors.OpError, RuntimeError, ValueError) as e:
        raise ValueError(
            f"this TensorFlow has no products of 8 bits ({_OPERATION}), which its builds for x86-64 have; take"
            f" float32 weights instead of int8: {e}"
        ) from e
