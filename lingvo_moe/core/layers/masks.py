"""Attention masks from segment ids and positions. Letters: B batch, T query, S key.

A mask is boolean, True where a query may look. It is made of comparisons of the batch's own [B, T]
integers, so nothing in it is a constant that tracing could fold.
"""

import tensorflow as tf

from lingvo_moe.core.nested_map import NestedMap


def segment_mask(query_segments: tf.Tensor, key_segments: tf.Tensor) -> tf.Tensor:
    """Within one packed example, never at padding: int [B, T] and [B, S] to bool [B, T, S].

    Segment 0 is padding. A query at padding may look nowhere (attention then returns some finite
    value that nothing uses).
    """
    q, k = query_segments[:, :, tf.newaxis], key_segments[:, tf.newaxis, :]
    return tf.logical_and(tf.equal(q, k), tf.not_equal(k, 0))


def causal_segment_mask(segments: tf.Tensor, segment_pos: tf.Tensor) -> tf.Tensor:
    """A packed decoder's self-attention mask: int [B, T] twice to bool [B, T, T]."""
    row = NestedMap(segments=segments, positions=segment_pos)
    return causal_segment_mask_of(row, row)


def causal_segment_mask_of(query: NestedMap, key: NestedMap) -> tf.Tensor:
    """The part for some queries and keys: int `segments` and `positions` [B, T] and [B, S] to bool [B, T, S]."""
    # Positions restart in each segment, so that they order what is in one segment only.
    return tf.logical_and(
        segment_mask(query.segments, key.segments),
        tf.greater_equal(query.positions[:, :, tf.newaxis], key.positions[:, tf.newaxis, :]),
    )


def paddings(segments: tf.Tensor) -> tf.Tensor:
    """1.0 at padding (segment 0), 0.0 elsewhere: float32 of the same shape."""
    return tf.cast(tf.equal(segments, 0), tf.float32)
