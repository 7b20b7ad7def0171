"""A weight's gradient by TensorFlow's kernels: the inputs of a product, transposed, times the gradients of its results.

On processors without AVX-512 oneDNN takes twice the time of other products for it where one side of the weight is short
and the other a large power of two, or a multiple: the rows that it reads then lie in the same few places of the cache.
There the wider operand is transposed first, by XLA, since TensorFlow's graph optimizer would put its own transposition
back into the product.

Letters: E expert, R row, M and N the dimensions of a weight.
"""

from collections.abc import Callable

import tensorflow as tf

from lingvo_moe.core import processor
from lingvo_moe.core.private import tensorflow as private
from lingvo_moe.core.tensors import fused

_SHORT, _MULTIPLE, _LONG = 320, 512, 1024  # docs/speed.md has measurements


def matmul(x_RM: tf.Tensor, w_MN: tf.Tensor) -> tf.Tensor:
    """x_RM @ w_MN, [R,N], whose gradient for w_MN is `weight_gradient`."""
    return _matmul(x_RM, w_MN) if _is_slow(x_RM, w_MN.shape[-1]) else tf.matmul(x_RM, w_MN)


def weight_gradient(x_RM: tf.Tensor, dy_RN: tf.Tensor) -> tf.Tensor:
    """x_RM transposed times dy_RN, [M,N]; or [E,M,N] of [E,R,M] and [E,R,N]."""
    if not _is_slow(x_RM, dy_RN.shape[-1]):
        return tf.matmul(x_RM, dy_RN, transpose_a=True)
    if x_RM.shape[-1] > dy_RN.shape[-1]:
        return tf.matmul(_transposed(x_RM), dy_RN)
    return _transposed(tf.matmul(_transposed(dy_RN), x_RM))


def _is_slow(x: tf.Tensor, columns: int | None) -> bool:
    """Whether a product of x, transposed, with `columns` columns is slow here. XLA needs a static number of rows."""
    if processor.has_avx512() or None in (*x.shape, columns):
        return False
    short, long = sorted((x.shape[-1], columns))
    return short <= _SHORT and long >= _LONG and long % _MULTIPLE == 0


@private.custom_gradient
def _matmul(x_RM: tf.Tensor, w_MN: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    def grad(dy_RN: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.matmul(dy_RN, w_MN, transpose_b=True), weight_gradient(x_RM, dy_RN)

    return tf.matmul(x_RM, w_MN), grad


@fused
def _transposed(x: tf.Tensor) -> tf.Tensor:
    return tf.linalg.matrix_transpose(x)
