"""The mesh axes that lie inside nodes, and the order of the axes that is proposed."""

import pytest
import tensorflow as tf

from lingvo_moe.analysis.plans import mesh_order
from lingvo_moe.analysis.plans.machines.gpu_cluster import Cluster
from lingvo_moe.analysis.plans.network import interconnect
from lingvo_moe.analysis.plans.work.costs import Cost, costs
from lingvo_moe.analysis.programs.hlo.collectives import CollectiveUse
from lingvo_moe.analysis.programs.hlo.module import parse_module
from lingvo_moe.analysis.programs.hlo.parts import Place
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.engine.pjrt import PjrtEngine
from lingvo_moe.core.sharding import Mesh

PLACE = Place("experts", "moe", "forward", "m4")
CLUSTER = Cluster.parse("h100:4x8")
GB = 10**9


def _groups(mesh, *axes):
    """The groups of devices that differ along `axes` only."""
    grid = mesh.device_array()
    along = [mesh.axis_names.index(axis) for axis in axes]
    silent = [i for i in range(grid.ndim) if i not in along]
    size = mesh.axis_size(axes)
    return tuple(map(tuple, grid.transpose(silent + along).reshape(-1, size).tolist()))


def _cost(kind, num_bytes, groups, times=1):
    use = CollectiveUse(kind, num_bytes, len(groups[0]), len(groups), 1, groups)
    return Cost(PLACE, kind, "x", times, 0, 0, 0, use)


MESH = Mesh.parse("data:4,expert:8")
SWAPPED = Mesh.parse("expert:8,data:4")
# An all-to-all among experts and an all-reduce among copies of the data.
PROGRAM = [
    _cost("all-to-all", GB, _groups(MESH, "expert"), times=3),
    _cost("all-reduce", GB // 100, _groups(MESH, "data")),
]


@pytest.mark.parametrize("axes", [("data",), ("expert",), ("data", "expert")])
def test_axes_of_groups(axes):
    for mesh in (MESH, SWAPPED, Mesh.parse("pipeline:1,data:4,expert:8")):
        inside = tuple(axis for axis in mesh.axis_names if axis in axes)
        assert mesh_order.axes_between(_groups(mesh, *axes), mesh) == inside


def test_axes_of_a_permute():
    ring = tuple((8 * i + j, 8 * ((i + 1) % 4) + j) for i in range(4) for j in range(8))
    assert mesh_order.axes_between(ring, MESH) == ("data",)
    assert mesh_order.axes_between((), MESH) == ()


def test_a_plan_has_bytes_by_axis():
    found = mesh_order.mesh_plan(PROGRAM, MESH, CLUSTER)
    expert, data = found["by_axis"]
    # Eight experts fill a node. The copies of the data are one in each of four nodes.
    one = interconnect.seconds("all-to-all", GB, 8, CLUSTER, interconnect.Spread(1, 8))
    assert expert == {
        "axes": "expert",
        "count": 3,
        "sent_inside": 3 * GB * 7 // 8,
        "sent_between": 0,
        "seconds": pytest.approx(3 * one),
    }
    assert (data["axes"], data["sent_inside"]) == ("data", 0)
    assert data["sent_between"] == 2 * GB // 100 * 3 // 4
    assert found["advice"] == "No other order of the mesh's axes is faster than data:4,expert:8."


def test_the_axis_that_sends_most_is_proposed_for_the_inside_of_nodes():
    groups = [mesh_order.renumbered(c.collective.devices, MESH, SWAPPED) for c in PROGRAM]
    swapped = [
        _cost(c.collective.kind, c.collective.bytes, devices, c.times)
        for c, devices in zip(PROGRAM, groups, strict=True)
    ]
    found = mesh_order.mesh_plan(swapped, SWAPPED, CLUSTER)
    assert [row["mesh"] for row in found["orders"]] == ["expert:8,data:4", "data:4,expert:8"]
    given_order, better = found["orders"]
    assert better == mesh_order.mesh_plan(PROGRAM, MESH, CLUSTER)["orders"][0] | {
        "mesh": "data:4,expert:8"
    }
    assert better["sent_between"] < given_order["sent_between"]
    assert found["advice"].startswith("--mesh=data:4,expert:8, or train.mesh=data:4,expert:8 ")


@pytest.mark.parametrize(("mesh", "cluster", "message"), [
    ("expert:32", "h100:4x8", "has one axis of several devices"),
    ("one:1,expert:32", "h100:4x8", "has one axis of several devices"),
    ("data:2,expert:4", "h100:1x8", "All devices are in one node"),
])  # fmt: skip
def test_where_no_order_helps(mesh, cluster, message):
    mesh = Mesh.parse(mesh)
    program = [_cost("all-to-all", GB, _groups(mesh, "expert"))]
    assert message in mesh_order.mesh_plan(program, mesh, Cluster.parse(cluster))["advice"]


def test_another_order_of_the_axes_gives_the_same_collectives_along_the_same_axes():
    """The proposal assumes that the order of the axes changes nothing but the numbers of the devices."""

    def step(x, w):
        y = tf.nn.relu(tf.matmul(x, w))
        return tf.reduce_sum(y, 0), tf.reduce_mean(y)

    specs = [
        TensorSpec((16, 32), "float32", ("data", "expert")),
        TensorSpec((32, 8), "float32", ("expert", None)),
    ]
    results = TensorSpec((8,), "float32", (None,)), TensorSpec((), "float32")
    found = []
    for text in ("data:2,expert:4", "expert:4,data:2"):
        mesh = Mesh.parse(text)
        compiled = PjrtEngine(mesh).Build(step, specs, results=results)
        uses = [c.collective for c in costs(parse_module(compiled.HloText())) if c.collective]
        found.append(
            sorted((u.kind, u.bytes, mesh_order.axes_between(u.devices, mesh)) for u in uses)
        )
    assert found[0] == found[1]
    assert {axes for _, _, axes in found[0]} >= {("data",), ("expert",)}
