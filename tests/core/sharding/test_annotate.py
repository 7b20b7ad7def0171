"""Annotations: the shardings in the lowered graph, and errors for wrong use before lowering."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.compiler.xla import xla_data_pb2

from lingvo_moe.core import sharding
from lingvo_moe.core.sharding import Mesh, ShardingError, use_mesh

MESH = Mesh(("x", "y"), (2, 4))


def _annotated(fn, shape, mesh=MESH):
    """The sharding protos in the graph of fn on a float32 tensor."""

    def traced(x):
        with use_mesh(mesh):
            return fn(x)

    graph = (
        tf.function(traced, autograph=False)
        .get_concrete_function(tf.TensorSpec(shape, tf.float32))
        .graph
    )
    protos = []
    for op in graph.get_operations():
        if op.type == "XlaSharding":
            protos.append(xla_data_pb2.OpSharding.FromString(op.get_attr("sharding")))
    return protos


def _tiles(proto):
    return list(proto.tile_assignment_dimensions), list(proto.tile_assignment_devices)


def test_split_over_all_and_over_some_devices():
    (proto,) = _annotated(lambda x: sharding.split(x, 1, 8), [3, 16])
    assert _tiles(proto) == ([1, 8], list(range(8)))
    (proto,) = _annotated(lambda x: sharding.split(x, 0, 4), [15, 16])
    assert _tiles(proto) == ([4, 1, 2], list(range(8))) and proto.replicate_on_last_tile_dim
    (proto,) = _annotated(lambda x: sharding.split(x, 0, 1), [15, 16])
    assert proto.type == xla_data_pb2.OpSharding.REPLICATED


def test_shard_takes_any_device_assignment():
    order = np.array([[[7, 6, 5, 4], [3, 2, 1, 0]]])
    (proto,) = _annotated(lambda x: sharding.shard(x, order), [3, 16, 64])
    assert _tiles(proto) == ([1, 2, 4], [7, 6, 5, 4, 3, 2, 1, 0])


def test_mesh_split_orders_devices_and_keeps_copies():
    (proto,) = _annotated(lambda x: sharding.mesh_split(x, MESH, ("y", "x")), [4, 2])
    assert _tiles(proto) == ([4, 2], [0, 4, 1, 5, 2, 6, 3, 7])
    (proto,) = _annotated(lambda x: sharding.mesh_split(x, MESH, (None, "x")), [4, 2])
    assert _tiles(proto) == ([1, 2, 4], list(range(8))) and proto.replicate_on_last_tile_dim
    (proto,) = _annotated(lambda x: sharding.mesh_split(x, MESH, (("x", "y"), None)), [8, 2])
    assert _tiles(proto) == ([8, 1], list(range(8)))
    (proto,) = _annotated(lambda x: sharding.mesh_split(x, MESH, (None, None)), [8, 2])
    assert proto.type == xla_data_pb2.OpSharding.REPLICATED


def test_gradients_carry_the_annotation():
    def fn(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(sharding.split(x, 0, 8) ** 2)
        return tape.gradient(y, x)

    protos = _annotated(fn, [8, 2])
    assert [_tiles(p)[0] for p in protos] == [[8, 1], [8, 1]]


@pytest.mark.parametrize(
    "letters, groups, expected",
    [
        ("GSEC", "expert", ("expert", None, None, None)),
        ("EGCM", "expert", ("expert", None, None, None)),
        ("SGEM", "expert", (None, "expert", None, None)),
        ("EGCM", ("data", "expert"), ("expert", "data", None, None)),
        ("GECM", ("data", "expert"), (("data", "expert"), None, None, None)),
    ],
)
def test_the_leftmost_letter_takes_the_axis_and_another_what_is_left(letters, groups, expected):
    assert sharding.dims_mapping(letters, {"G": groups, "E": "expert"}) == expected


def test_a_weights_own_key_wins_over_the_letter():
    split = {"H": None, "wi.H": "model", "E": ("x", "y")}
    assert sharding.dims_mapping("EMH", split, "wi") == (("x", "y"), None, "model")
    assert sharding.dims_mapping("EHM", split, "wo") == (("x", "y"), None, None)


def test_on_one_device_letters_have_nothing_to_cut():
    with use_mesh(sharding.single_device()):
        x = tf.ones([4, 4])
        assert sharding.shard_letters(x, "GM", {"G": "other"}) is x
        assert sharding.split(x, 0, 1) is x
        with pytest.raises(ShardingError, match="must divide the 1 devices"):
            sharding.split(x, 0, 2)


def test_a_mesh_over_another_number_of_devices():
    """The first axis changes, the others stay; on one device there is nothing to shard."""
    mesh = Mesh.parse("data:256,model:8")
    assert str(mesh.over_devices(16)) == "data:2,model:8"
    assert str(mesh.over_devices(2048)) == str(mesh)
    assert str(mesh.over_devices(1)) == "data:1,model:1"
    assert str(Mesh.parse("expert:2048").over_devices(3)) == "expert:3"
    with pytest.raises(ShardingError, match="data:256,model:8 cannot be laid over 12 devices"):
        mesh.over_devices(12)


def test_mesh_parse_and_its_errors():
    mesh = Mesh.parse("data:2,expert:4")
    assert (mesh.axis_names, mesh.shape, mesh.size) == (("data", "expert"), (2, 4), 8)
    assert str(mesh) == "data:2,expert:4" and mesh.axis_size(("data", "expert")) == 8
    for bad in ("expert", "expert:x", "a:2,a:4", "expert:0", ":8", ""):
        with pytest.raises(ShardingError):
            Mesh.parse(bad)
    with pytest.raises(ShardingError, match="did you mean 'expert'"):
        mesh.axis_size("experts")
    with pytest.raises(ShardingError, match="once"):
        Mesh(("x",), (2,), (0, 0))
