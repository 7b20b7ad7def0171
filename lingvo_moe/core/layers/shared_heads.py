"""Products of queries with keys, and of probabilities with values, where heads share keys and values.

With A heads of keys and values, each serves R = N / A heads of queries: A = N is multi-head attention, A = 1
multi-query attention (Shazeer, "Fast Transformer Decoding: One Write-Head is All You Need", 2019), what lies
between grouped-query attention (Ainslie et al., "GQA", 2023). Heads a R to a R + R - 1 have keys and values a. Those
are never repeated: the R heads are further rows of one product.

Letters: B batch, T query, S key, N head, A head of keys and values, R head of those that share, K key
dimension, J beam hypothesis; in caches L decoding step, I hypothesis.
"""

import tensorflow as tf


def scores(q_BTNK: tf.Tensor, k_BSAK: tf.Tensor) -> tf.Tensor:
    """q k^T of each head: [B, N, T, S]."""
    if q_BTNK.shape[2] == k_BSAK.shape[2]:
        return tf.einsum("BTNK,BSNK->BNTS", q_BTNK, k_BSAK)
    q_BTARK = apart(q_BTNK, 2, k_BSAK.shape[2])
    return together(tf.einsum("BTARK,BSAK->BARTS", q_BTARK, k_BSAK), 1)


def context(probs_BNTS: tf.Tensor, v_BSAK: tf.Tensor) -> tf.Tensor:
    """What each query gets of the values: [B, T, N, K]."""
    if probs_BNTS.shape[1] == v_BSAK.shape[2]:
        return tf.einsum("BNTS,BSNK->BTNK", probs_BNTS, v_BSAK)
    probs_BARTS = apart(probs_BNTS, 1, v_BSAK.shape[2])
    return together(tf.einsum("BARTS,BSAK->BTARK", probs_BARTS, v_BSAK), 2)


def cached_scores(q_BJNK: tf.Tensor, k_LBIAK: tf.Tensor) -> tf.Tensor:
    """q k^T of each head with the keys of a cache: [B, N, J, L, I]."""
    if q_BJNK.shape[2] == k_LBIAK.shape[3]:
        return tf.einsum("BJNK,LBINK->BNJLI", q_BJNK, k_LBIAK)
    q_BJARK = apart(q_BJNK, 2, k_LBIAK.shape[3])
    return together(tf.einsum("BJARK,LBIAK->BARJLI", q_BJARK, k_LBIAK), 1)


def cached_context(probs_BNJLI: tf.Tensor, v_LBIAK: tf.Tensor) -> tf.Tensor:
    """What each hypothesis gets of the values of a cache: [B, J, N, K]."""
    if probs_BNJLI.shape[1] == v_LBIAK.shape[3]:
        return tf.einsum("BNJLI,LBINK->BJNK", probs_BNJLI, v_LBIAK)
    probs_BARJLI = apart(probs_BNJLI, 1, v_LBIAK.shape[3])
    return together(tf.einsum("BARJLI,LBIAK->BJARK", probs_BARJLI, v_LBIAK), 2)


def apart(x: tf.Tensor, axis: int, kv_heads: int) -> tf.Tensor:
    """The dimension N at `axis` as two, A and R."""
    sizes = _sizes(x)
    return tf.reshape(x, [*sizes[:axis], kv_heads, x.shape[axis] // kv_heads, *sizes[axis + 1 :]])


def together(x: tf.Tensor, axis: int) -> tf.Tensor:
    """The dimensions A and R from `axis` on as one, N."""
    sizes = _sizes(x)
    return tf.reshape(x, [*sizes[:axis], x.shape[axis] * x.shape[axis + 1], *sizes[axis + 2 :]])


def _sizes(x: tf.Tensor) -> list:
    """The sizes of the dimensions, ints where they are known."""
    if x.shape.is_fully_defined():
        return list(x.shape)
    known, found = x.shape.as_list(), tf.shape(x)
    return [found[i] if size is None else size for i, size in enumerate(known)]
