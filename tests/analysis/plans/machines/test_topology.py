"""TPU slices by name, compared with what the TPU compiler counts and allows."""

import pytest
import tensorflow as tf

from lingvo_moe.analysis.plans.machines.topology import CHIPS, Topology
from lingvo_moe.analysis.programs.aot import aot
from lingvo_moe.core.engine.lowering.lowering import lower
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.sharding import Mesh

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
