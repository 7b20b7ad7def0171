"""Names of machines taken apart, for the engine and the planner."""

import pytest

from lingvo_moe.core.gpu_memory import MEMORY_BYTES
from lingvo_moe.core.topology_names import TopologyName


@pytest.mark.parametrize("text, kind, sizes", [
    ("v3:32x32", "v3", (32, 32)),
    ("v5p:4x4x8", "v5p", (4, 4, 8)),
    ("h100:32x8", "h100", (32, 8)),
    ("a100-40:1x8", "a100-40", (1, 8)),
    ("h100:8", "h100", (8,)),
])  # fmt: skip
def test_a_name_has_a_kind_and_sizes(text, kind, sizes):
    name = TopologyName.parse(f" {text} ")
    assert (name.kind, name.sizes) == (kind, sizes)
    assert str(name) == text


@pytest.mark.parametrize("sizes", ["", "8x", "x8", "08x8", "onex8", "1234567x8", "-1x8"])
def test_sizes_that_cannot_be_read_are_none(sizes):
    assert TopologyName.parse(f"h100:{sizes}") == TopologyName("h100", ())


@pytest.mark.parametrize("text", ["v3:2x2", "v9:2x2", "v5p", "v12e:2x2", ""])
def test_a_kind_like_a_tpu_generation(text):
    assert TopologyName.parse(text).is_tpu


@pytest.mark.parametrize("text", ["v100:1x8", "tpu:2x2", "3:2x2", "h10", *MEMORY_BYTES])
def test_other_kinds_are_gpus(text):
    assert not TopologyName.parse(text).is_tpu


@pytest.mark.parametrize(
    "text, slices", [("v5p:4x4x4*2", 2), ("v5e:16x16*300", 300), ("v5p:4x4x4", 1)]
)
def test_a_machine_of_several_slices(text, slices):
    name = TopologyName.parse(text)
    assert (name.slices, str(name)) == (slices, text)
    assert str(name.one_slice) == text.partition("*")[0]


@pytest.mark.parametrize("slices", ["", "0", "two", "-2", "02", "2*2", "2x", "1234567", " 2"])
def test_a_number_of_slices_that_cannot_be_read_is_0(slices):
    assert TopologyName.parse(f"v5p:4x4x4*{slices}") == TopologyName("v5p", (4, 4, 4), 0)
