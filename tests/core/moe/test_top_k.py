"""Top-k routing compared with cases by hand and with routing one token at a time."""

import moe_reference
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings, strategies as st
from router_testing import route_logits

from lingvo_moe.core.moe.routers.top_k import TopKRouter
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import single_device, use_mesh

SEED = tf.constant([3, 4])
# Three tokens, three experts.
GATES = [[[0.5, 0.3, 0.2], [0.6, 0.1, 0.3], [0.2, 0.7, 0.1]]]


@pytest.fixture(autouse=True)
def _one_device():
    with use_mesh(single_device()):
        yield


def _router(num_experts, **params) -> TopKRouter:
    p = TopKRouter.Params().Set(name="router", model_dim=4, num_experts=num_experts, **params)
    return p.Instantiate()


def _route(router, logits, paddings=None, capacity=None, seed=None, bias=None):
    logits = tf.convert_to_tensor(logits, tf.float32)
    bias = None if bias is None else tf.constant(bias, tf.float32)
    return route_logits(router, logits, paddings, capacity, seed, bias)


def _log(gates) -> np.ndarray:
    return np.log(np.array(gates, np.float32))


def test_switch_by_hand():
    r = _route(_router(3, k=1, z_loss_weight=0.5), _log(GATES) + 2, capacity=1)
    np.testing.assert_array_equal(r.expert_index[0], [[0], [0], [1]])
    np.testing.assert_array_equal(r.position[0], [[0], [1], [0]])
    np.testing.assert_array_equal(r.kept[0], [[1], [0], [1]])
    np.testing.assert_allclose(r.gate[0], [[0.5], [0], [0.7]], 1e-6)  # not normalised
    # f = (2/3, 1/3, 0), P = (1.3, 1.1, 0.6) / 3: 3 (2/3 1.3/3 + 1/3 1.1/3) = 3.7 / 3.
    np.testing.assert_allclose(r.metrics.loss_load_balance, 3.7 / 3, 1e-6)
    np.testing.assert_allclose(r.metrics.loss_z, 4, 1e-6)  # sum exp(log p + 2) = e^2
    np.testing.assert_allclose(r.aux_loss, 3.7 / 3 + 0.5 * 4, 1e-6)
    np.testing.assert_allclose(r.metrics.aux_loss, r.aux_loss)


def test_bias_chooses_and_does_nothing_else():
    router = _router(3, k=1, balance_bias=0.25)
    bias = [-0.25, 0.0, 0.15]
    # Biased: (0.25, 0.3, 0.35), (0.35, 0.1, 0.45), (-0.05, 0.7, 0.25).
    r = _route(router, _log(GATES), capacity=3, seed=SEED, bias=bias)
    np.testing.assert_array_equal(r.expert_index[0, :, 0], [2, 2, 1])
    np.testing.assert_allclose(r.gate[0, :, 0], [0.2, 0.3, 0.7], 1e-6)
    np.testing.assert_allclose(r.metrics.importance, np.mean(GATES[0], 0), 1e-6)
    # Loads (0, 1, 2) with mean 1: up, as it is, down.
    np.testing.assert_allclose(r.updates.router.balance_bias, [0.0, 0.0, -0.1], atol=1e-7)
    assert not _route(router, _log(GATES), bias=bias).updates  # inference changes nothing
    nobody = _route(router, _log(GATES), np.ones((1, 3)), 3, SEED, bias)
    np.testing.assert_allclose(nobody.updates.router.balance_bias, bias)


def test_sigmoid_gates_by_hand():
    """DeepSeek-V3's router: the bias chooses, and gates are the chosen scores over their sum, times a factor."""
    scores = np.array([[[0.5, 0.3, 0.2], [0.6, 0.1, 0.8]]])
    logits = np.log(scores / (1 - scores))
    router = _router(3, k=2, gate="sigmoid", gate_scale=2.5, balance_bias=0.1)
    for seed in (None, SEED):
        r = _route(router, logits, capacity=2, seed=seed, bias=[-0.25, 0.0, 0.0])
        np.testing.assert_array_equal(r.expert_index[0], [[1, 0], [2, 0]])
        want = 2.5 * np.array([[0.3 / 0.8, 0.5 / 0.8], [0.8 / 1.4, 0.6 / 1.4]])
        np.testing.assert_allclose(r.gate[0], want, 1e-6)
        importance = np.mean(scores[0] / scores[0].sum(-1, keepdims=True), 0)
        np.testing.assert_allclose(r.metrics.importance, importance, 1e-6)


def _reference(logits, real, k, order, normalize, capacity, bias):
    """Routes one token at a time; returns (index, gate, position or -1)."""
    G, S, E = logits.shape
    probabilities = moe_reference.softmax(logits.astype(np.float64))
    index = np.zeros((G, S, k), int)
    gate, position = np.zeros((G, S, k)), np.full((G, S, k), -1)
    for g, s in np.ndindex(G, S):
        score = probabilities[g, s] + bias
        index[g, s] = sorted(range(E), key=lambda e: (-score[e], e))[:k]
        if order == "after":
            gate[g, s] = moe_reference.softmax(logits[g, s, index[g, s]].astype(np.float64))
        else:
            gate[g, s] = probabilities[g, s, index[g, s]]
        if normalize == "before_drops":
            gate[g, s] /= gate[g, s].sum()
    for g in range(G):
        taken = np.zeros(E, int)
        for rank in range(k):
            for s in range(S):
                e = index[g, s, rank]
                if real[g, s]:
                    if capacity is None or taken[e] < capacity:
                        position[g, s, rank] = taken[e]
                    taken[e] += 1
    gate *= position >= 0
    if normalize == "after_drops":
        gate /= np.maximum(gate.sum(-1, keepdims=True), 1e-30)
    return index, gate, position


@settings(max_examples=12, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 9), st.integers(2, 5)),
    order=st.sampled_from(["before", "after"]),
    normalize=st.sampled_from(["never", "before_drops", "after_drops", None]),
    capacity=st.one_of(st.none(), st.integers(1, 5)),
    biased=st.booleans(),
    seed=st.integers(0, 10_000),
    data=st.data(),
)
def test_equals_one_token_at_a_time(shape, order, normalize, capacity, biased, seed, data):
    k = data.draw(st.integers(1, shape[2]))
    if k == 1:
        order, normalize = "before", "never"
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=shape, scale=2).astype(np.float32)
    real = rng.random(shape[:2]) < 0.7
    bias = rng.normal(size=shape[2]).astype(np.float32) * 0.3 if biased else None
    router = _router(shape[2], k=k, softmax_order=order, normalize_gates=normalize)
    r = _route(router, logits, ~real, capacity, bias=bias)
    normalize = normalize or "before_drops"
    index, gate, position = _reference(
        logits, real, k, order, normalize, capacity, 0 if bias is None else bias
    )
    np.testing.assert_array_equal(r.expert_index, index)
    np.testing.assert_array_equal(r.kept, position >= 0)
    if capacity is not None:
        np.testing.assert_array_equal(r.position.numpy()[position >= 0], position[position >= 0])
    np.testing.assert_allclose(r.gate, gate, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("biased", [False, True])
def test_gates_have_the_softmax_gradient_and_the_choice_none(biased):
    """d p_i / d l_j = p_i (delta_ij - p_j), for chosen experts i only."""
    router = _router(3, k=2, normalize_gates="never")
    logits, weight = tf.constant(_log(GATES)), np.array([2.0, -1.0])
    bias = tf.constant([0.0, 0.0, 0.4]) if biased else None
    with tf.GradientTape() as tape:
        tape.watch([logits] if bias is None else [logits, bias])
        r = route_logits(router, logits, None, 3, None, bias)
        value = tf.reduce_sum(r.gate * weight)
    grads = tape.gradient(value, [logits] if bias is None else [logits, bias])
    want = np.zeros((3, 3))
    for s, p in enumerate(np.array(GATES[0])):
        for rank, i in enumerate(r.expert_index.numpy()[0, s]):
            want[s] += weight[rank] * p[i] * (np.eye(3)[i] - p)
    np.testing.assert_allclose(grads[0][0], want, rtol=1e-4, atol=1e-6)
    if biased:
        assert grads[1] is None
        np.testing.assert_array_equal(r.expert_index[0, 0], [2, 0])


def test_jitter_multiplies_inputs_in_training_alone():
    # wg is the identity and x_0 = 0, so that log(p_e / p_0) = x_e times the noise.
    E, tokens = 4, 500
    router = _router(E, k=E, jitter=0.2, normalize_gates="never")
    x = np.tile([0.0, 1.0, 2.0, 3.0], (1, tokens, 1)).astype(np.float32)
    theta = NestedMap(wg=tf.eye(E))

    def noise(seed):
        r = router.FProp(theta, tf.constant(x), tf.zeros([1, tokens]), None, seed=seed)
        p = np.zeros((tokens, E))
        np.put_along_axis(p, r.expert_index.numpy()[0], r.gate.numpy()[0], -1)
        return np.log(p[:, 1:] / p[:, :1]) / x[0, :, 1:]

    drawn = noise(SEED)
    assert 0.8 - 1e-4 <= drawn.min() < 0.81 and 1.19 < drawn.max() <= 1.2 + 1e-4
    # Uniform: the mean of 1500 is within 4 deviations of 1, 0.2 / sqrt(3) each.
    assert abs(drawn.mean() - 1) < 4 * 0.2 / np.sqrt(3 * drawn.size)
    assert not np.allclose(drawn, noise(tf.constant([3, 5])), atol=1e-3)
    np.testing.assert_allclose(noise(None), 1, atol=1e-4)


def test_equal_and_overflowing_logits_still_give_k_experts():
    r = _route(_router(4, k=3), [[[0.0] * 4, [900.0, 900.0, -900.0, -900.0]]], capacity=2)
    np.testing.assert_array_equal(r.expert_index[0], [[0, 1, 2], [0, 1, 2]])
    np.testing.assert_allclose(r.gate[0], [[1 / 3] * 3, [0.5, 0.5, 0]], atol=1e-6)
    assert np.isfinite(r.aux_loss)
