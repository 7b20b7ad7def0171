"""The routers' losses compared with cases by hand and NumPy loops, their gradients with finite differences."""

import math

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core.moe.routers import losses_and_metrics as losses
from lingvo_moe.core.moe.routers.top_k import TopKRouter
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.randomness import make_seed
from lingvo_moe.core.sharding import single_device, use_mesh

REAL = np.array([[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]], np.float32)
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(3, 4, 5)).astype(np.float32)
DEVIATION = RNG.uniform(0.3, 2, size=LOGITS.shape).astype(np.float32)
THRESHOLD = RNG.normal(size=LOGITS.shape).astype(np.float32)


def _z_loss(logits):
    tokens = [logits[g, s] for g, s in zip(*np.nonzero(REAL))]
    return np.mean([math.log(sum(math.exp(v) for v in token)) ** 2 for token in tokens])


def _load_variation(clean):
    load = np.zeros(5)
    for g, s in zip(*np.nonzero(REAL)):
        for e in range(5):
            z = (clean[g, s, e] - THRESHOLD[g, s, e]) / DEVIATION[g, s, e]
            load[e] += 0.5 * (1 + math.erf(z / math.sqrt(2)))
    return np.var(load) / np.mean(load) ** 2


def _z_loss_tf(logits):
    return losses.z_loss(losses.log_partition(logits), tf.constant(REAL))


def _load_variation_tf(clean):
    load = losses.smooth_load(clean, tf.constant(DEVIATION), tf.constant(THRESHOLD), REAL)
    return losses.cv_squared(load)


@pytest.mark.parametrize(
    ("loss", "reference"), [(_z_loss_tf, _z_loss), (_load_variation_tf, _load_variation)]
)
def test_values_and_gradients(loss, reference):
    logits = tf.constant(LOGITS)
    with tf.GradientTape() as tape:
        tape.watch(logits)
        value = loss(logits)
    np.testing.assert_allclose(value, reference(LOGITS), rtol=1e-5)
    gradient, step = tape.gradient(value, logits).numpy(), 1e-5
    assert not gradient[REAL == 0].any()
    for place in [(0, 0, 0), (0, 1, 3), (0, 3, 4), (2, 0, 2)]:
        moved = np.zeros(LOGITS.shape)
        moved[place] = step
        difference = reference(LOGITS + moved) - reference(LOGITS - moved)
        np.testing.assert_allclose(gradient[place], difference / (2 * step), 2e-3, 1e-6)


def test_load_balance_by_hand_for_two_choices():
    # Two groups and a third of padding. Group 0: two tokens choose 0 and 1, 0 and 2; f = (2,1,1)/4,
    # P = (0.5, 0.3, 0.2). Group 1: one token chooses 1 and 2; f = (0,1,1)/2, P = (0.2, 0.4, 0.4).
    gates = [[[0.6, 0.3, 0.1], [0.4, 0.3, 0.3]], [[0.2, 0.4, 0.4], [1, 0, 0]], [[1, 0, 0]] * 2]
    real = [[1, 1], [1, 0], [0, 0]]
    count = [[2, 1, 1], [0, 1, 1], [0, 0, 0]]
    probabilities, count, real = (tf.constant(v, tf.float32) for v in (gates, count, real))
    with tf.GradientTape() as tape:
        tape.watch([probabilities, count])
        loss = losses.load_balance(probabilities, count, real)
    group_0, group_1 = 3 * (0.5 * 0.5 + 0.25 * 0.3 + 0.25 * 0.2), 3 * (0.5 * 0.4 + 0.5 * 0.4)
    np.testing.assert_allclose(loss, (group_0 + group_1) / 2, 1e-6)
    by_gates, by_count = tape.gradient(loss, [probabilities, count])
    assert by_count is None
    # Token 0 of group 0: 3 f_e / 2 tokens / 2 groups.
    np.testing.assert_allclose(by_gates[0, 0], [3 * 0.5 / 4, 3 * 0.25 / 4, 3 * 0.25 / 4], 1e-6)
    assert not by_gates.numpy()[1, 1].any() and not by_gates.numpy()[2].any()


def test_log_partition_does_not_overflow():
    logits = tf.constant([[[500.0, 500.0], [-500.0, -500.0]]])
    np.testing.assert_allclose(
        losses.log_partition(logits), [[500 + math.log(2), -500 + math.log(2)]], 1e-6
    )


def test_the_load_balance_loss_by_row_is_deepseek_v3_s_loss_by_sequence():
    """Its report, equations 17 to 20, written out; the bias takes part in the choice alone."""
    E, k, T = 6, 2, 5
    p = TopKRouter.Params().Set(name="router", model_dim=4, num_experts=E, k=k, gate="sigmoid")
    router = p.Set(balance_bias=0.1).Instantiate()
    rng = np.random.default_rng(1)
    wg, bias, x = (rng.normal(size=s).astype("float32") for s in ((4, E), (E,), (3, T, 4)))
    with use_mesh(single_device()):
        theta = NestedMap(wg=tf.constant(wg), balance_bias=tf.constant(bias))
        routing = router.FProp(theta, tf.constant(x), tf.zeros([3, T]), None, make_seed(0, 0))
    expected = 0.0
    for row in x:
        scores = 1 / (1 + np.exp(-row @ wg))
        chosen = np.argsort(-(scores + bias), -1)[:, :k]
        f = E / (k * T) * np.bincount(chosen.ravel(), minlength=E)
        expected += f @ (scores / scores.sum(-1, keepdims=True)).mean(0) / len(x)
    np.testing.assert_allclose(routing.metrics.loss_load_balance, expected, rtol=1e-5)
