"""Attention in inference for TensorFlow's own kernels (core/op_by_op.py): a panel of weights for each head.

Each head's queries, keys and values come out of one product as the products over positions want them,
[N,B,T,K], and lie so in the cache too; nothing is moved. A step writes its keys and values in place.

Letters: B batch, T query, S key, M model, N head, G head of keys and values, q heads of queries for each
of these, K key dimension, J hypothesis, L decoding step, X = J K, P panel, W column of a panel.
"""

import tensorflow as tf

from lingvo_moe.core.layers import panels
from lingvo_moe.core.nested_map import NestedMap

# What is added to a masked logit: beside it a float32 logit vanishes.
_MASKED = -1e9


def arrange(theta: NestedMap, scale: float, cross: bool) -> NestedMap:
    """q [M,N,K], k and v [M,G,K], o [N,K,M] as qkv [N+2G,M,K], or q [N,M,K] and kv [2G,M,K] across, and
    o [P,NK,W]; queries come out scaled."""
    q, k, v = (tf.transpose(theta[name], [1, 0, 2]) for name in "qkv")
    q *= tf.constant(scale, q.dtype)
    heads, size, dim = theta.o.shape
    o = panels.in_panels(tf.reshape(theta.o, [heads * size, dim]))
    if cross:
        return NestedMap(q=q, kv=tf.concat([k, v], 0), o=o)
    return NestedMap(qkv=tf.concat([q, k, v], 0), o=o)


def project(x_BTM: tf.Tensor, w_NMK: tf.Tensor) -> tf.Tensor:
    """[B,T,M] by each head's weights: [N,B,T,K]."""
    heads, dim, size = w_NMK.shape
    shape = tf.shape(x_BTM)
    y = panels.panel_product(tf.reshape(x_BTM, [-1, dim]), w_NMK)
    y = tf.reshape(y, [heads, shape[0], shape[1], size])
    y.set_shape([heads, *x_BTM.shape[:2], size])
    return y


def split_heads(y_NBTK: tf.Tensor, queries: int, keys: int) -> list[tf.Tensor]:
    """The queries (where there are some), keys and values of one projection."""
    sizes = [queries, keys, keys] if queries else [keys, keys]
    return tf.split(y_NBTK, sizes, 0)


def attend(
    q_NBTK: tf.Tensor,
    k_GBSK: tf.Tensor,
    v_GBSK: tf.Tensor,
    mask: tf.Tensor,
    o_PXW: tf.Tensor,
    dim: int,
) -> tf.Tensor:
    """softmax(q k^T) v where the mask, bool or 0/1 [B, T or 1, S], allows, projected to [B,T,M=dim]."""
    heads, size = q_NBTK.shape[0], q_NBTK.shape[3]
    groups = k_GBSK.shape[0]
    share = heads // groups
    batch, time = tf.shape(q_NBTK)[1], tf.shape(q_NBTK)[2]
    if share > 1:  # those that share keys are rows of one product
        q = tf.reshape(q_NBTK, [groups, share, batch, time, size])
        q_NBTK = tf.reshape(tf.transpose(q, [0, 2, 1, 3, 4]), [groups, batch, share * time, size])
    logits = tf.cast(tf.matmul(q_NBTK, k_GBSK, transpose_b=True), tf.float32)
    bias = tf.where(tf.cast(mask, tf.bool), 0.0, _MASKED)
    if share > 1:
        logits = tf.reshape(logits, [groups, batch, share, time, -1])
        logits = tf.reshape(logits + bias[:, tf.newaxis], [groups, batch, share * time, -1])
    else:
        logits += bias
    y = tf.matmul(tf.cast(tf.nn.softmax(logits), v_GBSK.dtype), v_GBSK)
    y = tf.reshape(y, [groups, batch, share, time, size]) if share > 1 else y[:, :, tf.newaxis]
    y = tf.reshape(tf.transpose(y, [1, 3, 0, 2, 4]), [-1, heads * size])
    y = panels.product(y, o_PXW, dim)
    return tf.reshape(y, [batch, time, dim])


def empty_cache(
    batch: int | tf.Tensor, length: int, num_hyps: int, groups: int, size: int, dtype: tf.DType
) -> NestedMap:
    """Room for the keys and values of `length` steps: k and v, [G,B,L,X]."""
    shape = tf.stack([groups, batch, length, num_hyps * size])

    def zeros() -> tf.Tensor:
        # Made where the program runs: what is written in place must be no constant of it.
        x = tf.raw_ops.Empty(shape=shape, dtype=dtype, init=True)
        x.set_shape([groups, batch if isinstance(batch, int) else None, length, num_hyps * size])
        return x

    return NestedMap(k=zeros(), v=zeros())


def write(cache_GBLX: tf.Tensor, new_GBJK: tf.Tensor, time: tf.Tensor) -> tf.Tensor:
    """The cache with a step's keys or values, written into its memory: the old one is gone."""
    shape = tf.shape(cache_GBLX)
    rows, length, width = shape[0] * shape[1], shape[2], cache_GBLX.shape[3]
    at = tf.range(rows) * length + time
    # tf.tensor_scatter_nd_update copies the whole cache here.
    flat = tf.raw_ops.InplaceUpdate(
        x=tf.reshape(cache_GBLX, [-1, width]), i=at, v=tf.reshape(new_GBJK, [-1, width])
    )
    out = tf.reshape(flat, shape)
    out.set_shape(cache_GBLX.shape)
    return out


def by_position(cache_GBLX: tf.Tensor, size: int) -> tf.Tensor:
    """[G,B,S,K], S = L J: position t J + j is hypothesis j at step t."""
    shape = tf.shape(cache_GBLX)
    return tf.reshape(cache_GBLX, [cache_GBLX.shape[0], shape[1], -1, size])
