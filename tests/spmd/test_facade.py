"""xla_sharding: one import for the whole annotation API."""

import numpy as np
import pytest
import tensorflow as tf
from spmd_case import floats

from lingvo_moe import xla_sharding as xs
from lingvo_moe.core.engine.eager.testing import run_sharded
from lingvo_moe.core.engine.lowering.specs import TensorSpec

MESH = xs.Mesh.parse("data:2,model:4")


def test_every_name_is_there_and_says_what_it_is():
    for name in xs.__all__:
        assert getattr(xs, name).__doc__, name
    assert {*xs.__all__} <= {*dir(xs)}


def test_annotations_redistribution_and_loops_in_one_program():
    def fn(x, w):
        x = xs.mesh_split(x, MESH, (("data", "model"), None))
        y = xs.redistribute(x, (("data", "model"), None), (None, ("data", "model"))) @ w
        return xs.replicate(y) + xs.shard(xs.split(x, 0, 8), np.arange(8)[::-1, np.newaxis])

    x, w = floats(8, 8), floats(8, 8)
    got, collectives = run_sharded(fn, [x, w], MESH, results=None)
    np.testing.assert_allclose(got, x @ w + x, atol=1e-5)
    assert collectives["all-to-all"] == 1


def test_shard_is_for_tensors_and_for_functions():
    def layer(x, w):
        return tf.nn.relu(xs.mesh_split(x, MESH, ("data", None)) @ w)

    x, w = tf.constant(floats(4, 8)), tf.constant(floats(8, 4))
    sharded = xs.shard(layer, [None, (None, "model")], ("data", "model"), mesh=MESH)
    np.testing.assert_allclose(sharded(x, w), tf.nn.relu(x @ w), atol=1e-5)
    with pytest.raises(xs.ShardingError, match="no mesh is in force"):
        xs.shard(x, [[0, 1]])
    with pytest.raises(TypeError, match="device_assignment"):
        xs.shard(x)


def test_explain_and_get_sharding_by_this_name():
    def layer(x):
        return tf.nn.relu(xs.mesh_split(x, MESH, ("data", None)), name="activation")

    explanation = xs.explain(layer, [TensorSpec((4, 8), "float32")], MESH)
    assert xs.get_sharding(explanation, "activation")
