"""Inference: no randomness, no capacity, no expert computed for tokens that did not choose it; custom experts.

Letters: B batch, T time, E expert, M model, H hidden.
"""

import numpy as np
import pytest
import tensorflow as tf
import toy_moe
from equivalence import compare
from router_testing import route_logits
from rows import assert_rows_equal

from lingvo_moe.core import kernels
from lingvo_moe.core.kernels import tensorflow
from lingvo_moe.core.kernels.packed_weights import PackAs
from lingvo_moe.core.kernels.weights import FEWEST_ROWS
from lingvo_moe.core.moe.experts import BaseExperts, Experts
from lingvo_moe.core.moe.layer import MoELayer
from lingvo_moe.core.moe.routers.base import LearnedRouter
from lingvo_moe.core.moe.routers.top2 import Top2Router
from lingvo_moe.core.moe.routers.top_k import TopKRouter
from lingvo_moe.core.randomness import make_seed
from lingvo_moe.core.sharding import single_device, use_mesh

B, T, E, M, H = 2, 5, 8, 8, 16


def _params(router):
    return MoELayer.Params().Set(
        name="moe", model_dim=M, hidden_dim=H, num_experts=E, router=router
    )


def _tokens(*shape: int) -> tf.Tensor:
    return tf.constant(np.random.default_rng(0).normal(size=shape), tf.float32)


@pytest.fixture
def routed(monkeypatch) -> list:
    """Records the decisions of routers from here on."""
    decisions = []
    route = LearnedRouter.FProp

    def spy(self, *args, **kwargs):
        decisions.append(route(self, *args, **kwargs))
        return decisions[-1]

    monkeypatch.setattr(LearnedRouter, "FProp", spy)
    return decisions


@pytest.mark.parametrize("xla", [True, False], ids=["xla", "plain"])
def test_a_token_s_result_is_its_own_to_the_bit(xla):
    """A token's result is bit-identical whatever else is in the batch and however it is spread over experts."""
    layer = _params(TopKRouter.Params().Set(k=2)).Instantiate()
    with use_mesh(single_device()):
        theta = layer.InitTheta(make_seed(1, 0))

    @tf.function(jit_compile=xla, autograph=False)
    def infer(x):
        with use_mesh(single_device()):
            return layer.FProp(theta, x, tf.zeros(x.shape[:2]))[0]

    x = _tokens(4, 16, M)
    want = infer(x)
    same = tf.tile(x[:1, :1], [4, 16, 1])  # all at the same experts
    for others in (same, -x, tf.reverse(x, [0, 1]), 3.0 * x):
        for b, t in [(0, 0), (2, 7)]:
            here = tf.constant(np.arange(64).reshape(4, 16, 1) == 16 * b + t)
            assert_rows_equal(infer(tf.where(here, x, others))[b, t], want[b, t])


def test_an_expert_that_no_token_chose_is_not_computed(routed):
    layer = _params(Top2Router.Params()).Instantiate()
    x = _tokens(1, 2, M)
    with use_mesh(single_device()):
        theta = layer.InitTheta(make_seed(1, 0))
        want, _ = layer.FProp(theta, x, tf.zeros([1, 2]))
        chosen = tf.reduce_sum(tf.one_hot(routed[-1].expert_index, E), [0, 1, 2])
        unused = chosen[:, None, None] == 0
        assert 4 <= np.sum(unused) < E
        for name in ("wi", "wo"):  # what is computed with these shows
            theta.experts[name] = tf.where(unused, np.nan, theta.experts[name])
        got, extras = layer.FProp(theta, x, tf.zeros([1, 2]))
    np.testing.assert_array_equal(got, want)
    assert float(extras.metrics.effective_capacity) == 2  # rows a token, not E


def test_an_expert_has_more_rows_than_choices_over_packed_weights_alone(monkeypatch):
    given, fprop = [], Experts.GroupedFProp
    monkeypatch.setattr(
        Experts, "GroupedFProp", lambda *a, **b: given.append(a[2]) or fprop(*a, **b)
    )
    layer, x = _params(Top2Router.Params()).Instantiate(), _tokens(1, 2, M)
    with use_mesh(single_device()), kernels.using(tensorflow):
        theta = layer.InitTheta(make_seed(1, 0))
        want, _ = layer.FProp(theta, x, tf.zeros([1, 2]))
        weights = layer.PackWeights(theta, PackAs("float32"))
        got, _ = layer.FProp(weights, x, tf.zeros([1, 2]))
    plain, packed = (rows.group_sizes[0].numpy() for rows in given)
    assert plain.sum() == given[0].values.shape[1] == 4  # two choices of two tokens
    fewest = 1 if weights.experts.wo.rows_alike else FEWEST_ROWS
    np.testing.assert_array_equal(packed, np.where(plain, fewest, 0))
    np.testing.assert_allclose(got, want, atol=1e-5)


class SlotExperts(BaseExperts):
    def FProp(self, theta, x_EGCM, seed=None):
        return x_EGCM * tf.range(1.0, E + 1)[:, None, None, None]


def test_experts_for_slots_alone_use_the_training_dispatcher_in_inference():
    layer = (
        _params(TopKRouter.Params().Set(k=1))
        .Set(experts=SlotExperts.Params(), dispatcher="index")
        .Instantiate()
    )
    x = _tokens(B, T, M)
    with use_mesh(single_device()):
        theta = layer.InitTheta(make_seed(1, 0))
        y, _ = layer.FProp(theta, x, tf.zeros([B, T]))
    gates = tf.nn.softmax(x @ theta.router.wg).numpy()
    factor = gates.max(-1) * (np.argmax(gates, -1) + 1.0)
    np.testing.assert_allclose(y, factor[..., None] * x, rtol=1e-4)


@pytest.mark.parametrize(("k", "gate"), [(1, "softmax"), (2, "softmax"), (2, "sigmoid")])
def test_gates_are_the_same_to_the_bit_for_any_number_of_tokens(k, gate):
    """TensorFlow's own kernels compute most functions 16 numbers at a time and round the remainder differently."""
    p = TopKRouter.Params().Set(name="r", model_dim=M, num_experts=5, k=k, gate=gate)
    router = p.Instantiate()
    logits = 3 * _tokens(1, 40, 5)
    with kernels.using(tensorflow):
        together = route_logits(router, logits).gate.numpy()
        for n in (1, 2, 3, 5, 7, 13, 16, 17, 31, 39):
            some = route_logits(router, logits[:, :n]).gate.numpy()
            assert_rows_equal(some, together[:, :n])


def test_over_devices():
    layer = toy_moe.layer()
    args, splits = toy_moe.arguments(layer)
    _, collectives = compare(lambda *a: layer.FProp(*a)[0], args[:3], splits[:3])
    # Rows there and back, and their numbers there.
    assert dict(collectives) == {"all-to-all": 3}
