"""Routing metrics compared with counts by hand and by loops."""

import moe_reference
import numpy as np
import tensorflow as tf
from hypothesis import given, settings, strategies as st

from lingvo_moe.core.moe.routers.losses_and_metrics import Choice, routing_metrics


def _metrics(want: dict, real: np.ndarray, num_experts: int, capacity: int | None, **kw):
    index, gate, wanted, kept = (
        tf.constant(want[name]) for name in ("index", "gate", "wanted", "kept")
    )
    choice = Choice(index, gate, wanted, tf.constant(real, tf.float32), **kw)
    return routing_metrics(choice, gate, kept, num_experts, capacity)


def test_where_every_expert_chooses_there_are_no_ranks():
    # Three experts with two slots each, four tokens; the last token is padding, nobody chooses the third.
    kept = np.array([[[1, 0, 1], [1, 0, 0], [0, 0, 0], [0, 0, 0]]], np.float32)
    want = {
        "index": np.tile(np.arange(3, dtype=np.int32), (1, 4, 1)),
        "gate": kept / 2,
        "wanted": kept,
        "kept": kept,
    }
    m = _metrics(want, np.array([[1, 1, 1, 0]]), 3, 2, ranked=False)
    np.testing.assert_allclose(m.expert_load, [2 / 3, 0, 1 / 3], 1e-6)
    np.testing.assert_allclose([m.dispatch_0, m.dead_experts], [1 / 3, 1 / 3], 1e-6)
    np.testing.assert_allclose([m.experts_per_token, m.over_capacity_ratio], [1, 0], 1e-6)
    assert set(m) == {
        *("dispatch_0", "experts_per_token", "over_capacity_ratio", "expert_load", "dead_experts"),
        "effective_capacity",
    }


@settings(max_examples=30, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 10), st.integers(2, 5)),
    capacity=st.one_of(st.none(), st.integers(1, 4)),
    seed=st.integers(0, 10_000),
)
def test_equals_counting(shape, capacity, seed):
    G, S, E = shape
    rng = np.random.default_rng(seed)
    real = rng.random((G, S)) < 0.7
    gates = moe_reference.softmax(rng.normal(size=shape, scale=2))
    want = moe_reference.route(gates, real, capacity, rng.random((G, S)))
    got = _metrics(want, real, E, capacity, probabilities=tf.constant(gates, tf.float32))
    tokens = max(real.sum(), 1)
    count = {f"dispatch_{n}": 0.0 for n in range(3)}
    first, load, importance, entropy = np.zeros(E), np.zeros(E), np.zeros(E), 0.0
    for g, s in zip(*np.nonzero(real)):
        count[f"dispatch_{int(want['kept'][g, s].sum())}"] += 1 / tokens
        first[want["index"][g, s, 0]] += 1 / tokens
        for k in range(2):
            load[want["index"][g, s, k]] += want["kept"][g, s, k]
        for e in range(E):
            importance[e] += gates[g, s, e] / tokens
            entropy -= gates[g, s, e] * np.log(gates[g, s, e]) / tokens
    for k in range(2):
        asked, kept = want["wanted"][..., k].sum(), want["kept"][..., k].sum()
        count[f"over_capacity_{k + 1}_ratio"] = (asked - kept) / max(asked, 1)
        count[f"mean_gate_{k + 1}"] = want["gate"][..., k].sum() / tokens
    asked = want["wanted"].sum()
    count["over_capacity_ratio"] = (asked - load.sum()) / max(asked, 1)
    count["experts_per_token"] = load.sum() / tokens
    count["expert_load_first"] = first
    count["expert_load"] = load / max(load.sum(), 1)
    count["dead_experts"] = sum(n == 0 for n in load) / E
    count["importance"], count["gate_entropy"] = importance, entropy
    count["effective_capacity"] = E if capacity is None else E * capacity / S
    assert sorted(count) == sorted(got)
    for name, value in count.items():
        assert got[name].dtype == tf.float32
        np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
