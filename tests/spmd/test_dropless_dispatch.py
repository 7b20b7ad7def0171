"""Dispatchers without capacity slots over eight devices: the numbers of one device, and the collectives.

Letters: B batch, T time, G group, S token in group, k choice rank, E expert, M model.
"""

import functools
import math

import numpy as np
import pytest
import tensorflow as tf
import toy_moe
from refusals import refuses
from toy_moe import MESH, B, E, M, T, assert_close, eagerly

from lingvo_moe.analysis.programs.hlo.collective_list import parse_collectives
from lingvo_moe.core.engine.eager.testing import run_sharded
from lingvo_moe.core.moe.dispatch_dropless import DroplessDispatcher, _Layout
from lingvo_moe.core.moe.layer import MoELayer
from lingvo_moe.core.moe.routers.top_k import TopKRouter
from lingvo_moe.core.sharding import Mesh, ShardingError, single_device, use_mesh

ROOMY = {"capacity_factor": 15.0}  # 23 slots for 24 tokens: with padding nothing overflows
TOKENS = B * T // 8  # of a device


def _layer(dispatcher, k: int = 2, **params) -> MoELayer:
    router = TopKRouter.Params().Set(k=k)
    return toy_moe.layer(dispatcher=dispatcher, router=router, **params)


_train = functools.partial(toy_moe.differentiated, metrics=False)  # those of slots differ


def _sent(hlo: str) -> list[tuple[str, int]]:
    """Kinds and bytes of all collectives except sums."""
    found = [(c.kind, c.num_bytes) for c in parse_collectives(hlo) if c.kind != "all-reduce"]
    return sorted(found)


def test_dropless_equals_the_einsum_dispatcher():
    """Values and gradients are equal; all-to-alls carry only rows and their numbers."""
    layer, einsum = _layer("dropless", E), _layer("einsum", E, **ROOMY)
    args, splits = toy_moe.arguments(layer)
    want = eagerly(_train(einsum), args)
    got, collectives = run_sharded(_train(layer), args, MESH, splits)
    assert_close(got, want)
    assert set(collectives) <= {"all-to-all", "all-reduce"}
    # To each of 8 devices, 2 experts each: there and back, forward and backward; and once int32 [8,2].
    rows = 8 * TOKENS * 2 * M * 4
    assert _sent(collectives.hlo) == [("all-to-all", 8 * 2 * 4)] + [("all-to-all", rows)] * 4


def test_dropout_in_the_experts_is_drawn_by_choice_not_by_device():
    """Equal on one device and on eight, where rows are at other positions."""
    layer = _layer("dropless", **{"experts.relu_dropout_prob": 0.5})
    args, splits = toy_moe.arguments(layer)

    def forward(theta, x, paddings, seed):
        return layer.FProp(theta, x, paddings, seed=seed)[0]

    want = eagerly(forward, args)
    got, collectives = run_sharded(forward, args, MESH, splits)
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert set(collectives) == {"all-to-all"}
    plain = _layer("dropless")
    got, collectives = run_sharded(lambda *a: plain.FProp(*a[:3], seed=a[3])[0], args, MESH, splits)
    assert np.abs(got - want).max() > 0.1
    rows = 8 * TOKENS * 2 * M * 4
    assert _sent(collectives.hlo) == [("all-to-all", 8 * 2 * 4)] + [("all-to-all", rows)] * 2


@pytest.mark.parametrize(("mesh", "split"), [
    pytest.param("data:2,expert:4", {"B": ("data", "expert"), "G": ("data", "expert"), "E": "expert"},
        id="experts on one axis of two"),
    pytest.param("data:4,model:2", {"B": "data", "G": "data", "E": "data", "M": "model", "H": "model"},
        id="M and H cut too"),
    pytest.param("expert:8", {"B": "expert", "G": "expert"}, id="experts not cut"),
])  # fmt: skip
def test_other_meshes(mesh, split):
    weight_split = {letter: split[letter] for letter in "EH" if letter in split}
    dropless, einsum = (
        _layer(d, activation_split=split, weight_split=weight_split, **ROOMY)
        for d in ("dropless", "einsum")
    )
    args, _ = toy_moe.arguments(dropless)
    want = eagerly(_train(einsum), args)
    got, _ = run_sharded(_train(dropless), args, Mesh.parse(mesh))
    assert_close(got, want)


def test_bounded_room_drops_what_does_not_fit_and_says_so():
    """The buffer of a device has the mean number of rows times a factor; rows are ordered by expert and token."""
    factor = 1.25
    bounded = DroplessDispatcher.Params().Set(device_capacity_factor=factor)
    layer, free = _layer(bounded), _layer("dropless")
    args, splits = toy_moe.arguments(layer)
    theta, x, paddings, seed = args

    def forward(theta, x, paddings, seed):
        y, extras = layer.FProp(theta, x, paddings, seed=seed)
        return y, extras.metrics.over_device_capacity_ratio

    (y, ratio), collectives = run_sharded(forward, args, MESH, splits)
    room = math.ceil(factor * TOKENS * 2 / 8)
    assert _sent(collectives.hlo)[-1] == ("all-to-all", 8 * room * M * 4)

    tokens = x.reshape(8, TOKENS, M)
    with use_mesh(single_device()):
        routing = free.router.FProp(
            theta.router, tokens, tf.reshape(paddings, [8, TOKENS]), None, seed=tf.constant(seed)
        )
    index, gate, kept = (t.numpy() for t in (routing.expert_index, routing.gate, routing.kept))
    wi, wo = theta.experts.wi.numpy(), theta.experts.wo.numpy()
    want, dropped = np.zeros((8, TOKENS, M), np.float32), 0
    for device in range(8):
        taken = np.zeros(8, int)  # of the buffers of the eight devices
        for e in range(E):
            for s, r in np.ndindex(TOKENS, 2):
                if not kept[device, s, r] or index[device, s, r] != e:
                    continue
                taken[e // 2] += 1
                if taken[e // 2] > room:
                    dropped += 1
                    continue
                hidden = np.maximum(tokens[device, s] @ wi[e], 0)
                want[device, s] += gate[device, s, r] * (hidden @ wo[e])
    assert dropped > 3
    np.testing.assert_allclose(y, want.reshape(B, T, M), atol=1e-5)
    np.testing.assert_allclose(ratio, dropped / kept.sum(), rtol=1e-6)


@pytest.mark.parametrize(("devices", "k", "factor"), [(8, 2, 1.0), (4, 3, 0.25), (2, 2, 0.25)])
def test_inference_in_rounds_drops_nothing(devices, k, factor):
    """Half of the rows are copies of one token, so that its experts' devices get more than one round has room for."""
    layer, free = (_layer("einsum", k, exchange_factor=f) for f in (factor, 0.0))
    args, splits = toy_moe.arguments(layer)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(B, 64, M)).astype(np.float32)
    x[: B // 2] = x[0, 0]
    args = [args[0], x, (rng.random((B, 64)) < 0.2).astype(np.float32)]
    tokens = B * 64 // devices
    room = _Layout("expert", "expert", None, devices, devices, E // devices).room(
        tokens * k, factor
    )
    with use_mesh(single_device()):
        routing = layer.router.FProp(args[0].router, tf.constant(x), tf.constant(args[2]), None)
    owner = tf.reshape(routing.expert_index // (E // devices), [devices, -1])
    kept = tf.reshape(routing.kept, [devices, -1, 1])
    rows = tf.reduce_max(tf.reduce_sum(tf.one_hot(owner, devices) * kept, 1))
    assert rows > room

    def infer(theta, x, paddings):
        return layer.FProp(theta, x, paddings)[0]

    mesh = Mesh(("expert",), (devices,))
    got, collectives = run_sharded(infer, args, mesh, splits[:3])
    np.testing.assert_allclose(got, eagerly(lambda *a: free.FProp(*a)[0], args), atol=1e-5)
    assert (
        _sent(collectives.hlo)
        == [("all-to-all", E * 4)] + [("all-to-all", devices * room * M * 4)] * 2
    )
    sums = [c.num_bytes for c in parse_collectives(collectives.hlo) if c.kind == "all-reduce"]
    assert sums == [4]  # the most rows from any device to another


def test_little_room_is_seldom_too_little():
    """A second round has 1 exchange in 100 at most, if experts are chosen as often as the factor says."""
    rng = np.random.default_rng(0)
    for devices, choices, factor in [(8, 256, 1.0), (8, 64, 2.0), (64, 32, 2.0), (256, 1024, 1.0)]:
        layout = _Layout("expert", "expert", None, devices, devices, 1)
        room = layout.room(choices, factor)
        rows = rng.binomial(choices, factor / devices, (200, devices * devices)).max(1)
        assert np.mean(rows > room) <= 0.01 and room < 2 * np.median(rows)


def test_masked_over_devices():
    """Every expert gets all tokens: E S slots a group, there and back."""
    layer, einsum = _layer("masked", **ROOMY), _layer("einsum", **ROOMY)
    args, splits = toy_moe.arguments(layer)
    want = eagerly(_train(einsum), args)
    got, collectives = run_sharded(_train(layer), args, MESH, splits)
    assert_close(got, want)
    assert _sent(collectives.hlo) == [("all-to-all", E * TOKENS * M * 4)] * 4


@refuses(ShardingError,
    ({"num_experts": 12}, "12 experts do not divide evenly over the 8 devices"),
    ({"activation_split": {"B": "expert", "E": "expert"}}, "have to be the last of the axes of the tokens"),
    ({"activation_split": {"S": "expert"}}, "shards S along 'expert'"),
)  # fmt: skip
def test_what_cannot_be_cut_raises(params):
    layer = _layer("dropless", weight_split={}, **params)
    args, _ = toy_moe.arguments(layer)
    run_sharded(lambda *a: layer.FProp(*a[:3], seed=a[3])[0], args, MESH)


def test_inference_on_tokens_that_cannot_be_cut_says_what_can_cut_them():
    """A decoding step of 12 rows on 8 devices; the einsum dispatcher accepts it, since XLA pads."""
    layer, einsum = _layer("einsum"), _layer("einsum", inference_dispatcher="einsum")
    (theta, x, paddings, _), _ = toy_moe.arguments(layer)
    args = [theta, x[:12, :1], paddings[:12, :1]]
    with pytest.raises(ShardingError, match=r"12 tokens.*inference_dispatcher='einsum'"):
        run_sharded(lambda *a: layer.FProp(*a)[0], args, MESH)
    got, _ = run_sharded(lambda *a: einsum.FProp(*a)[0], args, MESH)
    np.testing.assert_allclose(got, eagerly(lambda *a: layer.FProp(*a)[0], args), atol=1e-5)
