"""Equal devices in a ring, in round figures: a machine that nobody has measured or named.

Its figures only order strategies. Machines with names are in topology.py and gpu_cluster.py.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

# How often the bytes pass a link, and hops, for shares (n-1)/n of n devices. In an all-to-all half of the bytes go each
# way.
_PASSES = {
    "all-reduce": (2.0, 2),
    "all-gather": (1.0, 1),
    "reduce-scatter": (1.0, 1),
    "all-to-all": (0.5, 1),
}


@dataclass(frozen=True)
class Ring:
    """Equal devices in a ring. Its other names are those of every machine: see machine.py."""

    name: str  # for people
    flops: float  # FLOP/s of a device
    # `hbm_bandwidth`, `link_bandwidth`: bytes/s of its memory, and to the next device.
    hbm_bandwidth: float
    link_bandwidth: float
    # `operation`, `hop`: seconds that a collective takes beside its bytes, and those of each device on the way.
    operation: float
    hop: float
    num_devices: int = sys.maxsize  # as many as are asked for, where nothing is said
    hbm_bytes: int = 0  # memory that a program may use on one of them; 0: unknown

    def Seconds(self, kind: str, num_bytes: float, count: int) -> float:
        """The seconds that a collective of `count` devices takes; `num_bytes` as in interconnect.seconds."""
        if kind == "collective-permute":
            return self.operation + num_bytes / self.link_bandwidth + self.hop
        passes, rounds = _PASSES.get(kind, (1.0, 1))
        sent = passes * num_bytes * (count - 1) / count
        return self.operation + sent / self.link_bandwidth + rounds * (count - 1) * self.hop

    @property
    def peaks(self) -> Mapping[str, float]:
        """FLOP/s of a device, for all number formats."""
        return {"bfloat16": self.flops}

    @property
    def host_bandwidth(self) -> float:
        """Bytes/s from and to the memory of the host, which is the devices' own."""
        return self.hbm_bandwidth

    @property
    def clock_hz(self) -> float:
        """0: no compiler counts cycles."""
        return 0.0

    @property
    def has_nodes(self) -> bool:
        """False: all devices are in one ring."""
        return False


ACCELERATOR = Ring("an accelerator of round figures", 1e14, 1e12, 1e11, 2e-6, 1e-6)
# Eight virtual devices share the cores, and exchange through the memory of the machine.
VIRTUAL_CPU = Ring("virtual CPU devices of round figures", 1e10, 2e9, 5e8, 2e-5, 5e-6)


def here(num_devices: int, hbm_bytes: int) -> Ring:
    """The devices of this process, as virtual CPU devices; what counts is measured afterwards.

    Args:
        num_devices: how many there are.
        hbm_bytes: memory that a program may use on one of them.
    """
    name = f"the {num_devices} devices here"
    return replace(VIRTUAL_CPU, name=name, num_devices=num_devices, hbm_bytes=hbm_bytes)
