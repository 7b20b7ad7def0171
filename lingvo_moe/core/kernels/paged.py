"""TensorFlow's kernels over caches in pages: the keys and values of a row's tokens lie wherever there are free pages.

A pool has the pages of one layer. Attention reads the pages of all rows side by side, so that no row is padded to the
length of another: each page gives its part of a softmax, and the parts of a row are added in the order of its pages. So
a row's result does not depend on the lengths of others.

Letters: as in `Kernels`; also P page of a pool, S slot of a page, U page that the batch reads, D = (N / A) T the
queries that share keys and values.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from lingvo_moe.core.kernels import tensorflow
from lingvo_moe.core.kernels.scores import MASKED, Seen
from lingvo_moe.core.kernels.xla import CacheShape
from lingvo_moe.core.tensors import dim

CACHE = "BNLX"  # of a pool: B is its pages, L the slots of one


@dataclass(frozen=True)
class PagePlaces:
    """The pages of a batch, and where its new tokens go.

    Attributes:
        slot_BT: int32, of each token page times S plus slot. Page 0 is nobody's: padding goes there.
        page_U: int32, the pages of all rows, those of a row in the order of its tokens.
        owner_U: int32, their rows.
        first_U: int32, the place of a page's first slot among those of its row.
        hypotheses: J, which have consecutive places at each position: t J + j is that of hypothesis j.
    """

    slot_BT: tf.Tensor
    page_U: tf.Tensor
    owner_U: tf.Tensor
    first_U: tf.Tensor
    hypotheses: int = 1

    def Mask(self, at_BT: tf.Tensor, slots: int) -> tf.Tensor:
        """The slots [U,T,S] of each page that its row's tokens look at, by their positions: those of no later token."""
        query_at, key_at = self.Positions(at_BT, slots)
        return key_at[:, tf.newaxis] <= query_at[:, :, tf.newaxis]

    def Positions(self, at_BT: tf.Tensor, slots: int) -> tuple[tf.Tensor, tf.Tensor]:
        """The positions of the queries [U,T] and of the keys [U,S] of each page."""
        key_at = self.first_U[:, tf.newaxis] + tf.range(slots)
        if self.hypotheses > 1:
            key_at //= self.hypotheses
        return tf.gather(at_BT, self.owner_U), key_at


def nowhere() -> PagePlaces:
    """The places of no pages, by which caches are made."""
    return PagePlaces(*[tf.zeros([0], tf.int32)] * 4)


def kernels_of(places: PagePlaces) -> Any:
    """`Kernels` whose caches are pools; `time` is the tokens' positions [B,T], a mask `PagePlaces.Mask`."""

    def write_cache(pool: tf.Tensor, new: tf.Tensor, time: tf.Tensor) -> tf.Tensor:
        del time
        heads, slots, width = pool.shape[1:]
        page_BT, slot_BT = places.slot_BT // slots, places.slot_BT % slots
        head_A11 = tf.range(heads)[:, tf.newaxis, tf.newaxis]
        at = tf.reshape((page_BT * heads + head_A11) * slots + slot_BT, [-1])
        flat = tf.raw_ops.InplaceUpdate(
            x=tf.reshape(pool, [-1, width]), i=at, v=tf.reshape(new, [-1, width])
        )
        return tf.ensure_shape(tf.reshape(flat, tf.shape(pool)), pool.shape)

    def seen_positions(query_at: Any, time: tf.Tensor, mask: tf.Tensor) -> tuple:
        del query_at
        return places.Positions(time, mask.shape[2])

    def attend_cache(q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, seen: Seen) -> tf.Tensor:
        return _attend(q, k, v, seen, places)

    changed = (empty_cache, write_cache, seen_positions, attend_cache)
    return SimpleNamespace(
        **{**vars(tensorflow), "CACHE": CACHE, **{f.__name__: f for f in changed}}
    )


def empty_cache(shape: CacheShape) -> tf.Tensor:
    """See `Kernels`; a pool of `batch` pages of `length` slots."""
    sizes = [shape.batch, shape.heads, shape.length, shape.size]
    x = tf.raw_ops.Empty(shape=tf.stack(sizes), dtype=shape.dtype, init=True)
    return tf.ensure_shape(x, [n if isinstance(n, int) else None for n in sizes])


def _attend(q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, seen: Seen, places: PagePlaces) -> tf.Tensor:
    """q [N,B,T,K] over pools [P,A,S,K]: [B,T,N,K]."""
    (heads, size), shared, slots = (q.shape[0], q.shape[-1]), k.shape[1], k.shape[2]
    batch, time, times = dim(q, 1), dim(q, 2), q.shape[0] // k.shape[1]
    owner_U, rows = places.owner_U, dim(q, 1)

    def of_pages(x_B: tf.Tensor) -> tf.Tensor:
        return tf.gather(x_B, owner_U)

    def of_rows(x_U: tf.Tensor) -> tf.Tensor:  # in the order of pages, one after the other
        return tf.math.unsorted_segment_sum(x_U, owner_U, rows)

    q_BADK = tf.reshape(tf.transpose(q, [1, 0, 2, 3]), [batch, shared, times * time, size])
    lone = times * time == 1 if isinstance(time, int) else False
    if lone:  # a product with a single row rounds differently
        q_BADK = tf.tile(q_BADK, [1, 1, 2, 1])
    keys = tf.gather(k, places.page_U)
    values = keys if v is k else tf.gather(v, places.page_U)
    scores = tf.cast(tf.matmul(of_pages(q_BADK), keys, transpose_b=True), tf.float32)
    wide = [-1, shared, times, 2 if lone else time, slots]
    scores = tf.reshape(scores, wide)
    bias = seen.BiasOfAll()
    if bias is not None:  # [U or 1, N or 1, T, S]
        groups = [1, 1] if bias.shape[1] == 1 else [shared, times]
        scores += tf.reshape(bias, [dim(bias, 0), *groups, dim(bias, 2), slots])
    scores = tf.where(seen.Mask()[:, tf.newaxis, tf.newaxis], scores, MASKED)
    largest = tf.math.unsorted_segment_max(tf.reduce_max(scores, -1, keepdims=True), owner_U, rows)
    sinks = None
    if seen.sinks_N is not None:
        sinks = tf.reshape(tf.cast(seen.sinks_N, tf.float32), [shared, times, 1, 1])
        largest = tf.maximum(largest, sinks)
    powers = tf.exp(scores - of_pages(largest))
    total = of_rows(tf.reduce_sum(powers, -1, keepdims=True))
    if sinks is not None:
        total += tf.exp(sinks - largest)
    powers = tf.reshape(tf.cast(powers, values.dtype), [-1, shared, times * wide[3], slots])
    y = of_rows(tf.matmul(powers, values))
    y = tf.reshape(y, [batch, shared, times, wide[3], values.shape[-1]])
    y = tf.cast(tf.cast(y, tf.float32) / total, values.dtype)[:, :, :, :time]
    y = tf.reshape(y, [batch, heads, time, values.shape[-1]])
    return tf.transpose(y, [0, 2, 1, 3])
