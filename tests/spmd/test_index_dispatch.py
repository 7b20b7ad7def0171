"""The index dispatcher over eight devices: the einsum dispatcher's numbers and communication."""

import re

import numpy as np
import pytest
import tensorflow as tf
import toy_moe
from refusals import refuses
from toy_moe import MESH, B, E, M, T, assert_close, differentiated, eagerly

from lingvo_moe.analysis.programs.hlo.collective_list import parse_collectives
from lingvo_moe.core.engine.eager.testing import run_sharded
from lingvo_moe.core.moe.layer import MoELayer
from lingvo_moe.core.sharding import Mesh, ShardingError, single_device, use_mesh


def _forward(layer: MoELayer):
    return lambda theta, x, paddings, seed: layer.FProp(theta, x, paddings, seed=seed)[0]


@pytest.mark.parametrize("params", [
    pytest.param({}, id="overflow"),
    pytest.param({"num_groups": 16, "num_experts": 8, "capacity_factor": 0.25},
        id="two groups a device, most tokens dropped"),
])  # fmt: skip
def test_equals_the_einsum_dispatcher(params):
    """Values and gradients (tokens, experts and gating weights) on one device and on eight."""
    layer, einsum = (
        toy_moe.layer(dispatcher="index", **params),
        toy_moe.layer(dispatcher="einsum", **params),
    )
    args, splits = toy_moe.arguments(layer)
    want = eagerly(differentiated(einsum), args)
    got, collectives = run_sharded(differentiated(layer), args, MESH, splits)
    for result in (eagerly(differentiated(layer), args), got):
        assert_close(result, want)
    assert np.abs(want.grads.router.wg).max() > 1e-3
    # Slots go to the experts and back, and so do their gradients, and nothing else but sums: of the
    # loss, the metrics and the gating weights' gradient.
    sent = [c for c in parse_collectives(collectives.hlo) if c.kind != "all-reduce"]
    slots = 4 * M * _num_slots(layer) // 8
    assert [(c.kind, c.num_bytes) for c in sent] == [("all-to-all", slots)] * 4


def _num_slots(layer: MoELayer) -> int:
    """E G C, the number of all slots."""
    p = layer.p
    size = B * T // p.num_groups
    capacity = min(max(-int(-p.capacity_factor * size // p.num_experts), 1), size)
    return p.num_experts * p.num_groups * capacity


def test_the_communication_is_that_of_the_einsums():
    """Operations and bytes are the same, but there is no mask [G,S,E,C]."""
    found = {}
    for dispatcher in ("einsum", "index"):
        layer = toy_moe.layer(dispatcher=dispatcher)
        args, splits = toy_moe.arguments(layer)
        hlo = run_sharded(_forward(layer), args, MESH, splits)[1].hlo
        found[dispatcher] = [(c.kind, c.num_bytes) for c in parse_collectives(hlo)], hlo
    capacity, size = 2, B * T // 8  # ceil(24 / 16)
    assert found["index"][0] == found["einsum"][0] == [("all-to-all", 4 * E * capacity * M)] * 2
    mask = re.compile(rf"f32\[1,{size},({E},{capacity}|{E * capacity})\]")
    assert mask.search(found["einsum"][1]), "the einsum dispatcher's mask is looked for in vain"
    assert not mask.search(found["index"][1])


def test_a_model_dimension_that_is_cut_too():
    """The gather works on shards of M over a mesh of two axes; the gates' gradient is a sum over them."""
    split = {"B": "data", "G": "data", "E": "data", "M": "model"}
    layer, einsum = (
        toy_moe.layer(dispatcher=d, activation_split=split, weight_split={})
        for d in ("index", "einsum")
    )
    args, _ = toy_moe.arguments(layer)
    want = eagerly(differentiated(einsum), args)
    got, _ = run_sharded(differentiated(layer), args, Mesh.parse("data:4,model:2"))
    assert_close(got, want, 1e-4)


def test_an_open_batch_when_served():
    layer, einsum = (
        toy_moe.layer(dispatcher=d, inference_dispatcher=d) for d in ("index", "einsum")
    )
    (theta, x, paddings, _), _ = toy_moe.arguments(layer)
    signature = [tf.TensorSpec([None, None, M]), tf.TensorSpec([None, None])]

    @tf.function(input_signature=signature, autograph=False)
    def serve(x, paddings):
        with use_mesh(single_device()):
            return layer.FProp(theta, x, paddings)[0]

    for batch, time in [(3, 5), (1, 1)]:
        x_BTM, paddings_BT = x[:batch, :time], paddings[:batch, :time]
        with use_mesh(single_device()):
            want = einsum.FProp(theta, tf.constant(x_BTM), tf.constant(paddings_BT))[0]
        np.testing.assert_allclose(serve(x_BTM, paddings_BT), want, rtol=1e-5, atol=1e-6)


@refuses(
    ShardingError,
    ({"num_groups": 12}, r"12 elements, not a multiple of the 8 partitions of axis 'expert'"),
    ({"activation_split": {"S": "expert"}}, "shards S along 'expert', .* dispatcher='einsum'"),
)
def test_what_cannot_be_cut_raises(params):
    layer = toy_moe.layer(dispatcher="index", **params)
    args, _ = toy_moe.arguments(layer)
    run_sharded(_forward(layer), args, MESH)
