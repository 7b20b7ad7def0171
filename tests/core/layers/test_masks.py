"""Masks against loops over positions."""

import numpy as np
import tensorflow as tf
from hypothesis import given, settings, strategies as st

from lingvo_moe.core.layers import masks

_ROW = st.lists(st.integers(0, 3), min_size=6, max_size=6)


@settings(max_examples=20, deadline=None)
@given(_ROW, _ROW)
def test_segments(q, k):
    got = masks.segment_mask(tf.constant([q]), tf.constant([k])).numpy()[0]
    expected = [[a == b and b != 0 for b in k] for a in q]
    np.testing.assert_array_equal(got, expected)


def test_causal_within_packed_segments():
    segments = tf.constant([[1, 1, 1, 2, 2, 0]])
    pos = tf.constant([[0, 1, 2, 0, 1, 0]])
    got = masks.causal_segment_mask(segments, pos).numpy()[0].astype(int)
    expected = [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 0],
    ]
    np.testing.assert_array_equal(got, expected)


def test_paddings():
    np.testing.assert_array_equal(masks.paddings(tf.constant([[2, 1, 0]])), [[0, 0, 1]])
