"""TPU slices and GPU clusters by name: what the compiler counts and allows, data sheets, slices to try, peaks."""

import itertools
import os
import re
from pathlib import Path

import pytest
import tensorflow as tf

from lingvo_moe.analysis.plans.machines.base_machine import PlanError
from lingvo_moe.analysis.plans.machines.gpu_cluster import CARDS, Cluster
from lingvo_moe.analysis.plans.machines.machine import parse_machine
from lingvo_moe.analysis.plans.machines.peaks import peak_flops
from lingvo_moe.analysis.plans.machines.slices import machines, slices
from lingvo_moe.analysis.plans.machines.topology import CHIPS, Topology
from lingvo_moe.analysis.programs.aot import aot
from lingvo_moe.analysis.programs.aot.gpu_targets import TARGETS
from lingvo_moe.core.engine.lowering.lowering import lower
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.gpu_memory import MEMORY_BYTES, XLA_SHARE
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.training.peak import matmul_flops_per_second

SMALLEST = {
    "v3": "v3:2x2",
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}


def _largest(generation):
    return f"{generation}:{'x'.join(str(n) for n in CHIPS[generation].max_dims)}"


def test_a_whole_v3_pod():
    pod = Topology.parse("v3:32x32")
    assert (pod.name, pod.generation, pod.dims) == ("v3:32x32", "v3", (32, 32))
    assert (pod.num_chips, pod.num_devices) == (1024, 2048)
    assert pod.wraps == (True, True)
    # 126 petaflops (TPU v3, key specifications)
    assert pod.chip.peak_flops * pod.num_devices == pytest.approx(126e15, rel=0.01)


def test_several_slices():
    pods = Topology.parse(" V5P:4x4x4*2 ")
    assert (pods.name, pods.dims, pods.slices) == ("v5p:4x4x4*2", (4, 4, 4), 2)
    assert pods.slice_chips == 64
    assert (pods.num_chips, pods.num_devices) == (128, 128)
    assert pods.wraps == (True, True, True)
    assert pods.Describe()["slices"] == 2 and pods.Describe()["chips"] == 128
    # Google Cloud, TPU v5p: 50 Gbit/s a chip
    assert pods.Describe()["dcn_bandwidth"] == pods.dcn_bandwidth == 6.25e9
    assert "slices" not in Topology.parse("v5p:4x4x4").Describe()
    assert Topology.parse("v5p:4x4x4*1") == Topology.parse("v5p:4x4x4")


@pytest.mark.parametrize("name", ["v5p:4x4x4*2", "v5e:4x4*3", "v6e:2x2*12", "v5e:1x1*2"])
def test_devices_of_several_slices_are_those_of_the_compiler(name):
    topology = Topology.parse(name)
    devices = aot.devices_of(name)
    slices = [device.slice_index for device in devices]
    size = topology.num_devices // topology.slices
    assert slices == [i // size for i in range(topology.num_devices)]


@pytest.mark.parametrize("name", [*SMALLEST.values(), *map(_largest, CHIPS), "v5e:1x1", "v4:4x4x8"])
def test_devices_are_those_of_the_compiler(name):
    assert Topology.parse(name).num_devices == len(aot.devices_of(name))


@pytest.mark.parametrize("generation", CHIPS)
def test_memory_is_what_the_compiler_allows(generation):
    topology = Topology.parse(SMALLEST[generation])
    shape = (topology.num_devices, 2**40)
    program = lower(
        lambda x: tf.reduce_sum(x * 2),
        [TensorSpec(shape, "int8", ("expert", None))],
        Mesh(("expert",), (topology.num_devices,)),
    )
    with pytest.raises(aot.OutOfMemory) as e:
        aot.compile_for_topology(program, topology.name)
    assert topology.chip.hbm_bytes == pytest.approx(e.value.limit_bytes, rel=1e-6)


@pytest.mark.parametrize(("name", "wraps"), [
    ("v3:2x2", (False, False)),  # one link between two chips
    ("v3:8x2", (True, False)),
    ("v5e:8x16", (False, True)),
    ("v6e:16x16", (True, True)),
    ("v4:2x2x4", (False, False, False)),
    ("v4:4x4x4", (True, True, True)),
    ("v5p:4x4x6", (False, False, False)),
    ("v5p:8x8x12", (True, True, True)),
])  # fmt: skip
def test_which_dimensions_are_rings(name, wraps):
    assert Topology.parse(name).wraps == wraps


def test_chips_are_consistent():
    for chip in CHIPS.values():
        # A matrix unit has 128x128 cells: the clock gives a whole number of them a device.
        units = chip.peak_flops / chip.clock_hz / (2 * 128 * 128)
        assert units == pytest.approx(round(units), rel=0.01)


@pytest.mark.parametrize("generation", CHIPS)
def test_they_double_up_to_the_pod(generation):
    topologies = [Topology.parse(name) for name in slices(generation)]
    chips = [t.num_chips for t in topologies]
    assert chips == [4 * 2**i for i in range(len(chips))]
    assert chips[-1] >= {"v3": 1024, "v5e": 256, "v6e": 256}.get(generation, 4096)
    assert all(max(t.dims) <= 2 * t.dims[0] for t in topologies[1:])


@pytest.mark.parametrize("card", CARDS)
def test_clusters_double_from_one_gpu_and_fill_nodes(card):
    clusters = [Cluster.parse(name) for name in machines(card)]
    assert [c.num_devices for c in clusters] == [2**i for i in range(len(clusters))]
    assert all(c.nodes == 1 or c.gpus_per_node == CARDS[card].node_sizes[-1] for c in clusters)
    assert clusters[-1].num_devices >= 4096


@pytest.mark.parametrize("card", CARDS.values(), ids=str)
def test_the_figures_of_a_card_agree_with_each_other(card):
    assert CARDS[card.name] is card
    peaks = card.peak_flops
    assert peaks["bfloat16"] >= 1.9 * peaks["tf32"]
    assert peaks["tf32"] > peaks["float32"]
    # Inside a node data goes at least as fast as out of it, and everywhere more slowly than in a GPU's own memory.
    assert card.nic_bandwidth < card.node_bandwidth < card.hbm_bandwidth
    if card.nvlink_bandwidth:
        assert card.nvlink_bandwidth > card.pcie_bandwidth
    else:
        assert card.node_bandwidth == card.pcie_bandwidth
    assert card.source.startswith("NVIDIA ")
    assert "network: assumed" in card.source


def test_the_page_on_gpus_has_these_figures():
    page = (Path(__file__).parents[4] / "docs" / "gpus.md").read_text("utf-8")
    rows = re.findall(
        r"^\| `([a-z0-9-]+)` \| ([^|`]+) \| ([^|]+) \| ([^|]+) \|$", page, re.MULTILINE
    )
    expected = [
        (name, *(f"{v / 1e9:g}" if v else "–" for v in rates))
        for name, card in CARDS.items()
        for rates in [(card.nvlink_bandwidth, card.pcie_bandwidth, card.nic_bandwidth)]
    ]
    assert rows == expected


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


@pytest.mark.parametrize("kind, peak", [
    ("TPU v3", CHIPS["v3"].peak_flops),
    ("TPU v4", CHIPS["v4"].peak_flops),
    ("TPU v5 lite", CHIPS["v5e"].peak_flops),
    ("TPU v5p", CHIPS["v5p"].peak_flops),
    ("TPU v5", CHIPS["v5p"].peak_flops),
    ("TPU v6 lite", CHIPS["v6e"].peak_flops),
    ("TPU7x", CHIPS["tpu7x"].peak_flops),
    ("TPU v4 lite", None),
    ("TPU v9", None),
    ("NVIDIA H200", 989.4e12),
    ("NVIDIA H100 PCIe", 756e12),
    ("NVIDIA H100 80GB HBM3", 989.4e12),
    ("NVIDIA A100-SXM4-80GB", 312e12),
    ("NVIDIA L40S", 362.05e12),
    ("Tesla V100-SXM2-16GB", 125e12),
    ("Tesla V100-PCIE-32GB", 112e12),
    ("Tesla T4", 65e12),
    ("NVIDIA L4", 121e12),
    ("NVIDIA A10", 125e12),
    ("NVIDIA L40", None),
    ("NVIDIA RTX A1000", None),
    ("NVIDIA A10G", None),
    ("NVIDIA T400", None),
    ("NVIDIA H100 NVL", 835.5e12),
    ("GeForce 256", None),
])  # fmt: skip
def test_a_device_has_the_peak_of_its_data_sheet(kind, peak):
    assert peak_flops(kind) == peak


def test_other_programs_do_not_lower_a_cpus_peak(monkeypatch):
    """The peak follows from the CPU time of a product, not from the time that passes meanwhile."""
    cpu_time = itertools.count()
    monkeypatch.setattr("time.process_time", lambda: float(next(cpu_time)))
    products, seconds = 2, 3
    expected = products / seconds * 2 * 1024**3 * len(os.sched_getaffinity(0))
    assert matmul_flops_per_second(2.5) == pytest.approx(expected)
