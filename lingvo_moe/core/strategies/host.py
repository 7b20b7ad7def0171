"""The devices of this process as a machine: virtual CPU devices, in round figures (planner/machines/ring.py).

These only order candidates; what counts is measured afterwards."""

from dataclasses import dataclass

from lingvo_moe.core.planner.machines.ring import VIRTUAL_CPU


@dataclass(frozen=True)
class Host:
    """The devices of this process.

    Attributes:
        num_devices: how many there are.
        hbm_bytes: memory that a program may use on one of them.
    """

    num_devices: int
    hbm_bytes: int

    @property
    def name(self) -> str:
        """The name of these devices in messages."""
        return f"the {self.num_devices} devices here"

    @property
    def num_chips(self) -> int:
        """As many as devices."""
        return self.num_devices

    @property
    def peaks(self) -> dict[str, float]:
        """FLOP/s by the type of operands."""
        return {"bfloat16": VIRTUAL_CPU.flops}

    @property
    def hbm_bandwidth(self) -> float:
        """Bytes/s of a device's memory."""
        return VIRTUAL_CPU.memory_bandwidth

    @property
    def host_bandwidth(self) -> float:
        """Bytes/s from and to the memory of the host, which is the devices' own."""
        return VIRTUAL_CPU.memory_bandwidth
