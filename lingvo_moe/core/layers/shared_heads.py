"""Products of queries with keys, and of probabilities with values, where heads share keys and values.

With A heads of keys and values, each serves R = N / A heads of queries: A = N is multi-head attention, A = 1
multi-query attention (Shazeer, "Fast Transformer Decoding: One Write-Head is All You Need", 2019), what lies
between grouped-query attention (Ainslie et al., "GQA", 2023). Heads a R to a R + R - 1 have keys and values a. Those
are never repeated: the R heads are further rows of one product.

Letters: B batch, T query, S key, N head, A head of keys and values, R head of those that share, K key
dimension.
"""

import re

import tensorflow as tf


def by_head(equation: str, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """tf.einsum head by head, where `y` may have fewer heads than `x`.

    Args:
        equation: in which N is the head, of both operands and of the result, e.g. "BTNK,BSNK->BNTS".
        x: with N heads.
        y: with A of them, each for R = N / A heads of `x`.
    """
    x_letters, y_letters, out = re.split(",|->", equation)
    axis, kv_heads = x_letters.index("N"), y.shape[y_letters.index("N")]
    if x.shape[axis] == kv_heads:
        return tf.einsum(equation, x, y)
    x_letters, out_shared = (letters.replace("N", "AR") for letters in (x_letters, out))
    y_letters = y_letters.replace("N", "A")
    z = tf.einsum(f"{x_letters},{y_letters}->{out_shared}", _apart(x, axis, kv_heads), y)
    return _together(z, out.index("N"))


def _apart(x: tf.Tensor, axis: int, kv_heads: int) -> tf.Tensor:
    """The dimension N at `axis` as two, A and R."""
    sizes = _sizes(x)
    return tf.reshape(x, [*sizes[:axis], kv_heads, x.shape[axis] // kv_heads, *sizes[axis + 1 :]])


def _together(x: tf.Tensor, axis: int) -> tf.Tensor:
    """The dimensions A and R from `axis` on as one, N."""
    sizes = _sizes(x)
    return tf.reshape(x, [*sizes[:axis], x.shape[axis] * x.shape[axis + 1], *sizes[axis + 2 :]])


def _sizes(x: tf.Tensor) -> list:
    """The sizes of the dimensions, ints where they are known."""
    if x.shape.is_fully_defined():
        return list(x.shape)
    known, found = x.shape.as_list(), tf.shape(x)
    return [found[i] if size is None else size for i, size in enumerate(known)]
