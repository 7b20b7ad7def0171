"""Global-norm clipping."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core.base_layer import VariableSpec
from lingvo_moe.core.initializers import WeightInit
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.optimizers.sgd import Sgd

GRADS = NestedMap(a=tf.constant([3.0, 0.0]), b=NestedMap(c=tf.constant([[4.0]])))  # norm 5


def _spec(path, x, dtype="float32"):
    return VariableSpec(
        path, tuple(x.shape), dtype, "MH"[: x.shape.rank], WeightInit.Constant(0), ()
    )


def _updated(grads, limit):
    """The change of zeros by gradient descent with a rate of 1, and the norm that it reports."""
    dense = grads.Transform(tf.convert_to_tensor)
    specs = grads.Pack([_spec(path, x) for path, x in dense.FlattenItems()])
    sgd = Sgd.Params().Set(momentum=0.0)
    optimizer = sgd.Instantiate()
    theta = dense.Transform(lambda x: tf.zeros(x.shape))
    step = tf.constant(0)
    rate = optimizer.learning_rate.Value(step)
    state = NestedMap(theta=theta, slots=optimizer.SlotSpecs(specs), step=step)
    new, _, metrics = optimizer.Update(state, grads, specs, max_grad_norm=limit)
    return new.Transform(lambda x: -x / rate), metrics.grad_norm


def test_by_hand():
    clipped, norm = _updated(GRADS, 1.0)
    np.testing.assert_allclose(norm, 5)
    np.testing.assert_allclose(clipped.a, [0.6, 0], rtol=1e-6)
    np.testing.assert_allclose(clipped.b.c, [[0.8]], rtol=1e-6)


@pytest.mark.parametrize("limit", [0.0, 5.0, 100.0])
def test_what_is_small_enough_is_left_alone(limit):
    clipped, norm = _updated(GRADS, limit)
    np.testing.assert_allclose(norm, 5)
    for got, want in clipped.Zip(GRADS):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_sums_of_narrow_gradients_are_float32():
    _, norm = _updated(NestedMap(a=tf.ones([70_000], tf.bfloat16)), 1.0)
    assert norm.dtype == tf.float32
    np.testing.assert_allclose(norm, np.sqrt(70_000), rtol=1e-5)


def test_sparse_gradients_count_once_for_each_row():
    sparse = tf.IndexedSlices(tf.ones([2, 4]), tf.constant([1, 1]), tf.constant([3, 4]))
    np.testing.assert_allclose(_updated(NestedMap(w=sparse), 1.0)[1], 4)  # one row of twos


def test_a_gradient_that_is_not_finite_shows_in_the_norm():
    assert not np.isfinite(_updated(NestedMap(a=tf.constant([1.0, np.nan])), 1.0)[1])


def test_a_limit_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match="got -1"):
        _updated(GRADS, -1.0)
