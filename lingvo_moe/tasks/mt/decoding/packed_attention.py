"""Attention over pre-packed weights, for TensorFlow's kernels: a block of weights for each head.

One product gives each head's queries, keys and values in the order that the products over positions need, [N,B,T,K].
The cache has the same order, so nothing is transposed. A step writes its keys and values in place. Where heads share
keys and values (`by_head` of core/kernels/xla.py) queries alone are transposed, to be rows of one product.

Letters: B batch, T query, S key, M model, N head, A head of keys and values, R head of those that share them, K key
dimension, J hypothesis, L decoding step, X = J K.
"""

from collections.abc import Callable

import tensorflow as tf

from lingvo_moe.core.base_layer import name_scope
from lingvo_moe.core.layers.attention import MultiHeadAttention, kv_letter
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.mt.decoding.packed_weights import Packed, pack, pack_blocks

# Added to a masked logit, so that its probability is 0.
_MASKED = -1e9


class _PackedAttention:
    """A MultiHeadAttention and its sizes."""

    def __init__(self, layer: MultiHeadAttention):
        self._layer = layer
        self._sizes = _Sizes(layer)


class PackedSelfAttention(_PackedAttention):
    """A MultiHeadAttention to its own positions, over packed weights: qkv [N+2A,M,K] and o [N K,M]."""

    def Pack(self, theta: NestedMap, kind: str) -> NestedMap:
        """The layer's weights as FProp takes them; `kind` is one of packed_weights.WEIGHTS."""
        q, k, v, o = _by_head(self._layer, theta)
        return NestedMap(qkv=pack_blocks(tf.concat([q, k, v], 0), kind), o=pack(o, kind))

    def FProp(
        self,
        theta: NestedMap,
        query: tf.Tensor,
        source: tf.Tensor,
        mask: tf.Tensor,
        seed: None = None,
    ) -> tf.Tensor:
        """See MultiHeadAttention; `source` is the query itself, and there is no seed."""
        del source, seed
        with name_scope(self._layer.path):
            q, k, v = self._Projected(theta, query)
            return attend(q, k, v, mask, theta.o)

    def InitCache(self, batch: int | tf.Tensor, length: int, num_hyps: int = 1) -> NestedMap:
        """Empty keys and values for L = length steps of J = num_hyps positions: [A,B,L,J K]."""
        s = self._sizes
        with name_scope(self._layer.path):
            return empty_cache(batch, length, num_hyps, s.kv_heads, s.key, self._layer.fprop_dtype)

    def CacheLetters(self) -> NestedMap:
        """The letters of the cache's tensors."""
        letters = f"{kv_letter(self._layer.p)}BLX"
        return NestedMap(k=letters, v=letters)

    def ExtendStep(
        self, theta: NestedMap, x: tf.Tensor, cache: NestedMap, time: tf.Tensor, mask: tf.Tensor
    ) -> tuple[tf.Tensor, NestedMap]:
        """See MultiHeadAttention.ExtendStep, with a cache from `InitCache`.

        The cache's memory is overwritten: the old cache must not be used again.
        """
        with name_scope(self._layer.path):
            q, *new = self._Projected(theta, x)
            k, v = (write(old, one, time) for old, one in zip((cache.k, cache.v), new, strict=True))
            keys, values = (by_position(c, q.shape[-1]) for c in (k, v))
            return attend(q, keys, values, mask, theta.o), NestedMap(k=k, v=v)

    def _Projected(self, theta: NestedMap, x: tf.Tensor) -> list[tf.Tensor]:
        """Queries [N,B,T,K], keys and values [A,B,T,K] of x [B,T,M]."""
        s = self._sizes
        y = project(x, theta.qkv, s.heads + 2 * s.kv_heads, s.key)
        return tf.split(y, [s.heads, s.kv_heads, s.kv_heads], 0)


class PackedCrossAttention(_PackedAttention):
    """A MultiHeadAttention to a memory, over packed weights: q [N,M,K], kv [2A,M,K] and o [N K,M]."""

    def Pack(self, theta: NestedMap, kind: str) -> NestedMap:
        """The layer's weights as FProp takes them; `kind` is one of packed_weights.WEIGHTS."""
        q, k, v, o = _by_head(self._layer, theta)
        kv = tf.concat([k, v], 0)
        return NestedMap(q=pack_blocks(q, kind), kv=pack_blocks(kv, kind), o=pack(o, kind))

    def FProp(
        self,
        theta: NestedMap,
        query: tf.Tensor,
        source: tf.Tensor,
        mask: tf.Tensor,
        seed: None = None,
    ) -> tf.Tensor:
        """See MultiHeadAttention; there is no seed."""
        del seed
        return self.AttendMemory(theta, query, self.PrecomputeMemory(theta, source), mask)

    def PrecomputeMemory(self, theta: NestedMap, memory: tf.Tensor) -> NestedMap:
        """Keys and values of memory [B,S,M]: NestedMap(k, v), each [A,B,S,K]."""
        s = self._sizes
        with name_scope(self._layer.path):
            k, v = tf.split(project(memory, theta.kv, 2 * s.kv_heads, s.key), 2, 0)
            return NestedMap(k=k, v=v)

    def MemoryLetters(self) -> NestedMap:
        """The letters of PrecomputeMemory's tensors."""
        letters = f"{kv_letter(self._layer.p)}BSK"
        return NestedMap(k=letters, v=letters)

    def AttendMemory(
        self, theta: NestedMap, query: tf.Tensor, memory: NestedMap, mask: tf.Tensor
    ) -> tf.Tensor:
        """See MultiHeadAttention."""
        s = self._sizes
        with name_scope(self._layer.path):
            q = project(query, theta.q, s.heads, s.key)
            return attend(q, memory.k, memory.v, mask, theta.o)


class _Sizes:
    """N, A and K of a layer."""

    def __init__(self, layer: MultiHeadAttention):
        specs = layer.VariableSpecs()
        _, self.heads, self.key = specs.q.shape
        self.kv_heads = specs.k.shape[1]


def _by_head(layer: MultiHeadAttention, theta: NestedMap) -> tuple[tf.Tensor, ...]:
    """q [M,N,K], k and v [M,A,K], o [N,K,M] in the type of the activations as q [N,M,K], k and v [A,M,K], o [N K,M];
    with q the logits come out scaled by 1 / sqrt(K)."""
    cast = theta.Transform(layer.Cast)
    q, k, v = (tf.transpose(cast[name], [1, 0, 2]) for name in "qkv")
    heads, size, dim = cast.o.shape
    q *= tf.constant(size**-0.5, q.dtype)
    return q, k, v, tf.reshape(cast.o, [heads * size, dim])


def project(x_BTM: tf.Tensor, w_NMK: Packed, heads: int, size: int) -> tf.Tensor:
    """Multiplies x [B,T,M] by each head's weights and returns [N,B,T,K], with N = heads and K = size."""
    shape = tf.shape(x_BTM)
    y = w_NMK.ProductByBlock(tf.reshape(x_BTM, [-1, x_BTM.shape[2]]))
    y = tf.reshape(y, [heads, shape[0], shape[1], size])
    y.set_shape([heads, *x_BTM.shape[:2], size])
    return y


def attend(
    q_NBTK: tf.Tensor, k_ABSK: tf.Tensor, v_ABSK: tf.Tensor, mask: tf.Tensor, o: Packed
) -> tf.Tensor:
    """Computes softmax(q k^T) v, projected by o [N K,M]: [B,T,M].

    Args:
        q_NBTK: queries, scaled by 1 / sqrt(K).
        k_ABSK, v_ABSK: keys and values.
        mask: bool or 0/1 [B, T or 1, S], the positions to attend to.
        o: packed.
    """
    heads, size = q_NBTK.shape[0], q_NBTK.shape[3]
    batch, time = tf.shape(q_NBTK)[1], tf.shape(q_NBTK)[2]
    bias = tf.where(tf.cast(mask, tf.bool), 0.0, _MASKED)
    if k_ABSK.shape[0] == heads:
        y = _mixed(q_NBTK, k_ABSK, v_ABSK, lambda logits_NBTS: logits_NBTS + bias)
        y = tf.transpose(y, [1, 2, 0, 3])
    else:
        y = _shared(q_NBTK, k_ABSK, v_ABSK, bias[:, tf.newaxis])
    y = o.Product(tf.reshape(y, [-1, heads * size]))
    return tf.reshape(y, [batch, time, y.shape[1]])


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
    """Buffers for the keys and values of `length` steps in `heads` heads: k and v, [A,B,L,X]."""
    shape = tf.stack([heads, batch, length, num_hyps * size])

    def zeros() -> tf.Tensor:
        # Made where the program runs: a constant of the program must not be written in place.
        x = tf.raw_ops.Empty(shape=shape, dtype=dtype, init=True)
        x.set_shape([heads, batch if isinstance(batch, int) else None, length, num_hyps * size])
        return x

    return NestedMap(k=zeros(), v=zeros())


def write(cache_ABLX: tf.Tensor, new_ABJK: tf.Tensor, time: tf.Tensor) -> tf.Tensor:
    """Writes the keys or values of step `time` into the cache's memory; the old cache must not be used again."""
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
    """Reshapes a cache to [A,B,S,K], S = L J: position t J + j is hypothesis j at step t."""
    shape = tf.shape(cache_ABLX)
    return tf.reshape(cache_ABLX, [cache_ABLX.shape[0], shape[1], -1, size])
