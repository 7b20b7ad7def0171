"""Padding changes no router's choices, metrics or losses: neither its contents nor its amount.

Letters: G group, S token in group, E expert, M model.
"""

from typing import Any

import numpy as np
import pytest
import router_testing
import tensorflow as tf
from hypothesis import given, settings, strategies as st

from lingvo_moe.core.moe.layer import ROUTERS
from lingvo_moe.core.moe.routers.base import Routing
from lingvo_moe.core.nested_map import NestedMap

G, S, E, M, C = 2, 6, 4, 5, 2
_LOSSES = {"z_loss_weight": 0.3}
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {"vocab_size": 50} if name == "hash" else {}) for name in ROUTERS),
    ("top2", {"reading": "lingvo", "second_expert_policy": "all"}),
    ("top_k", {"k": 1, "jitter": 0.1, **_LOSSES}),
    ("top_k", {"k": 3, "softmax_order": "after", "balance_bias": 0.01, **_LOSSES}),
    ("top_k", {"level": "sentence", **_LOSSES}),
    ("top_k", {"gate": "sigmoid", "balance_bias": 0.01, "level": "id", "vocab_size": 50}),
    ("top2", {"gate": "sigmoid", "second_expert_policy": "sampling"}),
    ("noisy_top_k", {"level": "task", "num_tasks": 3}),
    ("lsh", {"k": 2}),
    ("random", {"k": 3}),
]
_every_router = pytest.mark.parametrize(
    "name, params", CASES, ids=[f"{n} {' '.join(map(str, p.values()))}".strip() for n, p in CASES]
)


class _Tokens:
    """Tokens of G groups with all inputs that a router may need; `real_GS` is false at padding."""

    def __init__(self, seed: int):
        rng = np.random.default_rng(seed)
        self.x_GSM = rng.normal(size=(G, S, M)).astype(np.float32)
        self.real_GS = rng.random((G, S)) < 0.6
        self.context = {
            "ids": rng.integers(0, 50, (G, S)),
            "segment_ids": np.where(self.real_GS, np.arange(S) // 3 + 1, 0),
            "task_ids": rng.integers(0, 3, (G, S)),
        }

    def WithOtherPadding(self, seed: int) -> "_Tokens":
        """Returns the same tokens with other values at padding."""
        other, rng = _Tokens(seed + 1), np.random.default_rng(seed)
        other.x_GSM = np.where(self.real_GS[..., None], self.x_GSM, 100 * other.x_GSM)
        for name in ("ids", "task_ids"):
            value = self.context[name]
            anything = rng.permutation(value.ravel()).reshape(value.shape)
            other.context[name] = np.where(self.real_GS, value, anything)
        other.real_GS, other.context["segment_ids"] = self.real_GS, self.context["segment_ids"]
        return other

    def WithMorePadding(self, seed: int) -> "_Tokens":
        """Returns the same tokens in the same order, with three more padding positions among them."""
        other, rng = _Tokens(seed), np.random.default_rng(seed)
        order = np.stack([np.sort(rng.permutation(S + 3)[:S]) for _ in range(G)])

        def strewn(value: np.ndarray, padding: Any) -> np.ndarray:
            out = np.full((G, S + 3, *value.shape[2:]), padding, value.dtype)
            for g in range(G):
                out[g, order[g]] = value[g]
            return out

        other.x_GSM, other.real_GS = strewn(self.x_GSM, 7.0), strewn(self.real_GS, False)
        fills = {"ids": 9, "segment_ids": 0, "task_ids": 2}
        other.context = {k: strewn(v, fills[k]) for k, v in self.context.items()}
        return other

    def Route(self, name: str, params: dict[str, Any], seed: tf.Tensor | None) -> Routing:
        layer = router_testing.router(name, M, E, **params)
        rng = np.random.default_rng(5)
        theta = layer.VariableSpecs().Transform(
            lambda spec: tf.constant(rng.normal(size=spec.shape), tf.float32)
        )
        return router_testing.route(
            layer, self.x_GSM, ~self.real_GS, C, theta=theta, seed=seed, context=self.context
        )

    def Of(self, routing: Routing) -> list[np.ndarray]:
        """Returns the decisions for each real token, in order."""
        kept = routing.kept.numpy()[self.real_GS]
        values = [v.numpy()[self.real_GS] for v in (routing.expert_index, routing.gate)]
        if routing.capacity is None:  # unlimited slots: their numbers mean nothing
            return [*values, kept]
        return [*values, kept, np.where(kept > 0, routing.position.numpy()[self.real_GS], -1)]


def _sums(routing: Routing) -> dict[str, np.ndarray]:
    all_ = NestedMap(metrics=routing.metrics, loss=routing.aux_loss, updates=routing.updates)
    return {path: np.asarray(value) for path, value in all_.FlattenItems()}


@_every_router
@settings(max_examples=2)
@given(data_seed=st.integers(0, 1000))
def test_what_padding_holds_moves_nothing(name, params, data_seed):
    tokens = _Tokens(data_seed)
    other = tokens.WithOtherPadding(data_seed)
    wanted, got = (t.Route(name, params, router_testing.SEED) for t in (tokens, other))
    for a, b in zip(tokens.Of(wanted), other.Of(got), strict=True):
        np.testing.assert_array_equal(a, b)
    assert _sums(wanted).keys() == _sums(got).keys()
    for path, value in _sums(got).items():
        assert np.isfinite(value).all(), path
        np.testing.assert_allclose(value, _sums(wanted)[path], 1e-6, 1e-7, err_msg=path)


@_every_router
def test_nothing_but_padding_costs_nothing(name, params):
    tokens = _Tokens(0)
    tokens.real_GS = np.zeros((G, S), bool)
    found = tokens.Route(name, params, router_testing.SEED)
    assert found.aux_loss == 0 and not found.kept.numpy().any()
    assert all(np.isfinite(value).all() for value in _sums(found).values())


@_every_router
@settings(max_examples=2)
@given(data_seed=st.integers(0, 1000))
def test_how_much_padding_there_is_moves_nothing(name, params, data_seed):
    tokens = _Tokens(data_seed)
    other = tokens.WithMorePadding(data_seed)
    wanted, got = (t.Route(name, params, None) for t in (tokens, other))
    for a, b in zip(tokens.Of(wanted), other.Of(got), strict=True):
        np.testing.assert_allclose(a, b, 1e-6)
    wanted_sums, got_sums = _sums(wanted), _sums(got)
    for sums in (wanted_sums, got_sums):
        del sums["metrics.effective_capacity"]  # E C / S, of positions and not of tokens
    assert wanted_sums.keys() == got_sums.keys()
    for path, value in got_sums.items():
        np.testing.assert_allclose(value, wanted_sums[path], 1e-5, 1e-6, err_msg=path)
