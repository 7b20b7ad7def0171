"""Products of groups of rows with a matrix for each group by JAX's "megablox", whose tiles are as many as groups need.

Letters: N or R rows, E expert, M and H the dimensions of a product.
"""

import functools
from typing import TYPE_CHECKING

import tensorflow as tf

from lingvo_moe.core.kernels.pallas import calls

if TYPE_CHECKING:
    import jax

# Rows of a tile, bytes of its other sides, the least numbers on a side.
_ROWS, _BYTES, _LEAST = 512, 2048, 128


def grouped_matmul(
    rows_RM: tf.Tensor, weights_EMH: tf.Tensor, group_sizes_E: tf.Tensor, rows_expected: int | None
) -> tf.Tensor:
    num, experts = rows_RM.shape[0], weights_EMH.shape[0]
    tile = min(_ROWS, max(_LEAST, 1 << (num - 1).bit_length()))
    expected = num if rows_expected is None else min(num, rows_expected)
    product = functools.partial(_megablox, tile=tile)
    with tf.name_scope(f"about_{expected + tile * min(expected, experts) // 2}_rows"):
        return calls.call(product, rows_RM, weights_EMH, group_sizes_E)


def _megablox(
    rows_NM: "jax.Array", weights_EMH: "jax.Array", group_sizes_E: "jax.Array", tile: int
) -> "jax.Array":
    from jax import numpy as jnp
    from jax.experimental.pallas.ops.tpu import megablox

    num, dtype = rows_NM.shape[0], rows_NM.dtype
    # Of rows without an expert the kernel leaves what was in memory, and so does its gradient.
    real = (jnp.arange(num) < group_sizes_E.sum())[:, jnp.newaxis]
    rows = jnp.pad(jnp.where(real, rows_NM, 0), ((0, -num % tile), (0, 0)))
    wide = min(_BYTES // dtype.itemsize, *weights_EMH.shape[1:])
    wide = max(_LEAST, 1 << (wide.bit_length() - 1))
    tiling = tile, wide, wide
    y = megablox.gmm(
        rows, weights_EMH, group_sizes_E, dtype, tiling, None, None, False, calls.INTERPRETED
    )
    return jnp.where(real, y[:num], 0)
