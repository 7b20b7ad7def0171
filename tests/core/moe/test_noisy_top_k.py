"""Noisy top-k gating compared with cases by hand and with loops over the same noise."""

import math

import moe_reference
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings, strategies as st
from router_testing import route_logits

from lingvo_moe.core import randomness
from lingvo_moe.core.moe.routers.noisy_top_k import NoisyTopKRouter
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import single_device, use_mesh

SEED = tf.constant([3, 4])


@pytest.fixture(autouse=True)
def _one_device():
    with use_mesh(single_device()):
        yield


def _router(num_experts, **params) -> NoisyTopKRouter:
    p = NoisyTopKRouter.Params().Set(name="router", model_dim=4, num_experts=num_experts)
    return p.Set(**params).Instantiate()


def _route(router, logits, paddings=None, capacity=None, seed=None, deviation=None):
    logits = tf.convert_to_tensor(logits, tf.float32)
    deviation = None if deviation is None else tf.constant(deviation, tf.float32)
    return route_logits(router, logits, paddings, capacity, seed, deviation)


def test_by_hand_without_noise():
    # Gates are a softmax of the two largest: of 2 and 0 in odds e^2, of two equal ones 1/2 each.
    logits = [[[2.0, 0.0, -1.0], [0.0, 1.0, 1.0], [3.0, -1.0, 1.0]]]
    r = _route(_router(3, importance_weight=2.0), logits, capacity=2)
    np.testing.assert_array_equal(r.expert_index[0], [[0, 1], [1, 2], [0, 2]])
    np.testing.assert_array_equal(r.position[0], [[0, 1], [0, 0], [1, 1]])
    g = math.exp(2) / (1 + math.exp(2))
    np.testing.assert_allclose(r.gate[0], [[g, 1 - g], [0.5, 0.5], [g, 1 - g]], 1e-6)
    # Importance (2g, 1.5 - g, 1.5 - g) with mean 1; loads are counts, (2, 2, 2).
    importance = ((2 * g - 1) ** 2 + 2 * (0.5 - g) ** 2) / 3
    np.testing.assert_allclose(r.metrics.loss_importance, importance, 1e-5)
    np.testing.assert_allclose(r.metrics.loss_load, 0)
    np.testing.assert_allclose(r.aux_loss, 2 * importance, 1e-5)
    # Importance is of gates before drops.
    dropped = _route(_router(3), logits, capacity=1)
    np.testing.assert_array_equal(dropped.kept[0], [[1, 0], [1, 1], [0, 0]])
    np.testing.assert_allclose(dropped.metrics.loss_importance, importance, 1e-5)


def _reference(clean, noisy, deviation, real, k):
    """Computes (index, gates, load [E]) token by token."""
    G, S, E = clean.shape
    index, gate, load = np.zeros((G, S, k), int), np.zeros((G, S, k)), np.zeros(E)
    for g, s in np.ndindex(G, S):
        h = noisy[g, s]
        index[g, s] = sorted(range(E), key=lambda e: (-h[e], e))[:k]
        if not real[g, s]:
            continue
        gate[g, s] = moe_reference.softmax(h[index[g, s]].astype(np.float64))
        for e in range(E):
            others = sorted(np.delete(h, e), reverse=True)
            if k == E:
                load[e] += 1
            else:
                z = (clean[g, s, e] - others[k - 1]) / deviation[g, s, e]
                load[e] += 0.5 * (1 + math.erf(z / math.sqrt(2)))
    return index, gate, load


@settings(max_examples=12, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 6), st.integers(2, 5)),
    seed=st.integers(0, 10_000),
    data=st.data(),
)
def test_equals_loops_with_the_same_noise(shape, seed, data):
    G, S, E = shape
    k = data.draw(st.integers(1, E))
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(G, S, 4)).astype(np.float32)
    theta = NestedMap(wg=rng.normal(size=(4, E)), wnoise=rng.normal(size=(4, E)))
    real = rng.random((G, S)) < 0.8
    real[0, 0] = True
    router = _router(E, k=k, noise_epsilon=0.1, load_weight=3.0)
    key = tf.constant([seed, 1])
    r = router.FProp(
        theta.Transform(lambda w: tf.constant(w, tf.float32)),
        tf.constant(x),
        tf.constant(~real),
        None,
        seed=key,
    )
    clean = x @ theta.wg
    deviation = np.log1p(np.exp(x @ theta.wnoise)) + 0.1
    noise = randomness.normal(randomness.fold_in(key, "noise"), shape).numpy()
    index, gate, load = _reference(clean, clean + noise * deviation, deviation, real, k)
    np.testing.assert_array_equal(r.expert_index, index)
    np.testing.assert_allclose(r.gate, gate, rtol=1e-4, atol=1e-5)
    importance = np.zeros(E)
    np.add.at(importance, index.reshape(-1), gate.reshape(-1))
    variations = [np.var(v) / np.mean(v) ** 2 for v in (importance, load)]
    np.testing.assert_allclose(r.metrics.loss_importance, variations[0], 1e-3, 1e-5)
    np.testing.assert_allclose(r.metrics.loss_load, variations[1], 1e-3, 1e-5)
    np.testing.assert_allclose(r.aux_loss, variations[0] + 3 * variations[1], 1e-3, 1e-5)


def test_noise_is_drawn_in_training_alone_and_starts_out_even():
    """Training draws experts evenly if weights are zero; in inference ties go to the first expert."""
    router = _router(4, k=1)
    theta = router.InitTheta(SEED)
    assert not theta.wg.numpy().any() and not theta.wnoise.numpy().any()
    x, paddings = tf.ones([1, 2000, 4]), tf.zeros([1, 2000])
    drawn = router.FProp(theta, x, paddings, None, seed=SEED)
    load = drawn.metrics.expert_load.numpy()
    assert abs(load - 0.25).max() < 4 * math.sqrt(0.25 * 0.75 / 2000)
    other = router.FProp(theta, x, paddings, None, seed=tf.constant([3, 5]))
    assert np.mean(drawn.expert_index.numpy() == other.expert_index.numpy()) < 0.35
    assert not router.FProp(theta, x, paddings, None).expert_index.numpy().any()
