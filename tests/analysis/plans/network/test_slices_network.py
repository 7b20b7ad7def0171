"""The interconnect model of several TPU slices: figures by hand, bounds, and what the compiler sends between slices."""

import pytest
import tensorflow as tf
from hypothesis import given, strategies as st
from toy_moe import planned_collectives

from lingvo_moe.analysis.plans import tables
from lingvo_moe.analysis.plans.machines.topology import Topology
from lingvo_moe.analysis.plans.network import interconnect, slices_network
from lingvo_moe.analysis.plans.network.two_levels import Spread
from lingvo_moe.analysis.plans.work.costs import costs
from lingvo_moe.analysis.programs.aot import aot
from lingvo_moe.analysis.programs.hlo.collectives import COLLECTIVES
from lingvo_moe.analysis.programs.hlo.module import parse_module
from lingvo_moe.core import sharding
from lingvo_moe.core.engine.lowering.lowering import lower
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.sharding import Mesh

GB = 10**9
STEP = slices_network.SECONDS_PER_STEP
V5P = Topology.parse("v5p:4x4x4*2")
NAMES = st.sampled_from(["v5p:4x4x4*2", "v5e:16x16*4", "v6e:2x2*3", "v5e:1x1*2"])


def _seconds(kind, num_bytes, lies, topology=V5P):
    return interconnect.seconds(kind, num_bytes, lies.nodes * lies.inside, topology, lies)


def test_between_two_slices_by_hand():
    # 6.25 GB/s a chip: half of the bytes to the other slice, or all of them along a pair.
    pairs = Spread(2, 1)
    for kind in ("all-gather", "reduce-scatter", "all-to-all"):
        assert _seconds(kind, GB, pairs) == pytest.approx(GB / 2 / 6.25e9 + STEP)
    assert _seconds("all-reduce", GB, pairs) == pytest.approx(2 * (GB / 2 / 6.25e9 + STEP))
    assert _seconds("collective-permute", GB, pairs) == pytest.approx(GB / 6.25e9 + STEP)


def test_hierarchical_collectives_add_the_part_inside_the_slice():
    # Between slices each of 64 devices sends half of its 1/64; then the torus has its own time.
    inside = interconnect.seconds("all-gather", GB, 64, Topology.parse("v5p:4x4x4"))
    assert inside > 0
    found = _seconds("all-gather", GB, Spread(2, 64))
    assert found == pytest.approx(inside + GB / 64 / 2 / 6.25e9 + STEP)


def test_four_slices_take_three_steps_each_way():
    topology = Topology.parse("v5e:4x4*4")
    assert _seconds("all-reduce", 0, Spread(4, 1), topology) == pytest.approx(6 * STEP)
    assert _seconds("all-to-all", 0, Spread(4, 1), topology) == pytest.approx(STEP)


@given(st.sampled_from(COLLECTIVES), NAMES, st.integers(0, 2**36))
def test_crossing_slices_is_never_faster_than_the_hosts_interfaces(kind, name, num_bytes):
    """Each slice must receive what it lacks over the interfaces of its hosts."""
    topology = Topology.parse(name)
    if kind == "collective-permute":
        lies, lacks = Spread(2, 1), float(num_bytes)
    else:
        lies = Spread(topology.slices, topology.num_devices // topology.slices)
        lacks = num_bytes * (lies.nodes - 1) / lies.nodes / lies.inside
    least = lacks / topology.dcn_bandwidth
    assert _seconds(kind, num_bytes, lies, topology) * (1 + 1e-9) >= least


@pytest.mark.parametrize(("groups", "expected"), [
    (((0, 1, 2, 3), (64, 65, 66, 67)), Spread(1, 4)),
    (((0, 64), (1, 65)), Spread(2, 1)),
    (((0, 1), (63, 64)), Spread(2, 1)),
    ((tuple(range(128)),), Spread(2, 64)),
])  # fmt: skip
def test_how_groups_lie_in_slices(groups, expected):
    assert interconnect.spread(groups, V5P) == expected


@pytest.fixture(scope="module")
def rows():
    """The collectives of x^T x, with x [4096, 1024] sharded by rows, compiled for two slices of four chips."""
    topology = Topology.parse("v5p:2x2x1*2")

    def step(x):
        return sharding.replicate(tf.matmul(x, x, transpose_a=True))

    program = lower(
        step,
        [TensorSpec((4096, 1024), "float32", (("stage", "data"), None))],
        Mesh(("stage", "data"), (2, 4)),
    )
    result = aot.compile_for_topology(program, topology.name)
    return tables.collectives(costs(parse_module(result.hlo_text)), topology)


def test_the_compiler_reduces_inside_a_slice_before_it_sends(rows):
    (large,) = [r for r in rows if r["slices"] == 2 and r["bytes"] == 1024 * 1024 * 4 // 4]
    assert (large["kind"], large["participants"], large["count"]) == ("all-reduce", 2, 1)
    # The model of the whole collective sends as much.
    whole = interconnect.sent("all-reduce", 1024 * 1024 * 4, Spread(2, 4), V5P)
    assert large["sent_between"] == whole.between
    assert large["seconds"] == pytest.approx(large["sent_between"] / 6.25e9 + 2 * STEP)
    inside = [r for r in rows if r["slices"] == 1 and r["in_slice"] == 4]
    assert {"reduce-scatter", "all-gather"} <= {r["kind"] for r in inside}
    assert all(r["sent_between"] == 0 for r in inside)


def test_experts_in_both_slices_exchange_their_tokens_between_them():
    rows = [r for r in planned_collectives("v5p:2x2x1*2") if r["kind"] == "all-to-all"]
    assert sum(row["count"] for row in rows) >= 2
    assert all((row["slices"], row["sent_between"]) == (2, row["bytes"] // 2) for row in rows)
