"""Attention masks from segment ids and positions. Letters: B batch, T query, S key.

A mask is boolean, True where a query may look. It is made of comparisons of the batch's own [B, T]
integers, so nothing in it is a constant that tracing could fold.
"""

import tensorflow as tf

from lingvo_moe.core.kernels.scores import (
    causal_segment_mask_of as causal_segment_mask_of,
    segment_mask as segment_mask,
)
from lingvo_moe.core.nested_map import NestedMap


def causal_segment_mask(segments: tf.Tensor, segment_pos: tf.Tensor) -> tf.Tensor:
    """A packed decoder's self-attention mask: int [B, T] twice to bool [B, T, T]."""
    row = NestedMap(segments=segments, positions=segment_pos)
    return causal_segment_mask_of(row, row)


def paddings(segments: tf.Tensor) -> tf.Tensor:
    """1.0 at padding (segment 0), 0.0 elsewhere: float32 of the same shape."""
    return tf.cast(tf.equal(segments, 0), tf.float32)
