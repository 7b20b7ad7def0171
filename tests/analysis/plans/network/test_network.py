"""The door to the interconnect models: what both machines share, and what cannot be asked."""

import pytest
from hypothesis import given, strategies as st
from refusals import refuses

from lingvo_moe.analysis.plans.machines.base_machine import PlanError
from lingvo_moe.analysis.plans.machines.gpu_cluster import Cluster
from lingvo_moe.analysis.plans.machines.machine import parse_machine
from lingvo_moe.analysis.plans.machines.topology import Topology
from lingvo_moe.analysis.plans.network import interconnect
from lingvo_moe.analysis.programs.hlo.collectives import COLLECTIVES

MACHINES = [Topology.parse(name) for name in ("v3:32x32", "v4:4x4x8", "v5e:4x4")] + [
    Cluster.parse(name) for name in ("h100:1x8", "a100:32x4", "l40s:4x8", "b200:64x1")
]
KINDS = st.sampled_from(COLLECTIVES)
BYTES = st.integers(0, 2**40)


@given(KINDS, st.sampled_from(MACHINES), BYTES)
def test_one_participant_needs_no_network(kind, machine, num_bytes):
    assert interconnect.seconds(kind, num_bytes, 1, machine) == 0


@given(KINDS, st.sampled_from(MACHINES), BYTES, BYTES)
def test_more_bytes_take_no_less_time(kind, machine, a, b):
    few, many = (
        interconnect.seconds(kind, n, machine.num_devices, machine) for n in sorted((a, b))
    )
    assert 0 < few <= many


@pytest.mark.parametrize("machine", [Topology.parse("v3:2x2"), Cluster.parse("h100:2x4")])
@refuses(
    PlanError,
    (("all-reduced", 8, 8), r"no collective 'all-reduced' \(did you mean 'all-reduce'"),
    (("all-reduce", 8, 9), "9 participants: .* has 8 devices"),
    (("all-reduce", 8, 0), "0 participants"),
    (("all-reduce", -1, 8), "must not be negative"),
)
def test_what_cannot_be_asked(arguments, machine):
    interconnect.seconds(*arguments, machine)


@pytest.mark.parametrize("name, parts", [
    ("v3:32x32", "32x32 chips, 82 GB/s, The 2 devices of a chip, 1 us, assumptions"),
    ("v5e:4x4", "no dimension closes"),
    ("v5p:4x4x4*2", "2 slices, 6.25 GB/s, not measured, 50 us, a grid of 4x4x4"),
    ("h100:32x8", "32 nodes of 8, NVLink, 450 GB/s, 50 GB/s, assumption, 8.4 us, 14 us"),
    ("l4:2x4", "PCI Express carries 32 GB/s"),
])  # fmt: skip
def test_a_description_has_the_figures(name, parts):
    text = interconnect.describe(parse_machine(name))
    assert [part for part in parts.split(", ") if part not in text] == []
