"""The index dispatcher over eight devices: the einsum dispatcher's numbers and communication."""

import re

import numpy as np
import pytest
import tensorflow as tf
import toy_moe
from equivalence import assert_same
from rows import bound
from toy_moe import MESH, B, E, M, T, assert_close, differentiated, eagerly

from lingvo_moe.core.config import registry
from lingvo_moe.core.engine.collectives import parse_collectives
from lingvo_moe.core.engine.eager.testing import run_sharded
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.moe.layer import MoELayer
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.randomness import make_seed
from lingvo_moe.core.sharding import Mesh, ShardingError, dims_mapping, single_device, use_mesh
from lingvo_moe.tasks.mt.model import MtModel


def _side(seed: int) -> NestedMap:
    """Eight rows of a packed batch: two sentences and some padding."""
    ids = np.random.default_rng(seed).integers(4, 40, (8, 24)).astype(np.int32)
    segments = np.repeat([1, 2, 0], [14, 6, 4]).astype(np.int32) * np.ones((8, 1), np.int32)
    positions = np.concatenate([np.arange(14), np.arange(6), np.zeros(4)]).astype(np.int32)
    positions = positions * np.ones((8, 1), np.int32)
    return NestedMap(ids=ids * (segments > 0), segment_ids=segments, segment_pos=positions)


BATCH = NestedMap(src=_side(1), tgt=_side(2))
BATCH.tgt.labels = _side(3).ids


def _forward(layer: MoELayer):
    return lambda theta, x, paddings, seed: layer.FProp(theta, x, paddings, seed=seed)[0]


@pytest.mark.parametrize(
    "params",
    [
        pytest.param({}, id="overflow"),
        pytest.param(
            {"num_groups": 16, "num_experts": 8, "capacity_factor": 0.25},
            id="two groups a device, most tokens dropped",
        ),
        pytest.param({"num_groups": 16, "capacity_factor": 16.0}, id="room for all"),
    ],
)
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
    """The same operations with the same bytes, but no mask [G,S,E,C]."""
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


def test_inference_over_devices():
    layer, einsum = (
        toy_moe.layer(dispatcher=d, inference_dispatcher=d) for d in ("index", "einsum")
    )
    args, splits = toy_moe.arguments(layer)

    def infer(layer):
        return lambda theta, x, paddings: layer.FProp(theta, x, paddings)[0]

    got, collectives = run_sharded(infer(layer), args[:3], MESH, splits[:3])
    np.testing.assert_allclose(got, eagerly(infer(einsum), args[:3]), rtol=1e-5, atol=1e-6)
    assert dict(collectives) == {"all-to-all": 2}


def test_a_model_dimension_that_is_cut_too():
    """On a mesh of two axes the gather works on shards of M, and the gates' gradient is a sum over them."""
    split = {"B": "data", "G": "data", "E": "data", "M": "model"}
    layer, einsum = (
        toy_moe.layer(dispatcher=d, activation_split=split, weight_split={})
        for d in ("index", "einsum")
    )
    args, _ = toy_moe.arguments(layer)
    want = eagerly(differentiated(einsum), args)
    got, _ = run_sharded(differentiated(layer), args, Mesh.parse("data:4,model:2"))
    assert_close(got, want, 1e-4)


def test_bfloat16():
    layer, einsum = (
        toy_moe.layer(dispatcher=d, fprop_dtype="bfloat16") for d in ("index", "einsum")
    )
    args, splits = toy_moe.arguments(layer)
    want = eagerly(differentiated(einsum), args)
    got, _ = run_sharded(differentiated(layer), args, MESH, splits)
    assert got.y.dtype == want.y.dtype
    for (path, a), b in zip(got.FlattenItems(), want.Flatten(), strict=True):
        a, b = np.float32(a), np.float32(b)
        scale = max(float(np.abs(b).max()), 1e-3)
        # Elsewhere a hidden unit near relu's corner may lie on either side of it: single numbers differ.
        error = np.quantile(np.abs(a - b), bound(1.0, 0.99))
        assert error <= 0.02 * scale, path


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


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"num_groups": 12}, r"12 elements, not a multiple of the 8 partitions of axis 'expert'"),
        ({"activation_split": {"S": "expert"}}, "shards S along 'expert', .* dispatcher='einsum'"),
    ],
)
def test_what_cannot_be_cut_raises(params, message):
    layer = toy_moe.layer(dispatcher="index", **params)
    args, _ = toy_moe.arguments(layer)
    with pytest.raises(ShardingError, match=message):
        run_sharded(_forward(layer), args, MESH)


KEPT = ["dispatched", "returned", "hidden", "experts_hidden"]


def _model(**changes) -> MtModel:
    """A translation model in loops over two blocks each, with random routing."""
    sizes = {"source_vocab_size": 50, "target_vocab_size": 50}
    changes = sizes | {"num_encoder_layers": 4, "num_decoder_layers": 4, "repeat": True} | changes
    override = ";".join(f"task.{name}={value}" for name, value in changes.items())
    return registry.GetParams("mt.M4Tiny", override).task.Instantiate()


def _loss_and_gradients(task: MtModel):
    def loss_and_gradients(theta, batch):
        weights = theta.Flatten()
        with tf.GradientTape() as tape:
            tape.watch(weights)
            loss, _ = task.FProp(theta, batch, seed=make_seed(5, 7))
        return NestedMap(loss=loss, grads=theta.Pack(tape.gradient(loss, weights)))

    return loss_and_gradients


@pytest.mark.slow
def test_a_model_in_loops_has_the_same_loss_and_gradients_whatever_it_keeps():
    """Regions in the bodies of loops, forward, recomputed and backward; what remat names is neither sent nor
    computed again."""
    einsum = _model(**{"moe.dispatcher": "einsum"})
    theta = eagerly(lambda: einsum.InitTheta(make_seed(1, 0)), [])
    want = eagerly(_loss_and_gradients(einsum), [theta, BATCH])
    found = []
    for remat in ("full", KEPT):
        task = _model(**{"moe.dispatcher": "index", "remat": remat})
        rows = BATCH.Transform(
            lambda x, task=task: TensorSpec(
                x.shape, "int32", dims_mapping("BT", task.p.activation_split)
            )
        )
        splits = [task.VariableSpecs(), rows]
        got, collectives = run_sharded(_loss_and_gradients(task), [theta, BATCH], MESH, splits)
        assert_same(got, want, tol=1e-4, floor=1e-3)
        assert set(collectives) == {"all-to-all", "all-reduce"}
        found.append(collectives)
    full, kept = found
    # In the encoder's loop and in the decoder's: there and back, forward, recomputed and backward.
    assert full["all-to-all"] == 2 * 6
    assert kept["all-to-all"] == 2 * 4
    # Of each block, the first product of the dense layer and both of the experts.
    assert full.hlo.count(" dot(") - kept.hlo.count(" dot(") == 2 * 3


def test_flops_count_no_product_for_dispatch():
    shapes = ((B, T, M), (B, T))
    index, einsum = (
        MoELayer.FPropMeta(toy_moe.layer(dispatcher=d).params, *shapes).flops
        for d in ("index", "einsum")
    )
    groups, size, capacity = 8, B * T // 8, 2
    assert einsum - index == 2 * 2 * groups * size * E * capacity * M
