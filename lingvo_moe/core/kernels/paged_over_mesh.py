"""XLA's kernels over caches in pages, on the devices of a mesh: a device has the pages of its own rows.

A pool has the pages of one layer, in as many equal parts as devices share the rows of a batch. A row's pages lie in the
part of its device, and are numbered in it. So a page is read and written where it lies, in a manual region, and nothing
but heads may be sharded beside rows. A row's pages are read side by side, as many as its table has; a mask leaves out
what lies behind its last token.

Letters: as in `Kernels`; also P page of a pool, S slot of a page, U page of a row's table.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from lingvo_moe.core.kernels import xla
from lingvo_moe.core.kernels.scores import Seen
from lingvo_moe.core.sharding import SplitMap, dims_mapping
from lingvo_moe.core.sharding.manual import manual_region
from lingvo_moe.core.tensors import shape_of

CACHE = "BLNK"  # of a pool: B is its pages, L the slots of one


@dataclass(frozen=True)
class TablePlaces:
    """The pages of rows, and where their new tokens go; page 0 of each part is nobody's: padding goes there.

    Attributes:
        slot_BT: int32, of each token page times S plus slot.
        page_BU: int32, the pages of each row in the order of its tokens.
        num_heads: N; keys and values of another number have the letter A.
        split: the mesh axes of activations, by letters.
    """

    slot_BT: tf.Tensor
    page_BU: tf.Tensor
    num_heads: int
    split: SplitMap


def kernels_of(places: TablePlaces) -> Any:
    """`Kernels` whose caches are pools; `time` is the tokens' positions [B,T], a mask [B,T,U S]."""

    def mapping(letters: str, pool: tf.Tensor) -> Any:
        heads = "N" if pool.shape[2] == places.num_heads else "A"
        return dims_mapping(letters.replace("N", heads), places.split)

    def write_cache(pool: tf.Tensor, new: tf.Tensor, time: tf.Tensor) -> tf.Tensor:
        del time
        of_pool = mapping(CACHE, pool)
        of_args = [of_pool, mapping("BTNK", pool), mapping("BT", pool)]
        return manual_region(_written, of_args, of_pool)(pool, new, places.slot_BT)

    def seen_positions(query_at: Any, time: tf.Tensor, mask: tf.Tensor) -> tuple:
        del query_at
        return time, tf.range(mask.shape[2])[tf.newaxis]

    def attend_cache(q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, seen: Seen) -> tf.Tensor:
        of_args = [mapping(CACHE, k), mapping("BU", k)]
        read = manual_region(_read, of_args, mapping("BSNK", k))
        keys = read(k, places.page_BU)
        return xla.attend(q, keys, keys if v is k else read(v, places.page_BU), seen)

    changed = (empty_cache, write_cache, seen_positions, attend_cache)
    return SimpleNamespace(**{**vars(xla), "CACHE": CACHE, **{f.__name__: f for f in changed}})


def empty_cache(shape: xla.CacheShape) -> tf.Tensor:
    """See `Kernels`; a pool of `batch` pages of `length` slots."""
    return tf.zeros([shape.batch, shape.length, shape.heads, shape.size], shape.dtype)


def _written(pool_PSAK: tf.Tensor, new_BTAK: tf.Tensor, slot_BT: tf.Tensor) -> tf.Tensor:
    pages, slots, heads, size = shape_of(pool_PSAK)
    flat = tf.reshape(pool_PSAK, [pages * slots, heads * size])
    new = tf.reshape(new_BTAK, [-1, heads * size])
    flat = tf.tensor_scatter_nd_update(flat, tf.reshape(slot_BT, [-1, 1]), new)
    return tf.reshape(flat, [pages, slots, heads, size])


def _read(pool_PSAK: tf.Tensor, page_BU: tf.Tensor) -> tf.Tensor:
    rows, width = shape_of(page_BU)
    _, slots, heads, size = shape_of(pool_PSAK)
    return tf.reshape(tf.gather(pool_PSAK, page_BU), [rows, width * slots, heads, size])
