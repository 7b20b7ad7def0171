"""Logits and cross-entropy: the smoothing formula, its gradient, weights, sharing a table."""

import numpy as np
import pytest
import tensorflow as tf
from equivalence import compare, with_gradients
from hypothesis import given, settings, strategies as st
from layer_testing import SPLITS, init, normal, single

from lingvo_moe.core.kernels.xla import cross_entropy
from lingvo_moe.core.layers.softmax import Softmax
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import single_device, use_mesh


def _layer(**kwargs):
    p = Softmax.Params().Set(name="softmax", vocab_size=7, model_dim=4, **SPLITS)
    return p.Set(**kwargs).Instantiate()


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 99), st.sampled_from([0.0, 0.1, 0.5]), st.sampled_from([1.0, 30.0]))
def test_cross_entropy_and_its_gradient(seed, smoothing, scale):
    """Compares with TensorFlow's dense cross-entropy of explicitly smoothed targets."""
    logits = normal(seed, 2, 3, 7) * scale
    labels = tf.constant(np.random.RandomState(seed).randint(0, 7, [2, 3]).astype("int32"))
    target = tf.one_hot(labels, 7) * (1 - smoothing) + smoothing / 7
    weights = normal(seed + 1, 2, 3)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(logits)
        got = cross_entropy(logits, labels, smoothing)
        want = tf.nn.softmax_cross_entropy_with_logits(target, logits)
        losses = [tf.reduce_sum(got * weights), tf.reduce_sum(want * weights)]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    grads = [tape.gradient(loss, logits) for loss in losses]
    np.testing.assert_allclose(grads[0], grads[1], atol=1e-5)


def test_weights_mask_all_results():
    layer = _layer(label_smoothing=0.1)
    theta = NestedMap(table=tf.constant([[0.0] * 4, [3.0, 0, 0, 0], *[[0.0] * 4] * 5]))
    x = tf.constant([[[1.0, 0, 0, 0]] * 3])
    labels, weights = tf.constant([[1, 2, 1]]), tf.constant([[1, 1, 0.0]])
    with use_mesh(single_device()):
        xent, nll, correct = layer.Losses(theta, x, labels, weights)
    np.testing.assert_array_equal(correct, [[1, 0, 0]])
    log_p = np.log(np.exp([3.0, 0.0]) / (np.exp(3) + 6))
    np.testing.assert_allclose(nll, [[-log_p[0], -log_p[1], 0]], rtol=1e-5)
    uniform = -0.1 / 7 * (log_p[0] + 6 * log_p[1])
    np.testing.assert_allclose(
        xent, [[-0.9 * log_p[0] + uniform, -0.9 * log_p[1] + uniform, 0]], rtol=1e-5
    )


def test_logits_are_float32_and_may_share_a_table():
    x, table = normal(0, 2, 3, 4), normal(1, 7, 4)
    tied = _layer(tied=True)
    assert tied.VariableSpecs() == {}
    np.testing.assert_allclose(
        single(tied.FProp, NestedMap(table=table), x), np.einsum("btm,vm->btv", x, table), rtol=1e-5
    )
    layer = _layer(fprop_dtype="bfloat16")
    assert single(layer.FProp, init(layer), tf.cast(x, tf.bfloat16)).dtype == tf.float32


def test_meta_and_errors():
    meta = Softmax.FPropMeta(_layer().p, (2, 3, 4))
    assert (meta.flops, meta.out_shapes) == (2 * 2 * 3 * 4 * 7, ((2, 3, 7),))
    with pytest.raises(ValueError, match=r"label_smoothing=1.5: must be a number in \[0, 1\)"):
        _layer(label_smoothing=1.5)


def test_sharded():
    layer = _layer(label_smoothing=0.1)

    def fn(theta, x, labels, weights):
        xent, _, correct = layer.Losses(theta, x, labels, weights)
        return tf.reduce_sum(xent), [xent, correct]

    labels = tf.constant(np.random.RandomState(0).randint(0, 7, [8, 2]).astype("int32"))
    args = [init(layer), normal(0, 8, 2, 4), labels, tf.abs(normal(1, 8, 2))]
    split = ("expert", None)
    _, collectives = compare(with_gradients(fn), args, [None, (*split, None), split, split])
    assert collectives["all-gather"] == 0
