"""Global-norm clipping."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.optimizers.clipping import clip_by_global_norm, global_norm

GRADS = NestedMap(a=tf.constant([3.0, 0.0]), b=NestedMap(c=tf.constant([[4.0]])))  # norm 5


def test_by_hand():
    clipped, norm = clip_by_global_norm(GRADS, 1.0)
    np.testing.assert_allclose(norm, 5)
    np.testing.assert_allclose(clipped.a, [0.6, 0], rtol=1e-6)
    np.testing.assert_allclose(clipped.b.c, [[0.8]], rtol=1e-6)


@pytest.mark.parametrize("limit", [0.0, 5.0, 100.0])
def test_what_is_small_enough_is_left_alone(limit):
    clipped, norm = clip_by_global_norm(GRADS, limit)
    np.testing.assert_allclose(norm, 5)
    for got, want in zip(clipped.Flatten(), GRADS.Flatten()):
        np.testing.assert_array_equal(got, want)


def test_types_are_kept_and_sums_are_float32():
    grads = NestedMap(a=tf.ones([70_000], tf.bfloat16))
    clipped, norm = clip_by_global_norm(grads, 1.0)
    assert clipped.a.dtype == tf.bfloat16
    assert norm.dtype == tf.float32
    np.testing.assert_allclose(norm, np.sqrt(70_000), rtol=1e-5)


def test_sparse_gradients_count_once_for_each_row():
    sparse = tf.IndexedSlices(tf.ones([2, 4]), tf.constant([1, 1]), tf.constant([3, 4]))
    np.testing.assert_allclose(global_norm(NestedMap(w=sparse)), 4)  # one row of twos


def test_a_gradient_that_is_not_finite_shows_in_the_norm():
    grads = NestedMap(a=tf.constant([1.0, np.nan]))
    assert not np.isfinite(clip_by_global_norm(grads, 1.0)[1])


def test_a_negative_limit_is_refused():
    with pytest.raises(ValueError, match="got -1"):
        clip_by_global_norm(GRADS, -1.0)
