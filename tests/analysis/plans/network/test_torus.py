"""The interconnect model of TPU slices: its scaling, as in the paper, and figures worked out by hand."""

import itertools
import math

import pytest
from hypothesis import given, strategies as st

from lingvo_moe.analysis.plans.machines.topology import Topology
from lingvo_moe.analysis.plans.network import interconnect, torus
from lingvo_moe.analysis.programs.hlo.collectives import COLLECTIVES

MB = 2**20
SQUARES = ["v3:2x2", "v3:4x4", "v3:8x8", "v3:16x16", "v3:32x32"]
NAMES = st.sampled_from(
    [*SQUARES, "v3:4x8", "v4:2x2x1", "v4:4x4x8", "v5e:4x4", "v5e:16x16", "v5p:8x8x8", "v6e:1x1"]
)
KINDS = st.sampled_from(COLLECTIVES)


def _all(kind, name, num_bytes=32 * MB):
    """Seconds of a collective among all devices of a slice."""
    topology = Topology.parse(name)
    return interconnect.seconds(kind, num_bytes, topology.num_devices, topology)


def _exponent(kind, small, large, num_bytes):
    """Returns p of time ~ devices^p."""
    devices = [Topology.parse(name).num_devices for name in (small, large)]
    times = [_all(kind, name, num_bytes) for name in (small, large)]
    return math.log(times[1] / times[0]) / math.log(devices[1] / devices[0])


def test_an_all_reduce_hardly_depends_on_the_number_of_devices():
    """Paper, figure 9: about O(1) from 8 to 2048 devices (2x2 chips have half the links, so it falls first)."""
    times = [_all("all-reduce", name) for name in SQUARES]
    assert all(larger < 1.5 * smaller for smaller, larger in itertools.combinations(times, 2))


@pytest.mark.parametrize("num_bytes", [8 * MB, 32 * MB])
def test_an_all_to_all_grows_with_the_root_of_the_number_of_devices(num_bytes):
    """Paper, section 5.2 and figure 9: about O(sqrt D)."""
    for small, large in itertools.pairwise(SQUARES[1:]):
        assert 0.4 < _exponent("all-to-all", small, large, num_bytes) < 0.6


def test_an_all_reduce_by_hand():
    # 32 x 32 chips of four links, at 82 GB/s: twice 1023/1024 of the bytes; 16 hops a dimension.
    expected = 2 * 82e6 * 1023 / 1024 / (4 * 82e9) + 2 * 32 * torus.SECONDS_PER_HOP
    assert _all("all-reduce", "v3:32x32", 82_000_000) == pytest.approx(
        expected + torus.SECONDS_PER_OPERATION
    )


def test_an_all_to_all_by_hand():
    # Half of what a 16-ring's chips send crosses its middle over two links: 16/8 = 2 of what one sends,
    # and the two devices of a chip send one each.
    expected = 2 * 2 * 82e6 / 82e9 + 16 * torus.SECONDS_PER_HOP
    assert _all("all-to-all", "v3:16x16", 82_000_000) == pytest.approx(
        expected + torus.SECONDS_PER_OPERATION
    )


@pytest.mark.parametrize("chips", [1, 2, 3, 4, 5, 8, 16, 31, 32])
def test_the_busiest_link_of_an_all_to_all(chips):
    line, ring = (torus._busiest_link(chips, wraps) for wraps in (False, True))
    pairs = [(source, target) for source in range(chips) for target in range(chips)]
    crossing = [sum(source <= link < target for source, target in pairs) for link in range(chips)]
    assert line == pytest.approx(max(crossing) / chips)
    # All links of a ring carry the same: the mean distance over two links a chip.
    distance = sum(min(d, chips - d) for d in range(chips)) / chips
    assert ring == pytest.approx(distance / 2)


@given(NAMES, st.integers(2**20, 2**34))
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(name, num_bytes):
    topology = Topology.parse(name)
    if topology.num_chips > 1:
        parts = [_all(kind, name, num_bytes) for kind in ("reduce-scatter", "all-gather")]
        assert _all("all-reduce", name, num_bytes) == pytest.approx(
            sum(parts) - torus.SECONDS_PER_OPERATION
        )


def test_a_group_of_the_two_cores_of_a_chip_uses_no_link():
    pod = Topology.parse("v3:32x32")
    within, between = (interconnect.seconds("all-to-all", 32 * MB, n, pod) for n in (2, 8))
    assert within < between


def test_a_part_of_a_ring_is_slower_than_a_ring():
    """An 8x8 box of 32x32 chips has ends; a slice of 8x8 closes to rings."""
    part = interconnect.seconds("all-to-all", 32 * MB, 128, Topology.parse("v3:32x32"))
    assert part > 1.5 * _all("all-to-all", "v3:8x8")


@pytest.mark.parametrize("pairs", [(), ((0, 1), (1, 2)), ((0, 2), (1, 3))])
def test_a_permute_goes_over_a_link_where_a_chip_has_two_devices(pairs):
    v3 = Topology.parse("v3:4x4")
    both_cores = 2 * 82_000_000 / v3.chip.link_bandwidth
    lies = interconnect.spread(pairs, v3)
    found = interconnect.seconds("collective-permute", 82_000_000, 2, v3, lies)
    assert found == pytest.approx(both_cores, rel=0.01)


def test_a_permute_between_the_cores_of_each_chip_uses_no_link():
    v3 = Topology.parse("v3:4x4")
    lies = interconnect.spread(((0, 1), (1, 0), (2, 3), (3, 2)), v3)
    found = interconnect.seconds("collective-permute", 82_000_000, 2, v3, lies)
    assert found == pytest.approx(82_000_000 / v3.hbm_bandwidth, rel=0.05)
