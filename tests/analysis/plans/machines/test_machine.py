"""Machines by name: TPU slices and GPU clusters, and one line for what is neither."""

import pytest

from lingvo_moe.analysis.plans.machines.base_machine import PlanError
from lingvo_moe.analysis.plans.machines.gpu_cluster import CARDS, Cluster
from lingvo_moe.analysis.plans.machines.machine import parse_machine
from lingvo_moe.analysis.plans.machines.topology import Topology
from lingvo_moe.analysis.programs.aot.gpu_targets import TARGETS
from lingvo_moe.core.gpu_memory import MEMORY_BYTES, XLA_SHARE


def test_a_name_is_a_slice_or_a_cluster():
    slice_, cluster = parse_machine("v3:2x2"), parse_machine(" H100:2x4 ")
    assert isinstance(slice_, Topology) and isinstance(cluster, Cluster)
    assert (slice_.num_devices, cluster.num_devices) == (8, 8)
    for machine in (slice_, cluster):
        described = machine.Describe()
        assert (described["name"], described["devices"]) == (machine.name, 8)
        assert described["hbm_bytes"] == machine.hbm_bytes
        assert described["peak_flops"] == machine.peaks["bfloat16"]
    assert "generation" in slice_.Describe() and "card" in cluster.Describe()
    assert cluster.hbm_bytes == int(XLA_SHARE * cluster.card.memory_bytes)


@pytest.mark.parametrize("name, told", [
    ("h10:1x8", "no TPU generation and no GPU 'h10' .did you mean 'h100'"),
    ("h100", "expected nodes x GPUs of a node after the card, e.g. h100:32x8"),
    ("h100:0x8", "expected nodes x GPUs"),
    ("a100:5x3", "a node of 3 GPUs; a node has 1, 2, 4 or 8$"),
    ("h100:8x16", "a node of 16 GPUs; .*the nodes come first: h100:16x8"),
    ("h100:2x8*2", "only TPUs have slices; .* e.g. h100:4x8"),
    ("", r"no TPU generation '' \(known: tpu7x, v3, v4, v5e, v5p, v6e\)"),
    ("v55p:4x4x4*2", r"no TPU generation 'v55p' \(did you mean 'v5p'"),
    ("v3", "expected the chips in each dimension after the generation, e.g. v3:32x32"),
    ("v3:0x2", "expected the chips"),
    ("v3:2x2x1", "v3 has two dimensions; leave out the last"),
    ("v3:2x2x2", "v3 slices have 2 dimensions, not 3"),
    ("v4:4x4", "v4 slices have 3 dimensions, not 2; the largest is v4:16x16x16"),
    ("v5p:4x4x4x2", r"not 4; .* several slices are written v5p:4x4x4\*2"),
    ("v5p:4x4x4*", r"a number of slices from 1 to 256 after the \*, e.g. v5p:4x4x4\*2"),
    ("v5p:4x4x4*257", "a number of slices from 1 to 256"),
    ("v3:4x4*2", "between slices of v3 is published; several slices can be of v5e, v5p, v6e or tpu7x"),
    ("v3:64x32", "the largest slice of v3 is v3:32x32"),
    ("v5p:24x24x24", "the largest slice of v5p is v5p:16x16x24"),
    ("v3:3x2", "the first two dimensions have to be even"),
])  # fmt: skip
def test_a_machine_that_does_not_exist(name, told):
    with pytest.raises(PlanError, match=told) as e:
        parse_machine(name)
    assert f"topology {name!r}" in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("name", CARDS)
def test_the_compiler_is_told_of_the_same_card(name):
    """The engine describes cards to the compiler; the planner has their data sheets."""
    card, target = CARDS[name], TARGETS[name]
    assert target.memory_bytes == card.memory_bytes
    assert target.memory_bandwidth == pytest.approx(card.hbm_bandwidth, rel=0.01)
    lanes = 2 * target.multiprocessors * target.lanes * target.clock_ghz * 1e9
    assert lanes == pytest.approx(card.peak_flops["float32"], rel=0.05)


def test_every_card_has_a_description():
    assert TARGETS.keys() == CARDS.keys() == MEMORY_BYTES.keys()
