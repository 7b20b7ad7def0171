"""Attention in inference for TensorFlow's own kernels (core/op_by_op.py): a panel of weights for each head.

Each head's queries, keys and values come out of one product as the products over positions want them,
[N,B,T,K], and lie so in the cache too; nothing is moved. A step writes its keys and values in place.

Letters: B batch, T query, S key, M model, N head, K key dimension, J hypothesis, L decoding step, X = J K,
P panel, W column of a panel.
"""

import tensorflow as tf

from lingvo_moe.core.layers import panels
from lingvo_moe.core.nested_map import NestedMap

# What is added to a masked logit: beside it a float32 logit vanishes.
_MASKED = -1e9


def arrange(theta: NestedMap, scale: float, cross: bool) -> NestedMap:
    """q, k and v [M,N,K], o [N,K,M] as qkv [3N,M,K], or q [N,M,K] and kv [2N,M,K] across, and o [P,NK,W];
    queries come out scaled."""
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


def attend(
    q_NBTK: tf.Tensor,
    k_NBSK: tf.Tensor,
    v_NBSK: tf.Tensor,
    mask: tf.Tensor,
    o_PXW: tf.Tensor,
    dim: int,
) -> tf.Tensor:
    """softmax(q k^T) v where the mask, bool or 0/1 [B, T or 1, S], allows, projected to [B,T,M=dim]."""
    heads, size = q_NBTK.shape[0], q_NBTK.shape[3]
    batch, time = tf.shape(q_NBTK)[1], tf.shape(q_NBTK)[2]
    logits = tf.cast(tf.matmul(q_NBTK, k_NBSK, transpose_b=True), tf.float32)
    logits += tf.where(tf.cast(mask, tf.bool), 0.0, _MASKED)
    y = tf.matmul(tf.cast(tf.nn.softmax(logits), v_NBSK.dtype), v_NBSK)
    y = tf.reshape(tf.transpose(y, [1, 2, 0, 3]), [-1, heads * size])
    y = panels.product(y, o_PXW, dim)
    return tf.reshape(y, [batch, time, dim])


def empty_cache(
    batch: int | tf.Tensor, length: int, num_hyps: int, heads: int, size: int, dtype: tf.DType
) -> NestedMap:
    """Room for the keys and values of `length` steps: k and v, [N,B,L,X]."""
    shape = tf.stack([heads, batch, length, num_hyps * size])

    def zeros() -> tf.Tensor:
        # Made where the program runs: what is written in place must be no constant of it.
        x = tf.raw_ops.Empty(shape=shape, dtype=dtype, init=True)
        x.set_shape([heads, batch if isinstance(batch, int) else None, length, num_hyps * size])
        return x

    return NestedMap(k=zeros(), v=zeros())


def write(cache_NBLX: tf.Tensor, new_NBJK: tf.Tensor, time: tf.Tensor) -> tf.Tensor:
    """The cache with a step's keys or values, written into its memory: the old one is gone."""
    shape = tf.shape(cache_NBLX)
    rows, length, width = shape[0] * shape[1], shape[2], cache_NBLX.shape[3]
    at = tf.range(rows) * length + time
    # tf.tensor_scatter_nd_update copies the whole cache here.
    flat = tf.raw_ops.InplaceUpdate(
        x=tf.reshape(cache_NBLX, [-1, width]), i=at, v=tf.reshape(new_NBJK, [-1, width])
    )
    out = tf.reshape(flat, shape)
    out.set_shape(cache_NBLX.shape)
    return out


def by_position(cache_NBLX: tf.Tensor, size: int) -> tf.Tensor:
    """[N,B,S,K], S = L J: position t J + j is hypothesis j at step t."""
    shape = tf.shape(cache_NBLX)
    return tf.reshape(cache_NBLX, [cache_NBLX.shape[0], shape[1], -1, size])
