"""Products by TensorFlow's kernels that take twice the time of others on processors without AVX-512.

oneDNN copies both operands of a product of R rows and N columns into its own order, but where 1/R + 1/N is 0.0038 or
more it reads them as they lie, some of them many times. Where rows there have a multiple of 512 numbers, they lie in
the same few places of the cache, and each reading waits for memory. Such an operand is copied first, into rows that
are a little wider: a few hundred rows times a weight, as of an expert, and the gradient of a weight with a short side.

Letters: E expert, R row, M and N the dimensions of a weight.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

from lingvo_moe.core import processor
from lingvo_moe.core.private import tensorflow as private

_READ_IN_PLACE = 0.0038  # oneDNN's least 1/R + 1/N
_MULTIPLE, _MORE = 512, 16  # numbers of a row; docs/speed.md has measurements
_FEWEST_ROWS = 64  # a copy of a weight for fewer takes as long as it saves


def matmul(x_RM: tf.Tensor, w_MN: tf.Tensor) -> tf.Tensor:
    """x_RM @ w_MN, [R,N], whose gradient for w_MN is `weight_gradient`."""
    return _matmul(x_RM, w_MN) if _reads_in_place(*w_MN.shape) else tf.matmul(x_RM, w_MN)


def weight_gradient(x_RM: tf.Tensor, dy_RN: tf.Tensor) -> tf.Tensor:
    """The inputs of a product, transposed, times the gradients of its results: [M,N]; or [E,M,N] of [E,R,M] and
    [E,R,N]."""
    sides = x_RM.shape[-1], dy_RN.shape[-1]
    if not _reads_in_place(*sides) or all(side % _MULTIPLE for side in sides):
        return tf.matmul(x_RM, dy_RN, transpose_a=True)
    gradient = tf.matmul(wider(x_RM), wider(dy_RN), transpose_a=True)
    return gradient[..., : sides[0], : sides[1]]


def matmul_by_expert(rows: Sequence[tf.Tensor], w_EMN: tf.Tensor) -> list[tf.Tensor]:
    """Each expert's rows [R,M] times its matrix, [R,N], by a product for each."""
    product = product_for(rows[0].shape[0], w_EMN.shape[-1])
    return [product(x_RM, w_MN) for x_RM, w_MN in zip(rows, tf.unstack(w_EMN), strict=True)]


def _reads_slowly(rows: int | None, columns: int) -> bool:
    """Whether about so many rows times a weight of so many columns is slow here; None: of an unknown number."""
    if rows is None or rows < _FEWEST_ROWS or columns % _MULTIPLE:
        return False
    return _reads_in_place(rows, columns)


def product_for(rows: int | None, columns: int) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    """The product of about so many rows and a weight of so many columns, which may be of another number of rows."""
    return _matmul_by_copy if _reads_slowly(rows, columns) else tf.matmul


def _matmul_by_copy(x_RM: tf.Tensor, w_MN: tf.Tensor) -> tf.Tensor:
    """x_RM @ w_MN, [R,N]. The copy stays in the cache until it is used."""
    return tf.matmul(x_RM, wider(w_MN))[:, : w_MN.shape[1]]


def _reads_in_place(rows: int | None, columns: int | None) -> bool:
    """Whether oneDNN does, in a product of so many rows and columns; None: of unknown numbers."""
    if processor.has_avx512() or not rows or not columns:
        return False
    return 1 / rows + 1 / columns >= _READ_IN_PLACE


def wider(x: tf.Tensor) -> tf.Tensor:
    """x with some more columns, zeros, where its rows lie badly."""
    if x.shape[-1] % _MULTIPLE:
        return x
    shape = tf.concat([tf.shape(x)[:-1], [_MORE]], 0)
    return tf.concat([x, tf.zeros(shape, x.dtype)], -1)


@private.custom_gradient
def _matmul(x_RM: tf.Tensor, w_MN: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    def grad(dy_RN: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.matmul(dy_RN, w_MN, transpose_b=True), weight_gradient(x_RM, dy_RN)

    return tf.matmul(x_RM, w_MN), grad
