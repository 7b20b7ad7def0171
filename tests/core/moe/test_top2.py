"""Top-2 gating compared with cases by hand and with the sequential algorithm."""

import moe_reference
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings, strategies as st
from router_testing import route_logits

from lingvo_moe.core import randomness, sharding
from lingvo_moe.core.moe.routers.top2 import Top2Router


def _router(num_experts: int, **params) -> Top2Router:
    p = Top2Router.Params().Set(name="router", model_dim=4, num_experts=num_experts, **params)
    return p.Instantiate()


def _log(gates) -> np.ndarray:
    return np.log(np.array(gates, np.float32))


# Three tokens, three experts; all prefer expert 0, the second choices are 1, 2 and 1.
THREE = _log([[[0.6, 0.3, 0.1], [0.5, 0.1, 0.4], [0.7, 0.2, 0.1]]])


def test_by_hand_overflow_of_first_choices():
    r = route_logits(_router(3), THREE, capacity=1)
    np.testing.assert_array_equal(r.kept[0], [[1, 1], [0, 1], [0, 0]])
    # Kept choices keep their gates; dropped ones are not compensated for.
    np.testing.assert_allclose(r.gate[0], [[2 / 3, 1 / 3], [0, 4 / 9], [0, 0]], 1e-6)
    # The loss counts first choices before drops.
    np.testing.assert_allclose(r.aux_loss, 0.2, 1e-6)


def test_after_drops_what_is_kept_sums_to_one():
    r = route_logits(_router(3, normalize_gates="after_drops"), THREE, capacity=1)
    np.testing.assert_allclose(r.gate[0], [[2 / 3, 1 / 3], [0, 1], [0, 0]], 1e-6)


def test_perfect_balance_gives_the_least_loss():
    gates = np.full((1, 4, 4), 0.1) + 0.6 * np.eye(4)[None]
    np.testing.assert_allclose(route_logits(_router(4), _log(gates)).aux_loss, 1 / 16, 1e-6)
    lingvo = route_logits(_router(4, reading="lingvo"), _log(gates))
    np.testing.assert_allclose(lingvo.aux_loss, 1, 1e-6)
    scaled = route_logits(_router(4, aux_loss_scale=4.0), _log(gates))
    np.testing.assert_allclose(scaled.aux_loss, 1 / 4, 1e-6)
    for routing in (lingvo, scaled):  # in its metrics, 1 at balance whatever the factor
        np.testing.assert_allclose(routing.metrics.loss_load_balance, 1, 1e-6)


def test_a_saturated_softmax_still_has_two_choices():
    r = route_logits(_router(3), [[[200.0, 0.0, -5.0]]])
    np.testing.assert_array_equal(r.expert_index[0], [[0, 1]])
    np.testing.assert_allclose(r.gate[0], [[1, 0]])


def test_the_threshold_is_the_gate_that_is_always_sent():
    logits = _log(np.tile([0.8, 0.2], (1, 64, 1)))
    r = route_logits(_router(2, second_expert_threshold=0.2), logits, seed=tf.constant([3, 4]))
    assert np.mean(r.kept[..., 1]) == 1


def test_sampling_draws_the_second_expert_by_the_gates_of_the_others():
    tokens = 4096
    logits = _log(np.tile([0.5, 0.3, 0.15, 0.05], (1, tokens, 1)))
    router = _router(4, second_expert_policy="sampling")
    r = route_logits(router, logits, seed=tf.constant([3, 4]))
    assert np.mean(r.kept) == 1
    assert not r.expert_index[..., 0].numpy().any()
    second = r.expert_index[..., 1].numpy()
    for expert, expected in ((1, 0.6), (2, 0.3), (3, 0.1)):
        deviation = np.sqrt(expected * (1 - expected) / tokens)
        assert abs(np.mean(second == expert) - expected) <= 4 * deviation, expert
    np.testing.assert_allclose(r.gate[second == 3][:, 1], 0.05 / 0.55, rtol=1e-5)
    without_chance = route_logits(router, logits, seed=None)
    assert (without_chance.expert_index[..., 1].numpy() == 1).all()


@pytest.mark.parametrize("case", ["no seed", "policy all"])
def test_without_chance_every_second_choice_is_sent(case):
    logits = _log(np.tile([0.99, 0.01], (1, 64, 1)))
    policy, seed = ("all", tf.constant([1, 2])) if case == "policy all" else ("random", None)
    r = route_logits(_router(2, second_expert_policy=policy), logits, seed=seed)
    assert np.mean(r.kept[..., 1]) == 1


@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 12), st.integers(2, 6)),
    capacity=st.one_of(st.none(), st.integers(1, 6)),
    reading=st.sampled_from(["paper", "lingvo"]),
    train=st.booleans(),
    seed=st.integers(0, 2**31 - 1),
)
def test_equals_the_sequential_algorithm(shape, capacity, reading, train, seed):
    G, S, E = shape
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=shape, scale=2).astype(np.float32)
    real = rng.random((G, S)) < 0.7
    key = tf.constant([seed, 1]) if train else None
    r = route_logits(_router(E, reading=reading), logits, ~real, capacity, key)
    rnd = randomness.uniform(key, [G, S]).numpy() if train else None
    gates = tf.nn.softmax(logits).numpy()
    want = moe_reference.route(gates, real, capacity, rnd, reading)
    np.testing.assert_array_equal(r.expert_index, want["index"])
    np.testing.assert_array_equal(r.kept, want["kept"])
    kept = want["kept"] > 0
    if capacity is not None:
        np.testing.assert_array_equal(r.position.numpy()[kept], want["position"][kept])
    np.testing.assert_allclose(r.gate, want["gate"], atol=1e-6)
    np.testing.assert_allclose(r.aux_loss, want["aux_loss"], rtol=1e-5)


def test_the_largest_gates_come_first_for_both_choices():
    """fairseq's batch_prioritized_routing: all first choices by the first gate, then all second ones by the same."""
    rng, capacity = np.random.default_rng(0), 3
    logits = rng.normal(size=(2, 12, 4)).astype(np.float32)
    real, gates = rng.random((2, 12)) < 0.8, tf.nn.softmax(logits).numpy()
    router = _router(4, reading="lingvo", second_expert_policy="all", prioritize_by_gate=True)
    routed = route_logits(router, logits, ~real, capacity)
    best = gates.argsort(-1)[..., :-3:-1]
    want = np.full((2, 12, 2), 0)
    for g in range(2):
        taken = np.zeros(4, int)
        for k in range(2):
            for s in (-gates[g].max(-1)).argsort():
                if real[g, s]:
                    want[g, s, k] = taken[best[g, s, k]] < capacity
                    taken[best[g, s, k]] += 1
    np.testing.assert_array_equal(routed.kept, want)
    plain = route_logits(_router(4, second_expert_policy="all"), logits, ~real, capacity)
    assert np.any(want != plain.kept.numpy())


def test_the_loss_reaches_the_logits_through_mean_gates_alone():
    logits = tf.Variable(np.random.default_rng(0).normal(size=(2, 6, 3)).astype(np.float32))
    first = tf.one_hot(tf.argmax(logits, -1), 3)
    with sharding.use_mesh(sharding.single_device()), tf.GradientTape(persistent=True) as tape:
        aux = route_logits(_router(3), logits, capacity=2).aux_loss
        share = tf.reduce_mean(first, 1)
        by_hand = tf.reduce_mean(
            tf.reduce_mean(share * tf.reduce_mean(tf.nn.softmax(logits), 1), -1)
        )
    np.testing.assert_allclose(aux, by_hand, rtol=1e-5)
    np.testing.assert_allclose(
        tape.gradient(aux, logits), tape.gradient(by_hand, logits), rtol=1e-4, atol=1e-8
    )


def test_gating_weights_are_replicated_unless_asked_otherwise():
    split = {"E": "expert"}
    assert _router(3, weight_split=split).VariableSpecs().wg.split == (None, None)
    split["wg.E"] = "expert"
    assert _router(3, weight_split=split).VariableSpecs().wg.split == (None, "expert")
