"""TPU slices by name: their chips, devices and links, with figures from public data sheets.

A name is a generation and the number of chips in each dimension, e.g. 'v3:32x32'; 'v5p:4x4x4*2' are two equal slices,
joined by the data-centre network. Figures are from the Google Cloud documents "TPU v3", "TPU v4", "TPU v5e", "TPU v5p"
and "TPU v6e" (key specifications), except the memory that a program may use: that is the limit that the TPU compiler
(libtpu 0.0.42) prints when it refuses a program, a little below the chip's memory.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lingvo_moe.analysis.plans.machines.base_machine import Machine, PlanError
from lingvo_moe.analysis.plans.machines.pace import pace_of
from lingvo_moe.core.config.checks import did_you_mean, either
from lingvo_moe.core.topology_names import TopologyName

_GIB = 2**30
_MOST_SLICES = 256  # more would be a slip


@dataclass(frozen=True)
class Chip:
    """The figures of one chip of a generation. A device is what JAX calls a device."""

    generation: str  # e.g. 'v3'
    hbm_gib: float  # GiB per device that a program may use, including its arguments and code
    peak_flops: float  # bfloat16 FLOP/s per device; a multiply-add counts as two
    hbm_bandwidth: float  # bytes/s per device
    link_bandwidth: float  # bytes/s of one link between chips, in one direction
    clock_hz: float  # clock rate, which turns the compiler's cycles into seconds
    # Chips in each dimension of the largest slice; a 3-D slice may have another shape with the same number of chips.
    max_dims: Sequence[int] = field(hash=False)
    host_bandwidth: float  # bytes/s per chip from or to its host over PCI Express, in one direction
    devices_per_chip: int = 1  # v3 has two: its two cores
    # Bytes of main memory of a host with four chips; 0 where no figure is published.
    host_memory: int = 0
    # Bytes/s per chip to other slices over the data-centre network, in one direction: its share of its host's network
    # interfaces. 0 where no figure is published.
    dcn_bandwidth: float = 0.0
    tile: int = 128  # rows and columns of a matrix unit
    fp8_flops: float = 0.0  # FLOP/s per device of products of 8-bit numbers; 0: as bfloat16
    host_of_eight: bool = False  # whether a slice of 2x4 chips has one host, with twice the memory

    @property
    def hbm_bytes(self) -> int:
        return int(self.hbm_gib * _GIB)


# Where figures of tpus.json come from that are not key specifications:
# The data-centre network: "DCN bandwidth per chip" of v5p (50 Gbit/s); that of a pod over its chips for v5e (6.4 Tbit/s
# over 256) and v6e (25.6 Tbit/s over 256), which is also that of the interfaces of a host over its eight chips.
# The way to the host: Google's data sheets do not state it. "How to Scale Your Model" (Austin et al. 2025, chapter 2)
# has 16 GB/s each way for v4, 32 GB/s for v6e, and about 15 GB/s for chips in general: assumed for the others.
# Hosts: machine types ct4p-hightpu-4t, ct5lp-hightpu-4t, ct5p-hightpu-4t and ct6e-standard-4t, in decimal gigabytes.
# Links: v3's 656 Gbit/s are from Jouppi et al. 2020, "A Domain-Specific Supercomputer for Training
# Deep Neural Networks"; v4's follow from the pod's all-reduce bandwidth (1.1 PB/s over 4096 chips of
# six links); the others are half of the bidirectional bandwidth per chip, over the chip's links.
# Clocks: peak_flops over what the matrix units do in a cycle. The compiler's cycles for a bfloat16
# product of 8192x8192 then come to 1.03 (v3), 1.08 (v4), 1.14 (v5e), 1.11 (v5p) and 1.42 (v6e) times
# what the peak would take; v6e's, whose units the documents do not describe fully, is doubtful.
_TPUS: Mapping[str, Any] = json.loads(Path(__file__).with_name("tpus.json").read_text("utf-8"))
CHIPS = {name: Chip(**figures, generation=name) for name, figures in _TPUS.items()}


@dataclass(frozen=True, kw_only=True)
class Topology(Machine):
    """A slice, or several equal ones: chips in a grid of two or three dimensions, some of which close to rings.

    A slice holds num_devices // slices devices with numbers in a row.
    """

    chip: Chip  # what each chip has
    dims: tuple[int, ...]  # chips of a slice in each dimension
    slices: int = 1  # the number of slices, which the data-centre network joins

    @classmethod
    def parse(cls, name: str) -> "Topology":
        """Makes a topology from a name such as 'v3:32x32', 'v4:4x4x8' or 'v5p:4x4x4*2'.

        Raises:
            PlanError: no such generation, unreadable dimensions, a slice that does not exist, or several slices of a
                generation for which no figure of the network between them is published.
        """
        parsed = TopologyName.parse(name.lower())
        generation = parsed.kind
        if generation not in CHIPS:
            raise PlanError(
                f"topology {name!r}: no TPU generation {generation!r}{did_you_mean(generation, CHIPS)}; "
                "a topology is e.g. v3:32x32"
            )
        chip = CHIPS[generation]
        example = f"{generation}:{'x'.join(str(n) for n in chip.max_dims)}"
        if not parsed.sizes:
            raise PlanError(
                f"topology {name!r}: expected the chips in each dimension after the generation, e.g. {example}"
            )
        _check_dims(name, chip, parsed.sizes, example)
        _check_slices(name, chip, parsed)
        dims, slices = parsed.sizes, parsed.slices
        chip_devices, chips = chip.devices_per_chip, math.prod(dims)
        one_host_of_eight = chip.host_of_eight and sorted(dims) == [2, 4]
        source = "stated" if chip.generation in ("v4", "v6e") else "assumed"
        return cls(
            name=str(parsed),
            chip=chip,
            dims=dims,
            slices=slices,
            num_devices=slices * chips * chip_devices,
            num_chips=slices * chips,
            hbm_bytes=chip.hbm_bytes,
            hbm_bandwidth=chip.hbm_bandwidth,
            # In bfloat16 float32 is multiplied too, by default.
            peaks={"bfloat16": chip.peak_flops, "fp8": chip.fp8_flops or chip.peak_flops},
            tile=chip.tile,
            pace=pace_of(generation),
            clock_hz=chip.clock_hz,
            node_devices=chips * chip_devices if slices > 1 else 0,
            host_devices=(8 if one_host_of_eight else min(4, chips)) * chip_devices,
            host_memory_bytes=chip.host_memory * (2 if one_host_of_eight else 1),
            host_bandwidth=chip.host_bandwidth / chip_devices,
            host_source=f"{source}, after How to Scale Your Model (2025); no data sheet has it",
        )

    @property
    def generation(self) -> str:
        """The generation of its chips, e.g. 'v3'."""
        return self.chip.generation

    @property
    def slice_chips(self) -> int:
        return math.prod(self.dims)

    @property
    def dcn_bandwidth(self) -> float:
        """Bytes/s, one way, that a device sends to other slices."""
        return self.chip.dcn_bandwidth / self.chip.devices_per_chip

    def Describe(self) -> dict[str, Any]:
        """The figures of the slice that go into a plan's `topology`."""
        several = {"slices": self.slices, "dcn_bandwidth": self.dcn_bandwidth}
        return {
            **super().Describe(),
            "generation": self.generation,
            "torus": list(self.dims),
            "link_bandwidth": self.chip.link_bandwidth,
            "clock_hz": self.clock_hz,
            **(several if self.slices > 1 else {}),
        }

    @property
    def wraps(self) -> tuple[bool, ...]:
        """Whether the last chip of each dimension has a link to its first, so that the dimension is a ring.

        v3: every dimension with more than two chips, since the documents call every slice a torus
        (two chips have only one link between them). v4, v5p: slices made of complete 4x4x4 cubes.
        v5e, v6e: only a dimension that spans the pod, 16 chips.
        """
        if len(self.chip.max_dims) == 3:
            cubes = len(self.dims) == 3 and all(n % 4 == 0 for n in self.dims)
            return tuple(cubes for _ in self.dims)
        if self.generation == "v3":
            return tuple(n > 2 for n in self.dims)
        return tuple(n == 16 for n in self.dims)


def _check_dims(name: str, chip: Chip, dims: tuple[int, ...], example: str) -> None:
    most, count = chip.max_dims, len(chip.max_dims)
    if len(dims) == 3 and count == 2 and dims[2] == 1:
        raise PlanError(
            f"topology {name!r}: {chip.generation} has two dimensions; leave out the last, which is 1"
        )
    if len(dims) != count:
        first = "x".join(map(str, dims[:count]))
        several = f"; several slices are written {chip.generation}:{first}*{dims[-1]}"
        raise PlanError(
            f"topology {name!r}: {chip.generation} slices have {count} dimensions, not {len(dims)}; "
            f"the largest is {example}{several if len(dims) == count + 1 and dims[-1] > 1 else ''}"
        )
    # 3-D slices are cubes of 4x4x4 chips joined by switches, so only the number of chips is limited.
    too_large = math.prod(dims) > math.prod(most) if count == 3 else max(dims) > max(most)
    if too_large:
        raise PlanError(f"topology {name!r}: the largest slice of {chip.generation} is {example}")
    if math.prod(dims) > 1 and (dims[0] % 2 or dims[1] % 2):
        raise PlanError(
            f"topology {name!r}: hosts have 2x2 chips, so the first two dimensions have to be even"
        )


def _check_slices(name: str, chip: Chip, parsed: TopologyName) -> None:
    if not 1 <= parsed.slices <= _MOST_SLICES:
        raise PlanError(
            f"topology {name!r}: expected a number of slices from 1 to {_MOST_SLICES} after the *, e.g."
            f" {parsed.one_slice}*2"
        )
    if parsed.slices > 1 and not chip.dcn_bandwidth:
        generations = [c.generation for c in CHIPS.values() if c.dcn_bandwidth]
        raise PlanError(
            f"topology {name!r}: no rate of the data-centre network between slices of {chip.generation} is published;"
            f" several slices can be of {either(generations)}"
        )
