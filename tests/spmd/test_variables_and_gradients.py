"""Shardings of variables and of gradients, copies of parts (subgroups), and arrays between two meshes."""

import re

import jax
import numpy as np
import pytest
import tensorflow as tf
from spmd_case import assert_close, devices_of, floats

from lingvo_moe import xla_sharding as xs
from lingvo_moe.core.engine.eager.testing import run_sharded, run_single
from lingvo_moe.core.engine.lowering.lowering import lower
from lingvo_moe.core.engine.lowering.specs import AUTO, TensorSpec
from lingvo_moe.core.engine.pjrt import PjrtEngine
from lingvo_moe.core.layers.feed_forward import FeedForward
from lingvo_moe.core.nested_map import NestedMap, flatten_items
from lingvo_moe.core.sharding import Mesh

MESH = Mesh.parse("data:2,model:4")
LINE = Mesh.parse("d:8")


def _layer():
    return (
        FeedForward.Params()
        .Set(
            name="ffn",
            model_dim=8,
            hidden_dim=16,
            weight_split={"H": "model"},
            activation_split={"B": "data", "H": "model"},
        )
        .Instantiate()
    )


def test_a_variables_letters_cut_it_in_the_program_and_on_the_devices():
    layer = _layer()
    specs = layer.VariableSpecs()
    assert {path: s.split for path, s in flatten_items(specs)} == {
        "wi": (None, "model"),
        "wo": ("model", None),
    }
    engine = PjrtEngine(MESH)
    theta = NestedMap(wi=floats(8, 16), wo=floats(16, 8))
    placed = engine.Put(theta, specs)
    assert {s.data.shape for s in placed.wi.addressable_shards} == {(8, 4)}
    assert {s.data.shape for s in placed.wo.addressable_shards} == {(4, 8)}

    x = floats(4, 3, 8)
    compiled = engine.Build(
        lambda theta, x: layer.FProp(theta, x, None)[0],
        [specs, TensorSpec(x.shape, "float32", ("data", None, None))],
        results=AUTO,
    )
    # A device's program has its parts of the variables and of the batch as parameters ...
    (layout,) = re.findall(r"entry_computation_layout=\{\((.*?)\)->", compiled.HloText())
    assert sorted(re.findall(r"f32\[([\d,]+)\]", layout)) == ["2,3,8", "4,8", "8,4"]
    # ... and sends nothing but the partial sums over `model`.
    assert [c.kind for c in compiled.Collectives()] == ["all-reduce"]
    want = run_single(lambda theta, x: layer.FProp(theta, x, None)[0], [theta, x])
    assert_close("value", np.asarray(compiled(placed, x)), want, 1e-5)


def _loss_gradient(annotate, annotate_gradient=lambda g: g):
    def gradient(x, w, u):
        with tf.GradientTape() as tape:
            tape.watch(w)
            y = xs.mesh_split(x, MESH, ("data", None)) @ annotate(w)
            loss = tf.reduce_sum(xs.mesh_split(y, MESH, ("data", None)) * u)
        return annotate_gradient(tape.gradient(loss, w))

    return gradient


def _gradient_collectives(gradient):
    args = [floats(8, 16), floats(16, 8), floats(8, 8)]
    engine = PjrtEngine(MESH)
    compiled = engine.Build(gradient, [TensorSpec(a.shape, "float32") for a in args], results=AUTO)
    out = compiled(*args)
    np.testing.assert_allclose(np.asarray(out), args[0].T @ args[2], atol=1e-4)
    return {s.data.shape for s in out.addressable_shards}, compiled.Collectives()


def test_the_gradient_of_an_annotated_tensor_stays_cut():
    """w [16, 8] is sharded four ways: a device computes 16 x 2 of its gradient and sends no more."""
    shapes, found = _gradient_collectives(
        _loss_gradient(lambda w: xs.mesh_split(w, MESH, (None, "model")))
    )
    assert shapes == {(16, 2)}
    assert [(c.kind, c.num_bytes) for c in found] == [("all-reduce", 16 * 2 * 4)]


def test_a_gradient_can_be_annotated_by_itself():
    shapes, found = _gradient_collectives(
        _loss_gradient(lambda w: w, lambda g: xs.mesh_split(g, MESH, (None, "model")))
    )
    assert shapes == {(16, 2)}  # each device computes its part of the sum alone
    assert [(c.kind, c.num_bytes) for c in found] == [("all-reduce", 16 * 2 * 4)]
    # Cut over `data`, along which it is a sum: the sum is scattered, in whatever way XLA does that
    # (on a CPU by all-reduces of halves and a permutation), and no device gets the whole of it.
    shapes, found = _gradient_collectives(
        _loss_gradient(lambda w: w, lambda g: xs.mesh_split(g, MESH, ("data", None)))
    )
    assert shapes == {(8, 8)}
    assert found and all(c.num_bytes <= 8 * 8 * 4 for c in found)


def test_the_gradient_of_gathering_comes_back_cut():
    """A sharded weight that is used replicated is gathered; each device keeps its part of the gradient's sum."""
    gather = _loss_gradient(lambda w: xs.redistribute(w, ("data", None), (None, None)))
    shapes, found = _gradient_collectives(gather)
    assert shapes == {(8, 8)}
    assert [c.kind for c in found] in (["all-reduce"], ["reduce-scatter"])


# --- copies of parts


APART = np.array([[[0, 4]], [[1, 5]], [[2, 6]], [[3, 7]]])  # four bands of rows, each held twice


@pytest.mark.parametrize("assignment", [APART, APART[:, :, ::-1]])
def test_subgroups_say_which_devices_hold_the_same_part(assignment):
    """The rows of `a` are contracted: partial sums are added among devices with different parts."""

    def fn(a, b):
        return tf.matmul(xs.shard(a, assignment), xs.shard(b, assignment), transpose_a=True)

    a, b = floats(8, 4), floats(8, 4)
    got, collectives = run_sharded(fn, [a, b], LINE, results=None)
    assert_close("value", got, a.T @ b, 1e-5)
    assert dict(collectives) == {"all-reduce": 1}
    (found,) = devices_of(collectives.hlo, "all-reduce")
    assert sorted(map(sorted, found)) == [[0, 1, 2, 3], [4, 5, 6, 7]]

    text = lower(fn, [TensorSpec((8, 4), "float32")] * 2, LINE).Text()
    assert text.count("{devices=[4,1,2]0,4,1,5,2,6,3,7 last_tile_dim_replicate}") >= 2, text


# --- arrays between the calls of engines


def test_arrays_go_from_one_mesh_to_another_of_the_same_devices():
    """The result of one engine becomes the argument of another, sharded differently, devices in another order."""
    first = PjrtEngine(MESH)
    second = PjrtEngine(LINE, list(reversed(jax.devices()[:8])))
    x = floats(16, 8)
    cut = first.Put(x, TensorSpec(x.shape, "float32", ("data", "model")))
    assert {s.data.shape for s in cut.addressable_shards} == {(8, 2)}
    spec = TensorSpec(x.shape, "float32", (None, "d"))
    moved = second.Put(cut, spec)
    np.testing.assert_array_equal(second.Get(moved), x)
    by_device = {s.device: np.asarray(s.data) for s in moved.addressable_shards}
    for i, device in enumerate(reversed(jax.devices()[:8])):
        np.testing.assert_array_equal(by_device[device], x[:, i : i + 1])
    assert second.Put(moved, spec) is moved  # already there

    # And a program takes the other's result as it is.
    double = second.Build(lambda x: x * 2.0, [spec], results=spec)
    np.testing.assert_array_equal(np.asarray(double(cut)), 2 * x)
