"""Attention in inference for TensorFlow's own kernels (core/op_by_op.py): a panel of weights for each head.

Each head's queries, keys and values come out of one product as the products over positions want them,
[N,B,T,K], and lie so in the cache too; nothing is moved. A step writes its keys and values in place.
Where heads share keys and values (shared_heads.py) queries alone are moved, to be rows of one product.

Letters: B batch, T query, S key, M model, N head, A head of keys and values, R head of those that share them, K
key dimension, J hypothesis, L decoding step, X = J K, P panel, W column of a panel.
"""

from collections.abc import Callable

import tensorflow as tf

from lingvo_moe.core.layers import panels
from lingvo_moe.core.nested_map import NestedMap

# What is added to a masked logit: beside it a float32 logit vanishes.
_MASKED = -1e9


def arrange(theta: NestedMap, scale: float, cross: bool) -> NestedMap:
    """q [M,N,K], k and v [M,A,K], o [N,K,M] as qkv [N+2A,M,K], or q [N,M,K] and kv [2A,M,K] across, and o
    [P,NK,W]; queries come out scaled."""
    q, k, v = (tf.transpose(theta[name], [1, 0, 2]) for name in "qkv")
    q *= tf.constant(scale, q.dtype)
    heads, size, dim = theta.o.shape
    o = panels.in_panels(tf.reshape(theta.o, [heads * size, dim]))
    if cross:
        kv = panels.as_panels(tf.concat([k, v], 0))
        return NestedMap(q=panels.as_panels(q), kv=kv, o=o)
    return NestedMap(qkv=panels.as_panels(tf.concat([q, k, v], 0)), o=o)


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
    k_ABSK: tf.Tensor,
    v_ABSK: tf.Tensor,
    mask: tf.Tensor,
    o_PXW: tf.Tensor,
    dim: int,
) -> tf.Tensor:
    """softmax(q k^T) v where the mask, bool or 0/1 [B, T or 1, S], allows, projected to [B,T,M=dim]."""
    heads, size = q_NBTK.shape[0], q_NBTK.shape[3]
    batch, time = tf.shape(q_NBTK)[1], tf.shape(q_NBTK)[2]
    bias = tf.where(tf.cast(mask, tf.bool), 0.0, _MASKED)
    if k_ABSK.shape[0] == heads:
        y = _mixed(q_NBTK, k_ABSK, v_ABSK, lambda logits_NBTS: logits_NBTS + bias)
        y = tf.transpose(y, [1, 2, 0, 3])
    else:
        y = _shared(q_NBTK, k_ABSK, v_ABSK, bias[:, tf.newaxis])
    y = panels.product(tf.reshape(y, [-1, heads * size]), o_PXW, dim)
    return tf.reshape(y, [batch, time, dim])


def _mixed(q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, masked: Callable) -> tf.Tensor:
    """softmax(masked(q k^T)) v."""
    logits = masked(tf.cast(tf.matmul(q, k, transpose_b=True), tf.float32))
    return tf.matmul(tf.cast(tf.nn.softmax(logits), v.dtype), v)


def _shared(
    q_NBTK: tf.Tensor, k_ABSK: tf.Tensor, v_ABSK: tf.Tensor, bias_B1TS: tf.Tensor
) -> tf.Tensor:
    """softmax(q k^T) v of heads that share keys and values: [B,T,A,R,K]."""
    kv_heads, size = k_ABSK.shape[0], k_ABSK.shape[3]
    batch, time = tf.shape(q_NBTK)[1], tf.shape(q_NBTK)[2]
    shared = q_NBTK.shape[0] // kv_heads
    q_ARBTK = tf.reshape(q_NBTK, [kv_heads, shared, batch, time, size])
    rows = [kv_heads, batch, shared * time]
    q_ABXK = tf.reshape(tf.transpose(q_ARBTK, [0, 2, 1, 3, 4]), [*rows, size])

    def masked(logits_ABXS: tf.Tensor) -> tf.Tensor:
        shape = tf.shape(logits_ABXS)
        apart = [kv_heads, batch, shared, time, shape[3]]
        return tf.reshape(tf.reshape(logits_ABXS, apart) + bias_B1TS, shape)

    y_ABXK = _mixed(q_ABXK, k_ABSK, v_ABSK, masked)
    y_ABRTK = tf.reshape(y_ABXK, [kv_heads, batch, shared, time, size])
    return tf.transpose(y_ABRTK, [1, 3, 0, 2, 4])


def empty_cache(
    batch: int | tf.Tensor, length: int, num_hyps: int, heads: int, size: int, dtype: tf.DType
) -> NestedMap:
    """Room for the keys and values of `length` steps in `heads` heads: k and v, [A,B,L,X]."""
    shape = tf.stack([heads, batch, length, num_hyps * size])

    def zeros() -> tf.Tensor:
        # Made where the program runs: what is written in place must be no constant of it.
        x = tf.raw_ops.Empty(shape=shape, dtype=dtype, init=True)
        x.set_shape([heads, batch if isinstance(batch, int) else None, length, num_hyps * size])
        return x

    return NestedMap(k=zeros(), v=zeros())


def write(cache_ABLX: tf.Tensor, new_ABJK: tf.Tensor, time: tf.Tensor) -> tf.Tensor:
    """The cache with a step's keys or values, written into its memory: the old one is gone."""
    shape = tf.shape(cache_ABLX)
    rows, length, width = shape[0] * shape[1], shape[2], cache_ABLX.shape[3]
    at = tf.range(rows) * length + time
    # tf.tensor_scatter_nd_update copies the whole cache here.
    flat = tf.raw_ops.InplaceUpdate(
        x=tf.reshape(cache_ABLX, [-1, width]), i=at, v=tf.reshape(new_ABJK, [-1, width])
    )
    out = tf.reshape(flat, shape)
    out.set_shape(cache_ABLX.shape)
    return out


def by_position(cache_ABLX: tf.Tensor, size: int) -> tf.Tensor:
    """[A,B,S,K], S = L J: position t J + j is hypothesis j at step t."""
    shape = tf.shape(cache_ABLX)
    return tf.reshape(cache_ABLX, [cache_ABLX.shape[0], shape[1], -1, size])
