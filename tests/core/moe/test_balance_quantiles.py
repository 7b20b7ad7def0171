"""Balance by quantiles, compared with exact quantiles in NumPy, and over devices.

Letters: N token, G group, S token in group, E expert, M model.
"""

import numpy as np
import pytest
import router_testing
import tensorflow as tf
from hypothesis import given, settings, strategies as st

from lingvo_moe.core.config.hyperparams import ParamError
from lingvo_moe.core.engine.eager.testing import run_sharded
from lingvo_moe.core.moe.routers.quantiles import BINS
from lingvo_moe.core.moe.routers.top_k import TopKRouter
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.sharding.vectorized import vectorized

QUANTILES = {"balance_quantiles": True, "load_balance_weight": 0.0}


def _exact(scores_NE, bias_E, k):
    """The exact k/E quantile of each expert; of a whole number of tokens, the middle to the next one."""
    tokens, experts = scores_NE.shape
    sums = np.sort(scores_NE + bias_E, 1)
    alpha_N1 = (sums[:, [-k - 1]] + sums[:, [-k]]) / 2
    lacking_NE = np.sort(alpha_N1 - scores_NE, 0)
    wanted = tokens * k // experts
    assert wanted * experts == tokens * k
    quantile_E = (lacking_NE[wanted - 1] + lacking_NE[wanted]) / 2
    return quantile_E - quantile_E.mean(), lacking_NE[wanted - 1 : wanted + 1]


def _variation(scores_NE, bias_E, k):
    """The loads' standard deviation over their mean."""
    best = np.argsort(-(scores_NE + bias_E), 1)[:, :k]
    load_E = np.bincount(best.ravel(), minlength=scores_NE.shape[1])
    return load_E.std() / load_E.mean()


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _next(router, logits_NE, bias_E, real_N=None):
    """The next bias, by the router."""
    paddings = None if real_N is None else ~real_N[np.newaxis]
    bias_E = tf.constant(bias_E, tf.float32)
    routing = router_testing.route_logits(
        router, logits_NE[np.newaxis], paddings, None, router_testing.SEED, bias_E
    )
    return routing.updates.router.balance_bias.numpy()


@settings(max_examples=10, deadline=None)
@given(
    k=st.integers(1, 3),
    shares=st.integers(1, 40),
    gate=st.sampled_from(["sigmoid", "softmax"]),
    seed=st.integers(0, 10_000),
    padding=st.integers(0, 30),
)
def test_the_histogram_is_the_exact_quantile_to_one_bin(k, shares, gate, seed, padding):
    experts, rng = 4, np.random.default_rng(seed)
    tokens = shares * experts
    logits = rng.normal(size=(tokens + padding, experts), scale=2).astype(np.float32)
    bias = rng.normal(size=experts).astype(np.float32)
    real = rng.permutation(tokens + padding) < tokens
    router = router_testing.router("top_k", 4, experts, k=k, gate=gate, **QUANTILES)
    got = _next(router, logits, bias, real)
    scores = _sigmoid(logits) if gate == "sigmoid" else np.array(tf.nn.softmax(logits))
    want, between = _exact(scores[real], bias, k)
    width = (bias.max() - bias.min() + 2) / BINS
    # Each is off by a bin at most, and so is their mean; an exact one may lie anywhere between two tokens.
    slack = between[1] - between[0]
    assert (np.abs(got - want) <= 2 * width + slack + slack.mean()).all()
    assert abs(got.mean()) < 1e-6
    nobody = _next(router, logits, bias, real & False)
    np.testing.assert_array_equal(nobody, bias)


@pytest.mark.parametrize("experts, k", [(24, 1), (8, 2)])
def test_loads_of_a_frozen_batch_become_even(experts, k):
    """Their variation is that of exact quantiles to 0.02, which is small."""
    tokens, rng = 960, np.random.default_rng(0)
    uneven_E = 1.5 * rng.normal(size=experts)
    logits = (rng.normal(size=(tokens, experts)) + uneven_E).astype(np.float32)
    scores = _sigmoid(logits)
    router = router_testing.router("top_k", 4, experts, k=k, gate="sigmoid", **QUANTILES)
    by_histogram, exact = np.zeros(experts, np.float32), np.zeros(experts)
    assert _variation(scores, exact, k) > 0.5
    for _ in range(20):
        by_histogram = _next(router, logits, by_histogram)
        exact, _ = _exact(scores, exact, k)
    assert _variation(scores, exact, k) < 0.03
    assert abs(_variation(scores, by_histogram, k) - _variation(scores, exact, k)) < 0.02


G, S, M, E = 8, 64, 16, 8


def _step(balance):
    """A function of inputs and paddings that routes, and gives the next bias and the gates."""
    p = TopKRouter.Params().Set(name="router", model_dim=M, num_experts=E, k=2, gate="sigmoid")
    p.Set(activation_split={"G": "expert"}, **balance)
    router = p.Instantiate()

    def route(theta, x_GSM, paddings_GS):
        routing = router.FProp(theta, x_GSM, paddings_GS, None, router_testing.SEED)
        return NestedMap(gate=routing.gate, metrics=routing.metrics, updates=routing.updates)

    return route


def test_any_mesh_gives_the_same_bits_by_one_sum_of_counts():
    rng = np.random.default_rng(1)
    # Few bits each, so that logits are exact, and the same in any order of their sums.
    x = rng.integers(-8, 9, (G, S, M)).astype(np.float32) / 8
    wg = rng.integers(-8, 9, (M, E)).astype(np.float32) / 8
    paddings = (rng.random((G, S)) < 0.2).astype(np.float32)
    theta = NestedMap(wg=wg, balance_bias=np.linspace(-0.3, 0.2, E).astype(np.float32))
    splits = [None, ("expert", None, None), ("expert", None)]

    def run(balance, devices):
        mesh = Mesh.parse(f"expert:{devices}")
        return run_sharded(_step(balance), [theta, x, paddings], mesh, splits)

    (one, none), (two, _), (eight, collectives) = (run(QUANTILES, n) for n in (1, 2, 8))
    assert not none and np.ptp(one.updates.router.balance_bias) > 0.1
    for other in (two, eight):
        np.testing.assert_array_equal(
            other.updates.router.balance_bias, one.updates.router.balance_bias
        )
    # The step by size sums loads over devices; this one sums counts in its place, and nothing else.
    _, before = run({"balance_bias": 0.1, "load_balance_weight": 0.0}, 8)
    counts = [line for line in collectives.hlo.splitlines() if f"s32[{BINS}," in line]
    summed = [line for line in counts if " all-reduce(" in line or " all-reduce-start(" in line]
    assert len(summed) == 1 and f"s32[{BINS},{E}]" in summed[0]
    assert set(collectives) == set(before) == {"all-reduce"}
    assert collectives["all-reduce"] == before["all-reduce"] + 1


def test_in_the_stages_of_a_pipeline():
    rng = np.random.default_rng(2)
    x = rng.integers(-8, 9, (2, G, S, M)).astype(np.float32) / 8
    theta = NestedMap(
        wg=rng.integers(-8, 9, (M, E)).astype(np.float32) / 8, balance_bias=np.zeros(E, np.float32)
    )
    route, paddings = _step(QUANTILES), np.zeros((G, S), np.float32)

    def stages(theta, x):
        def of_one(one):
            return [route(theta, one, tf.constant(paddings)).updates.router.balance_bias]

        return vectorized(of_one, "stage", [x])[0]

    mesh, split = Mesh.parse("stage:2,expert:2"), ("stage", "expert", None, None)
    got, _ = run_sharded(stages, [theta, x], mesh, [None, split])
    for one, stage in zip(got, x, strict=True):
        want, _ = run_sharded(route, [theta, stage, paddings], Mesh.parse("expert:1"))
        np.testing.assert_array_equal(one, want.updates.router.balance_bias)


@pytest.mark.parametrize(
    "params, named",
    [
        ({"balance_bias": 0.1, "load_balance_weight": 0.0}, "router.balance_bias=0.1: .*set 0"),
        ({}, "router.load_balance_weight=1.0: .*set 0"),
        ({"load_balance_weight": 0.0, "expert_groups": 2}, "router.expert_groups=2: .*set 1"),
        ({"load_balance_weight": 0.0, "k": 4}, "balance_quantiles=True: k=4 is all experts"),
    ],
)
def test_what_contradicts_it_is_refused(params, named):
    with pytest.raises(ParamError, match=named):
        router_testing.router("top_k", 4, 4, balance_quantiles=True, **params)
