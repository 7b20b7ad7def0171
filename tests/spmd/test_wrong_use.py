"""Wrong use of the annotation API raises while a function is traced, naming the tensor and what is wrong."""

import numpy as np
import pytest
import tensorflow as tf
from refusals import refuses
from spmd_case import floats

from lingvo_moe import xla_sharding as xs
from lingvo_moe.core.engine.eager.testing import run_sharded
from lingvo_moe.core.engine.lowering import lowering
from lingvo_moe.core.engine.lowering.specs import AUTO, TensorSpec
from lingvo_moe.core.sharding import Mesh, ShardingError

MESH = Mesh.parse("data:2,model:4")
OTHER = Mesh.parse("data:2")
EIGHT = [list(range(8))]


@refuses(ShardingError,
    # replicate and split
    (lambda x: xs.split(x, 2, 8), r"^split\(x:0, 2, 8\): shape \[16, 4\] has dimensions 0\.\.1$"),
    (lambda x: xs.split(x, -2, 8),
     r"^split\(x:0, -2, 8\): shape .* 0\.\.1; they are counted from the front, so say 0$"),
    (lambda x: xs.split(x, "model", 4), r"^split\(x:0, model, 4\): a dimension is an integer, one of 0\.\.1$"),
    (lambda x: xs.split(tf.reduce_sum(x, name="total"), 0, 2), r"^split\(total:0, 0, 2\): a scalar has no dimensions$"),
    (lambda x: xs.split(x, 0, 16),
     r"^split\(x:0, 0, 16\): the number of partitions must divide the 8 devices of mesh data:2,m"),
    (lambda x: xs.split(x, 0, 2.0), r"^split\(x:0, 0, 2\.0\): the number of partitions is an integer$"),
    (lambda x: xs.split(x, 1, 8),
     r"^split\(x:0, 1, 8\): dimension 1 of shape \[16, 4\] has 4 elements, fewer than 8 part"),
    # shard
    (lambda x: xs.shard(x, range(8)),
     r"^shard\(x:0, device_assignment of shape \[8\]\): the tensor has 2 dimensions, shape \[16, 4\]"),
    (lambda x: xs.shard(x, [[0, 1, 2, 3], [4, 5, 6, 6]]),
     r"^shard\(x:0, .* each of 0\.\.7 once \(twice: \[6\]; missing: \[7\]\)$"),
    (lambda x: xs.shard(x, [[[0, 1, 2, 3]], [[0, 5, 6, 7]]]),
     r"device_assignment of shape \[2, 1, 4\]\).*\(twice: \[0\]; missing: \[4\]\)$"),
    (lambda x: xs.shard(x, np.arange(8.0).reshape(8, 1)),
     r"^shard\(x:0, .*: holds float64, but device numbers are integers$"),
    (lambda x: xs.shard(x, [[0, 1, 2], [3, 4, 5, 6, 7]]),
     r"^shard\(x:0, device_assignment=.*the rows are not of one length"),
    (lambda x: xs.shard(x, EIGHT),
     r"^shard\(x:0, .*: dimension 1 of shape \[16, 4\] has 4 elements, fewer than 8 partitions$"),
    # mesh_split
    (lambda x: xs.mesh_split(x, MESH, ("data",)),
     r"^mesh_split\(x:0, .*: a mapping of 1 dimensions .* for a tensor of shape \[16, 4\]$"),
    (lambda x: xs.mesh_split(x, MESH, "data"), r"^mesh_split\(x:0, .*: 'data' is no mapping, which has a mesh axis"),
    (lambda x: xs.mesh_split(x, MESH, ("date", None)),
     r"^mesh_split\(x:0, .*: mesh .* has no axis 'date' \(did you mean 'data'\?\)$"),
    (lambda x: xs.mesh_split(x, MESH, (0, -1)),
     r"^mesh_split\(x:0, .*: 0, for dimension 0, is no mesh axis; mesh .* data, model$"),
    (lambda x: xs.mesh_split(x, MESH, ("model", "model")),
     r"^mesh_split\(x:0, .*: mesh axis 'model' shards both dimension 0 and dimension 1; use it once$"),
    (lambda x: xs.mesh_split(x, MESH, (None, ("data", "model"))),
     r"dimension 1 of shape \[16, 4\] has 4 elements, fewer than the 8 partitions of axis \('data'"),
    (lambda x: xs.mesh_split(x, OTHER, ("data", None)),
     r"^mesh_split\(x:0, data:2, .*: 2 devices, but the mesh in force, data:2,model:4, has 8$"),
    (lambda x: xs.mesh_split(x, np.arange(8), (0, None)),
     r"^mesh_split\(x:0, .*: the mesh is a ndarray; give a sharding\.Mesh or its text, "),
    # redistribute
    (lambda x: xs.redistribute(x, ("data", None), (None, "modle")),
     r"^redistribute\(x:0, target=\(None, 'modle'\)\): mesh .* \(did you mean 'model'\?\)$"),
    (lambda x: xs.redistribute(x, ("data", None), (OTHER, ("data", None))),
     r"^redistribute\(x:0, target=.*: mesh data:2 has 2 devices, but the mesh in force, .* has 8$"),
    (lambda x: xs.redistribute(tf.identity(xs.mesh_split(x, MESH, ("data", None))), ("model", None), (None, None)),
     r"^redistribute\(Identity:0, source=\('model', None\)\): but the tensor is annotated "
     r"\(XlaSharding\) with \[2, 1\] parts on devices \[0, 1, 2, 3, 4, 5, 6, 7\]; give its"),
)  # fmt: skip
def test_wrong_use_raises_while_it_is_traced(fn, monkeypatch):
    """The tensor is argument `x`, of shape [16, 4]."""
    monkeypatch.setattr(lowering.jax, "jit", lambda *args, **kwargs: pytest.fail("it was lowered"))

    def traced(x):
        return fn(x)

    lowering.lower(traced, [TensorSpec((16, 4), "float32")], MESH)


@pytest.mark.parametrize(
    "name, annotate",
    {
        "split": lambda x: xs.split(x, 0, 8),
        "shard": lambda x: xs.shard(x, np.arange(8).reshape(8, 1)),
        "mesh_split": lambda x: xs.mesh_split(x, MESH, ("data", None)),
        "redistribute": lambda x: xs.redistribute(x, ("data", None), (None, None)),
    }.items(),
)
def test_a_rank_that_is_not_known(name, annotate):
    def traced(x):
        with xs.use_mesh(MESH):
            return annotate(x)

    unknown = tf.TensorSpec(None, tf.float32, name="x")
    message = rf"^{name}\(x:0.* (the tensor's rank is not known|not st)"
    with pytest.raises(ShardingError, match=message):
        tf.function(traced, autograph=False).get_concrete_function(unknown)


def test_a_plan_between_meshes_of_two_sizes_or_of_a_wrong_rank():
    with pytest.raises(ShardingError, match="they have 8 and 2 devices, and only the same devices"):
        xs.plan_redistribution((16, 4), 4, (MESH, ("data", None)), (OTHER, ("data", None)))
    message = r"redistribution's target \('data',\): a mapping of 1 dim"
    with pytest.raises(ShardingError, match=message):
        xs.plan_redistribution((16, 4), 4, (MESH, ("data", None)), (MESH, ("data",)))


def test_a_result_that_the_mesh_cannot_name_is_named():
    line = Mesh.parse("d:8")

    def fn(x):
        return {"fine": x * 3.0, "halves": xs.split(x, 0, 2) * 2.0, "whole": xs.replicate(x) + 1.0}

    x = floats(16, 4)
    message = r"program 'fn': the partitioner shards result\.halves in a"
    with pytest.raises(ShardingError, match=message):
        run_sharded(fn, [x], line, results=AUTO)
    got, _ = run_sharded(fn, [x], line, results=None)
    np.testing.assert_array_equal(got.halves, 2 * x)
    got, _ = run_sharded(lambda x: xs.split(x, 0, 2) * 2.0, [x], Mesh.parse("a:2,b:4"))
    np.testing.assert_array_equal(got, 2 * x)
