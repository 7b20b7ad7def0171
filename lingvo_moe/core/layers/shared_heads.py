"""Products of queries with keys, and of probabilities with values, where heads share keys and values.

With U heads of keys and values, each serves R = N / U heads of queries: U = N is multi-head attention, U = 1
multi-query attention (Shazeer, "Fast Transformer Decoding: One Write-Head is All You Need", 2019), what lies
between grouped-query attention (Ainslie et al., "GQA", 2023). Heads u R to u R + R - 1 have keys and values u. Those
are never repeated: the R heads are further rows of one product.

Letters: B batch, T query, S key, N head, U head of keys and values, R head of those that share, K key
dimension, J beam hypothesis; in caches L decoding step, I hypothesis.
"""

import tensorflow as tf


def scores(q_BTNK: tf.Tensor, k_BSUK: tf.Tensor) -> tf.Tensor:
    """q k^T of each head: [B, N, T, S]."""
    if q_BTNK.shape[2] == k_BSUK.shape[2]:
        return tf.einsum("BTNK,BSNK->BNTS", q_BTNK, k_BSUK)
    q_BTURK = apart(q_BTNK, 2, k_BSUK.shape[2])
    return together(tf.einsum("BTURK,BSUK->BURTS", q_BTURK, k_BSUK), 1)


def context(probs_BNTS: tf.Tensor, v_BSUK: tf.Tensor) -> tf.Tensor:
    """What each query gets of the values: [B, T, N, K]."""
    if probs_BNTS.shape[1] == v_BSUK.shape[2]:
        return tf.einsum("BNTS,BSNK->BTNK", probs_BNTS, v_BSUK)
    probs_BURTS = apart(probs_BNTS, 1, v_BSUK.shape[2])
    return together(tf.einsum("BURTS,BSUK->BTURK", probs_BURTS, v_BSUK), 2)


def cached_scores(q_BJNK: tf.Tensor, k_LBIUK: tf.Tensor) -> tf.Tensor:
    """q k^T of each head with the keys of a cache: [B, N, J, L, I]."""
    if q_BJNK.shape[2] == k_LBIUK.shape[3]:
        return tf.einsum("BJNK,LBINK->BNJLI", q_BJNK, k_LBIUK)
    q_BJURK = apart(q_BJNK, 2, k_LBIUK.shape[3])
    return together(tf.einsum("BJURK,LBIUK->BURJLI", q_BJURK, k_LBIUK), 1)


def cached_context(probs_BNJLI: tf.Tensor, v_LBIUK: tf.Tensor) -> tf.Tensor:
    """What each hypothesis gets of the values of a cache: [B, J, N, K]."""
    if probs_BNJLI.shape[1] == v_LBIUK.shape[3]:
        return tf.einsum("BNJLI,LBINK->BJNK", probs_BNJLI, v_LBIUK)
    probs_BURJLI = apart(probs_BNJLI, 1, v_LBIUK.shape[3])
    return together(tf.einsum("BURJLI,LBIUK->BJURK", probs_BURJLI, v_LBIUK), 2)


def apart(x: tf.Tensor, axis: int, kv_heads: int) -> tf.Tensor:
    """The dimension N at `axis` as two, U and R."""
    sizes = _sizes(x)
    return tf.reshape(x, [*sizes[:axis], kv_heads, x.shape[axis] // kv_heads, *sizes[axis + 1 :]])


def together(x: tf.Tensor, axis: int) -> tf.Tensor:
    """The dimensions U and R from `axis` on as one, N."""
    sizes = _sizes(x)
    return tf.reshape(x, [*sizes[:axis], x.shape[axis] * x.shape[axis + 1], *sizes[axis + 2 :]])


def _sizes(x: tf.Tensor) -> list:
    """The sizes of the dimensions, ints where they are known."""
    if x.shape.is_fully_defined():
        return list(x.shape)
    known, found = x.shape.as_list(), tf.shape(x)
    return [found[i] if size is None else size for i, size in enumerate(known)]
