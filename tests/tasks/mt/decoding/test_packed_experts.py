"""The MoE layer over packed weights."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from rows import assert_rows_equal

from lingvo_moe.core import kernels
from lingvo_moe.core.kernels import tensorflow
from lingvo_moe.core.kernels.packed_weights import PackAs
from lingvo_moe.core.moe.dispatch_dropless import DroplessDispatcher
from lingvo_moe.core.moe.experts import Experts
from lingvo_moe.core.moe.layer import MoELayer
from lingvo_moe.core.moe.routers.base import Routing
from lingvo_moe.core.moe.routers.top_k import TopKRouter
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.randomness import make_seed
from lingvo_moe.core.sharding import single_device, use_mesh

N, E, K, M, H = 12, 6, 2, 24, 80
DRAW = np.random.default_rng(0)
WI, WO = (DRAW.normal(size=s).astype(np.float32) for s in ((E, M, H), (E, H, M)))
X = DRAW.normal(size=(N, M)).astype(np.float32)
# Experts 4 and 5 have no row, expert 3 has one, expert 2 three, the others many.
EXPERT = np.array([[0, 1]] * 8 + [[2, 0], [2, 1], [2, 3], [0, 1]], np.int32)
GATE = DRAW.random((N, K)).astype(np.float32)


def _run(rows, kept=None, wi=WI):
    weights = NestedMap({k: PackAs().Experts(tf.constant(w)) for k, w in (("wi", wi), ("wo", WO))})
    kept = np.ones((N, K), np.float32) if kept is None else kept
    given = [tf.constant(x[rows])[tf.newaxis] for x in (X, EXPERT, kept, GATE)]
    specs = [tf.TensorSpec([1, None, x.shape[2]], x.dtype) for x in given]
    search = tf.function(functools.partial(_feed_forward, weights), specs, autograph=False)
    with use_mesh(single_device()), kernels.using(tensorflow):
        y = search(*given)
        np.testing.assert_allclose(_feed_forward(weights, *given), y, rtol=1e-5, atol=1e-5)
    return y[0].numpy()


def _feed_forward(weights, x, expert, kept, gate):
    routing = Routing(expert, gate * kept, None, kept, E, None, tf.constant(0.0), NestedMap())
    sizes = {"model_dim": M, "hidden_dim": H, "num_experts": E}
    experts = Experts.Params().Set(name="experts", **sizes).Instantiate()
    dispatcher = DroplessDispatcher.Params().Set(name="dispatcher").Instantiate()
    y = experts.GroupedFProp(weights, dispatcher.Dispatch(routing, x))
    return dispatcher.Combine(routing, y)


def test_each_token_has_the_sum_of_its_experts():
    kept = np.ones((N, K), np.float32)
    kept[3], kept[9, 0] = 0, 0
    hidden = np.maximum(np.einsum("nm,nkmh->nkh", X, WI[EXPERT]), 0)
    want = np.einsum("nkh,nkhm,nk->nm", hidden, WO[EXPERT], GATE * kept)
    np.testing.assert_allclose(_run(range(N), kept), want, rtol=1e-3, atol=1e-3)


def test_a_token_is_bit_identical_whatever_is_beside_it():
    together = _run(range(N))
    for rows in ([10], [0], [8, 9], [7, 10, 11], [11, 3, 0, 1, 2]):
        assert_rows_equal(_run(rows), together[rows])


def test_experts_that_nobody_chose_are_not_read():
    wi = WI.copy()
    wi[4] = np.nan
    np.testing.assert_array_equal(_run(range(N), wi=wi), _run(range(N)))
    assert _run([]).shape == (0, M)


@pytest.mark.parametrize(
    ("kind", "shared", "biases"),
    [("float32", 0, False), ("float32", 2, True), ("int8", 2, False), ("int8", 0, True)],
)
def test_the_layer_is_the_layer(kind, shared, biases):
    p = MoELayer.Params().Set(name="moe", model_dim=M, hidden_dim=H, num_experts=E)
    p.experts.Set(activation="geglu", biases=biases)
    router = TopKRouter.Params().Set(k=2, gate="sigmoid")
    layer = p.Set(router=router, num_shared_experts=shared).Instantiate()
    x, paddings = tf.constant(X.reshape(2, 6, M)), tf.constant([[0.0] * 6, [0.0] * 4 + [1.0] * 2])
    with use_mesh(single_device()), kernels.using(tensorflow):
        theta = layer.InitTheta(make_seed(1, 0))
        for name in [name for name in theta.experts if name.endswith("_bias")]:
            theta.experts[name] = tf.constant(
                DRAW.normal(size=theta.experts[name].shape), tf.float32
            )
        want, _ = layer.FProp(theta, x, paddings)
        got, extras = layer.FProp(layer.PackWeights(theta, PackAs(kind)), x, paddings)
    np.testing.assert_allclose(got, want, atol=1e-5 if kind == "float32" else 0.1)
    assert np.abs(want).max() > 0.3 and not extras
    assert shared or not np.asarray(got)[1, 4:].any()


@pytest.mark.parametrize("most", [E, E - 1])
def test_many_experts_of_8_bits_stay_as_they_are(most, monkeypatch):
    monkeypatch.setattr("lingvo_moe.core.kernels.packed_weights._MOST_OPERATIONS", most)
    layer = (
        MoELayer.Params().Set(name="moe", model_dim=M, hidden_dim=H, num_experts=E).Instantiate()
    )
    weights = layer.PackWeights(layer.InitTheta(make_seed(0, 0)), PackAs("int8"))
    assert isinstance(weights.experts.wi, list) == (most == E)
