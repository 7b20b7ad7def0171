"""Dispatch and combine compared with loops over tokens."""

import moe_reference
import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core import sharding
from lingvo_moe.core.moe.dispatch import Dispatcher
from lingvo_moe.core.moe.experts import Rows
from lingvo_moe.core.moe.layer import DISPATCHERS
from lingvo_moe.core.moe.routers.base import Routing
from lingvo_moe.core.nested_map import NestedMap

G, S, E, M = 2, 6, 3, 4


def _case(capacity: int | None) -> tuple[dict, Routing, np.ndarray]:
    rng = np.random.default_rng(0)
    gates = moe_reference.softmax(rng.normal(size=(G, S, E)))
    real = rng.random((G, S)) < 0.8
    want = moe_reference.route(gates, real, capacity, rng.random((G, S)))
    routing = Routing(
        expert_index=tf.constant(want["index"]),
        gate=tf.constant(want["gate"]),
        position=tf.constant(want["position"] % 97),  # dropped ones hold 96: must not matter
        kept=tf.constant(want["kept"]),
        num_experts=E,
        capacity=capacity,
        aux_loss=tf.constant(0.0),
        metrics=NestedMap(),
    )
    return want, routing, rng.normal(size=(G, S, M)).astype(np.float32)


@pytest.fixture(params=sorted(DISPATCHERS))
def dispatcher(request) -> Dispatcher:
    with sharding.use_mesh(sharding.single_device()):
        yield _dispatcher(request.param)


def _dispatcher(name: str) -> Dispatcher:
    return DISPATCHERS[name].Params().Set(name="dispatcher").Instantiate()


def _scaled(tokens: tf.Tensor | Rows, factors: list[float]) -> tf.Tensor | Rows:
    """Expert e multiplies by its own factor, so that a token at the wrong expert shows."""
    values = tokens.values if isinstance(tokens, Rows) else tokens
    factor_E = tf.constant(factors, values.dtype)
    if isinstance(tokens, Rows):
        return tokens.MatMul(factor_E[:, None, None] * tf.eye(M, dtype=values.dtype), (None,) * 3)
    return tokens * factor_E[:, None, None, None]


@pytest.mark.parametrize("capacity", [2, None])
def test_dropless_has_a_row_for_each_kept_choice_by_expert_and_token(capacity):
    want, routing, x = _case(capacity)
    expected = [
        (e, x[g, s])
        for e, g, s, k in np.ndindex(E, G, S, 2)
        if want["kept"][g, s, k] and want["index"][g, s, k] == e
    ]
    with sharding.use_mesh(sharding.single_device()):
        rows = _dispatcher("dropless").Dispatch(routing, tf.constant(x))
    assert rows.values.shape == (1, G * S * 2, M)
    sizes = [sum(e == f for f, _ in expected) for e in range(E)]
    np.testing.assert_array_equal(rows.group_sizes, [sizes])
    filled = np.stack([row for _, row in expected])
    np.testing.assert_array_equal(rows.values[0, : len(filled)], filled)
    assert not np.any(rows.values[0, len(filled) :])


@pytest.mark.parametrize("capacity", [3, None])
def test_combine_weighs_what_dispatch_sent(dispatcher, capacity):
    want, routing, x = _case(capacity)
    tokens = dispatcher.Dispatch(routing, tf.constant(x))
    y = dispatcher.Combine(routing, _scaled(tokens, [1.0, 10.0, 100.0]))
    weights = want["gate"] * want["kept"] * 10.0 ** want["index"]
    np.testing.assert_allclose(y, weights.sum(-1, keepdims=True) * x, rtol=1e-5)


def test_room_for_all_needs_no_mask_that_grows_with_the_square_of_s():
    with sharding.use_mesh(sharding.single_device()):
        _, routing, x = _case(None)
        assert _dispatcher("einsum").Dispatch(routing, tf.constant(x)).shape == (E, G * S, 1, M)
