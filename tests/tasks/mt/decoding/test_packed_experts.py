"""The MoE layer over packed weights, and the choices of routers."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.kernels import tensorflow
from lingvo_moe.core.moe.layer import MoELayer
from lingvo_moe.core.moe.registry import ROUTERS
from lingvo_moe.core.moe.routers.base import LearnedRouter, Router
from lingvo_moe.core.moe.routers.top_k import TopKRouter
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.randomness import make_seed
from lingvo_moe.core.sharding import single_device, use_mesh
from lingvo_moe.tasks.mt.decoding.packed_experts import PackedMoELayer, feed_forward_of_chosen
from lingvo_moe.tasks.mt.decoding.packed_weights import FloatBlocks

N, E, K, M, H = 12, 6, 2, 24, 80
DRAW = np.random.default_rng(0)
WI, WO = (DRAW.normal(size=s).astype(np.float32) for s in ((E, M, H), (E, H, M)))
X = DRAW.normal(size=(N, M)).astype(np.float32)
# Experts 4 and 5 have no row, expert 3 has one, expert 2 three, the others many.
EXPERT = np.array([[0, 1]] * 8 + [[2, 0], [2, 1], [2, 3], [0, 1]], np.int32)
GATE = DRAW.random((N, K)).astype(np.float32)


def _run(rows, kept=None, wi=WI):
    weights = NestedMap(
        {k: [FloatBlocks.Of(one) for one in w] for k, w in (("wi", wi), ("wo", WO))}
    )
    kept = np.ones((N, K), np.float32) if kept is None else kept
    args = (tf.constant(x[rows]) for x in (X, EXPERT, kept, GATE))
    return feed_forward_of_chosen(*args, weights).numpy()


def test_each_token_has_the_sum_of_its_experts():
    kept = np.ones((N, K), np.float32)
    kept[3], kept[9, 0] = 0, 0
    hidden = np.maximum(np.einsum("nm,nkmh->nkh", X, WI[EXPERT]), 0)
    want = np.einsum("nkh,nkhm,nk->nm", hidden, WO[EXPERT], GATE * kept)
    np.testing.assert_allclose(_run(range(N), kept), want, rtol=1e-3, atol=1e-3)


def test_a_token_is_bit_identical_whatever_is_beside_it():
    together = _run(range(N))
    for rows in ([10], [0], [8, 9], [7, 10, 11], [11, 3, 0, 1, 2]):
        np.testing.assert_array_equal(_run(rows), together[rows])


def test_experts_that_nobody_chose_are_not_read():
    wi = WI.copy()
    wi[4] = np.nan
    np.testing.assert_array_equal(_run(range(N), wi=wi), _run(range(N)))
    assert _run([]).shape == (0, M)


def _router(cls, **params):
    p = cls.Params().Set(name="r", model_dim=M, num_experts=E, **params)
    return (p.Set(vocab_size=9) if "vocab_size" in p else p).Instantiate()


def _whole_and_chosen(router):
    """FProp's routing of some tokens in inference, and the choices of ChooseExperts."""
    x, paddings = tf.constant(X[np.newaxis]), tf.constant([[0.0] * 10 + [1.0] * 2])
    needs = type(router).Needs(router.p)
    context = NestedMap({need: tf.range(N)[tf.newaxis] % 2 for need in needs})
    with use_mesh(single_device()), kernels.using(tensorflow):
        theta = router.InitTheta(make_seed(0, 0))
        theta = theta.Transform(lambda w: tf.constant(DRAW.normal(size=w.shape), w.dtype))
        whole = router.FProp(theta, x, paddings, None, context=context)
        return whole, router.ChooseExperts(theta, x, paddings, context)


def _assert_same_choices(whole, chosen):
    for field in ("expert_index", "gate", "kept"):
        np.testing.assert_array_equal(getattr(chosen, field), getattr(whole, field))
    assert len(np.unique(chosen.expert_index)) > 1


VARIANTS = [
    *((name, {}) for name in sorted(ROUTERS)),
    ("top2", {"reading": "lingvo", "normalize_gates": "after_drops"}),
    ("top_k", {"k": 3, "balance_bias": 0.1, "softmax_order": "after"}),
    ("top_k", {"k": 2, "normalize_gates": "after_drops", "level": "sentence"}),
    ("top_k", {"k": 1, "level": "task", "num_tasks": 2}),
    ("lsh", {"k": 2}),
]


@pytest.mark.parametrize("name, params", VARIANTS)
def test_a_router_s_choices_are_those_of_its_routing(name, params):
    """ChooseExperts computes only what a search reads."""
    _assert_same_choices(*_whole_and_chosen(_router(ROUTERS[name], **params)))
    assert ROUTERS[name].ChooseExperts is not Router.ChooseExperts


class WorstFirst(TopKRouter):
    def Route(self, logits_GSE, *args, **kwargs):
        return super().Route(-logits_GSE, *args, **kwargs)


class WorstFirstOfThree(WorstFirst):
    pass


class WorstByLogits(WorstFirst):
    def _ChooseByLogits(self, theta, logits_GSE, real_GS):
        return super()._ChooseByLogits(theta, -logits_GSE, real_GS)


@pytest.mark.parametrize("cls", [WorstFirst, WorstFirstOfThree, WorstByLogits])
def test_a_router_that_says_only_how_it_routes_chooses_so(cls):
    router = _router(cls)
    by_logits = cls.ChooseExperts is LearnedRouter.ChooseExperts
    assert by_logits == (cls is WorstByLogits)
    whole, chosen = _whole_and_chosen(router)
    _assert_same_choices(whole, chosen)


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_the_layer_is_the_layer(kind):
    p = MoELayer.Params().Set(name="moe", model_dim=M, hidden_dim=H, num_experts=E)
    layer = p.Set(router=TopKRouter.Params().Set(k=2)).Instantiate()
    x, paddings = tf.constant(X.reshape(2, 6, M)), tf.constant([[0.0] * 6, [0.0] * 4 + [1.0] * 2])
    with use_mesh(single_device()), kernels.using(tensorflow):
        theta = layer.InitTheta(make_seed(1, 0))
        want, _ = layer.FProp(theta, x, paddings)
        packed = PackedMoELayer(layer)
        got, extras = packed.FProp(packed.Pack(theta, kind), x, paddings)
    np.testing.assert_allclose(got, want, atol=1e-5 if kind == "float32" else 0.1)
    assert np.abs(want).max() > 0.3 and not np.asarray(got)[1, 4:].any() and not extras


@pytest.mark.parametrize("most", [E, E - 1])
def test_many_experts_stay_as_they_are(most, monkeypatch):
    monkeypatch.setattr("lingvo_moe.tasks.mt.decoding.packed_experts._MOST_EXPERTS", most)
    layer = (
        MoELayer.Params().Set(name="moe", model_dim=M, hidden_dim=H, num_experts=E).Instantiate()
    )
    assert PackedMoELayer.Takes(layer) == (most == E)
