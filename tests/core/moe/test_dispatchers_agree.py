"""The layer computes the same with every dispatcher: values, losses, and all gradients.

Letters: B batch, T time, E expert, M model, H hidden.
"""

import numpy as np
import pytest
import tensorflow as tf
import toy_moe
from equivalence import assert_same, with_gradients

from lingvo_moe.core.engine.eager.testing import run_single
from lingvo_moe.core.moe.layer import DISPATCHERS, MoELayer
from lingvo_moe.core.moe.routers.expert_choice import ExpertChoiceRouter
from lingvo_moe.core.moe.routers.soft import SoftRouter
from lingvo_moe.core.moe.routers.top2 import Top2Router
from lingvo_moe.core.moe.routers.top_k import TopKRouter
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.randomness import make_seed
from lingvo_moe.core.sharding import single_device, use_mesh

B, T, E, M, H = 2, 12, 4, 6, 8
SEED = np.array([3, 4], np.int32)


def _layer(dispatcher: str, **params) -> MoELayer:
    sizes = {"model_dim": M, "hidden_dim": H, "num_experts": E, "num_groups": 0}
    both = {"dispatcher": dispatcher, "inference_dispatcher": dispatcher}
    # 11 slots: with padding room for all, but fewer than T
    return toy_moe.layer(**{**sizes, **both, "capacity_factor": 3.6, **params})


def _arguments(layer: MoELayer) -> list:
    with use_mesh(single_device()):
        theta = layer.InitTheta(make_seed(1, 0))
    rng = np.random.default_rng(0)
    paddings = np.zeros((B, T), np.float32)
    paddings[0, 9:] = paddings[1, :2] = 1
    return [theta, rng.normal(size=(B, T, M)).astype(np.float32), paddings]


def _train(layer: MoELayer):
    """Returns results and the gradients by theta, tokens and paddings."""

    def train(theta, x, paddings):
        def loss(theta, x):
            y, extras = layer.FProp(theta, x, paddings, seed=tf.constant(SEED))
            loss = tf.reduce_sum(tf.cast(y, x.dtype) * tf.sin(x)) + extras.aux_loss
            return loss, NestedMap(y=y, aux_loss=extras.aux_loss)

        return with_gradients(loss)(theta, x)

    return train


def _eagerly(layer: MoELayer, args: list) -> NestedMap:
    return toy_moe.eagerly(_train(layer), args)


def _compare(got: NestedMap, want: NestedMap, values: float = 1e-5, gradients: float = 1e-4):
    assert_same(got.rest, want.rest, values, floor=1e-3)
    assert_same(got.grads, want.grads, gradients, floor=1e-3)


def _routers() -> list:
    ids = {
        "by chance": Top2Router.Params(),
        "k=1": TopKRouter.Params().Set(k=1),
        "k=E": TopKRouter.Params().Set(k=E),
        "soft": SoftRouter.Params(),
    }
    return [pytest.param(p, id=name) for name, p in ids.items()]


@pytest.mark.parametrize("router", _routers())
def test_where_nothing_overflows_all_agree(router):
    """Values agree to 1e-5, gradients of tokens, gating weights and experts to 1e-4."""
    args = _arguments(_layer("einsum", router=router))
    want = _eagerly(_layer("einsum", router=router), args)
    assert all(np.abs(gradient).max() > 1e-4 for gradient in want.grads)
    assert np.abs(want.rest.y).max() > 1e-2
    for name in sorted(DISPATCHERS.keys() - {"einsum"}):
        _compare(_eagerly(_layer(name, router=router), args), want)


@pytest.mark.parametrize(
    ("name", "xla"), [*((name, False) for name in sorted(DISPATCHERS)), ("dropless", True)]
)
def test_compiled_or_not(name, xla):
    """A tf.function has its graph rewritten by an optimizer; XLA computes rows in tiles.

    One device need not have the axes of the layer's split maps.
    """
    split = {"activation_split": {"G": "data", "E": "data", "M": "model"}}
    router = TopKRouter.Params().Set(k=2)
    args = _arguments(_layer("masked", router=router))
    want = _eagerly(_layer("masked", router=router), args)
    layer = _layer(name, router=router, **split)
    _compare(run_single(_train(layer), args, jit_compile=xla), want)


@pytest.mark.parametrize("router", [
    pytest.param(TopKRouter.Params().Set(k=2), id="k=2"),
    pytest.param(ExpertChoiceRouter.Params(), id="experts choose"),
])  # fmt: skip
def test_with_overflow_those_with_capacity_agree(router):
    """All dispatchers agree for expert choice: its capacity determines the choice and drops nothing."""
    params = {"router": router, "capacity_factor": 1.0}
    args = _arguments(_layer("einsum", **params))
    want = _eagerly(_layer("einsum", **params), args)
    names = ["index", "masked"] + ["dropless"] * (router.cls is ExpertChoiceRouter)
    for name in names:
        _compare(_eagerly(_layer(name, **params), args), want)


def test_bfloat16():
    router = TopKRouter.Params().Set(k=2)
    args = _arguments(_layer("einsum", router=router))
    want = _eagerly(_layer("einsum", router=router), args)
    for name in DISPATCHERS:
        layer = _layer(name, router=router, fprop_dtype="bfloat16")
        got = _eagerly(layer, args)
        assert got.rest.y.dtype == tf.bfloat16
        _compare(got, want, values=0.03, gradients=0.06)


def test_flops_count_the_rows_that_experts_compute():
    """24 tokens in groups of 12, 2 choices and 4 experts make E C = 28 slots a group."""
    flops, needed = {}, set()
    for name in DISPATCHERS:
        p = _layer(name, router=TopKRouter.Params().Set(k=2), capacity_factor=7 * 4 / 12).p
        meta = MoELayer.FPropMeta(p, (B, T, M))
        flops[name] = meta.flops
        needed.add(meta.flops - meta.dispatch)
    gating, row = 2 * B * T * M * E, 4 * M * H
    assert needed == {flops["dropless"]} == {gating + B * T * 2 * row}
    assert flops["index"] == gating + B * E * 7 * row
    assert flops["einsum"] == flops["index"] + 2 * (2 * B * T * E * 7 * M)
    assert flops["masked"] == gating + B * E * T * row + 2 * (2 * B * T * E * M)
