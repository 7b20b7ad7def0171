"""The interconnect model of GPU clusters: closed forms, bounds, and how groups lie in nodes."""

import pytest
from hypothesis import given, strategies as st

from lingvo_moe.analysis.plans.machines.gpu_cluster import CARDS, Cluster
from lingvo_moe.analysis.plans.network import cluster_network as model, interconnect
from lingvo_moe.analysis.plans.network.two_levels import Spread

GB = 10**9
REDUCING = ("all-reduce", "all-gather", "reduce-scatter")
H100 = CARDS["h100"]
# Powers of two, as meshes of such machines have.
SPREADS = st.builds(
    Spread, st.sampled_from([2**i for i in range(9)]), st.sampled_from([1, 2, 4, 8])
)


def _cluster(card, lies):
    """A cluster in which the group leaves no GPU of a node out."""
    return Cluster.parse(f"{card}:{lies.nodes}x{lies.inside}")


def _seconds(kind, num_bytes, lies, cluster):
    participants = lies.nodes * lies.inside
    return interconnect.seconds(kind, num_bytes, participants, cluster, lies)


def _moving(kind, num_bytes, name):
    """Seconds without latencies among all GPUs of a cluster."""
    cluster = Cluster.parse(name)
    times = [interconnect.seconds(kind, n, cluster.num_devices, cluster) for n in (num_bytes, 0)]
    return times[0] - times[1]


def test_collectives_of_one_node_by_hand():
    # 8 H100s: 7/8 of the bytes over 450 GB/s.
    once = GB * 7 / 8 / 450e9
    for kind in ("all-gather", "reduce-scatter", "all-to-all"):
        assert _moving(kind, GB, "h100:1x8") == pytest.approx(once)
    assert _moving("all-reduce", GB, "h100:1x8") == pytest.approx(2 * once)
    assert _moving("collective-permute", GB, "h100:1x8") == pytest.approx(GB / 450e9)


def test_collectives_of_many_nodes_by_hand():
    # 32 nodes of 8: an eighth of 31/32 of the bytes over 50 GB/s is slower than 7/8 of them over 450 GB/s.
    between = GB / 8 * 31 / 32 / 50e9
    assert between > GB * 7 / 8 / 450e9
    assert _moving("all-gather", GB, "h100:32x8") == pytest.approx(between)
    assert _moving("all-reduce", GB, "h100:32x8") == pytest.approx(2 * between)
    assert _moving("all-to-all", GB, "h100:32x8") == pytest.approx(GB * 31 / 32 / 50e9)
    assert _moving("collective-broadcast", GB, "h100:32x8") == pytest.approx(GB / 8 / 50e9)


def test_without_nvlink_the_lanes_carry_what_leaves_the_node_too():
    # An L40S has 32 GB/s of PCI Express: 31/32 of the bytes of an all-gather pass it, all but its own part.
    assert _moving("all-gather", GB, "l40s:4x8") == pytest.approx(GB * 31 / 32 / 32e9)
    # To 24 of 32 GPUs over 25 GB/s, or to 31 of 32 over 32 GB/s: about the same; the lanes are slower.
    assert _moving("all-to-all", GB, "l40s:4x8") == pytest.approx(GB * 31 / 32 / 32e9)


def test_latencies_by_hand():
    lies, cluster = Spread(32, 8), Cluster.parse("h100:32x8")
    ring, tree = 7 * model.SECONDS_PER_NVLINK_STEP, 5 * model.SECONDS_PER_NETWORK_STEP
    first = model.SECONDS_PER_OPERATION
    assert _seconds("all-reduce", 0, lies, cluster) == pytest.approx(first + 2 * (ring + tree))
    assert _seconds("reduce-scatter", 0, lies, cluster) == pytest.approx(first + ring + tree)
    direct = first + model.SECONDS_PER_NETWORK_STEP
    assert _seconds("all-to-all", 0, lies, cluster) == pytest.approx(direct)
    inside = first + model.SECONDS_PER_NVLINK_STEP
    assert _seconds("collective-permute", 0, Spread(1, 2), cluster) == pytest.approx(inside)


@given(st.sampled_from(REDUCING), st.sampled_from(sorted(CARDS)), SPREADS, st.integers(0, 2**36))
def test_no_level_is_faster_than_its_links(kind, card, lies, num_bytes):
    """Every GPU must receive what it lacks over its own links, and every node what it lacks over its interfaces."""
    cluster = _cluster(card, lies)
    passes = 2 if kind == "all-reduce" else 1
    into_gpu = passes * num_bytes * (lies.inside - 1) / lies.inside
    into_node = passes * num_bytes * (lies.nodes - 1) / lies.nodes
    found = _seconds(kind, num_bytes, lies, cluster)
    slack = 1 + 1e-9
    assert found * slack >= into_gpu / cluster.card.node_bandwidth
    assert found * slack >= into_node / (lies.inside * cluster.card.nic_bandwidth)


@pytest.mark.parametrize(("groups", "expected"), [
    (((0, 1, 2, 3), (4, 5, 6, 7)), Spread(1, 4)),
    (((0, 4), (1, 5)), Spread(2, 1)),
    ((tuple(range(16)),), Spread(4, 4)),
    (((0, 1, 8, 9), (2, 3, 10, 11)), Spread(2, 2)),
    (((0, 1), (3, 4)), Spread(2, 1)),  # one pair crosses
    (((0, 1, 2, 4),), Spread(4, 1)),  # three here, one there
    ((), Spread(1, 1)),  # a permute that moves nothing
])  # fmt: skip
def test_how_groups_lie_in_nodes_of_four(groups, expected):
    assert interconnect.spread(groups, Cluster.parse("h100:4x4")) == expected
