"""A machine as plans and searches see it: equal devices, their memory and arithmetic, and their hosts."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lingvo_moe.analysis.plans.machines.pace import AS_RATED, Pace


class PlanError(ValueError):
    """A request cannot be planned; the message names the value and what would be right."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Equal devices. A device is what JAX calls a device; rates are those of one device, in one direction."""

    name: str  # e.g. 'v3:32x32', 'v5p:4x4x4*2' for two slices, or 'h100:32x8'
    num_devices: int = sys.maxsize  # the default is any number
    num_chips: int = 0
    hbm_bytes: int = 0  # memory of a device that a program may use; 0: unknown
    hbm_bandwidth: float  # bytes/s between a device and its memory
    # FLOP/s of matrix products by number format, of which 'bfloat16' is one.
    peaks: Mapping[str, float] = field(hash=False)
    tile: int = 1  # rows and columns of its matrix unit, whole multiples of which it multiplies
    pace: Pace = AS_RATED  # how much of these rates a step reaches
    # What a turn of a loop whose length depends on data takes beside its work; 0: nothing that was measured.
    turn_seconds: float = 0.0
    clock_hz: float = 0.0  # rate of the cycles that the compiler counts; 0 if it counts none
    # Devices of a node (or slice), inside of which the network is faster; 0 where all devices are in one network.
    node_devices: int = 0
    host_devices: int = 0  # devices of a host; 0 where the devices' memory is the host's
    host_memory_bytes: int = 0  # main memory of a host; 0: no figure is published
    host_bandwidth: float  # bytes/s between a device and its host
    host_source: str = ""  # where this figure comes from

    def Describe(self) -> dict[str, Any]:
        """The figures that go into a plan's `topology`."""
        return {
            "name": self.name,
            "devices": self.num_devices,
            "chips": self.num_chips,
            "hbm_bytes": self.hbm_bytes,
            "peak_flops": self.peaks["bfloat16"],
            "hbm_bandwidth": self.hbm_bandwidth,
        }
