"""The devices of this process as a machine. Nobody has measured them, so its figures only order candidates; what counts
is measured afterwards."""

from dataclasses import dataclass
from typing import ClassVar

_PASSES = {"all-reduce": 2}


@dataclass(frozen=True)
class Host:
    """The devices of this process.

    Attributes:
        num_devices: how many there are.
        hbm_bytes: memory that a program may use on one of them.
    """

    num_devices: int
    hbm_bytes: int
    # Round figures of one of eight virtual devices of a small CPU, whose exchanges are copies in memory.
    peaks: ClassVar[dict[str, float]] = {"bfloat16": 2e10, "tf32": 2e10}
    hbm_bandwidth: ClassVar[float] = 5e9
    _LATENCY: ClassVar[float] = 2e-4

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"the {self.num_devices} devices here"

    @property
    def num_chips(self) -> int:
        """As many as devices."""
        return self.num_devices

    def Collective(self, kind: str, num_bytes: float) -> float:
        """Seconds of a collective of so many bytes on a device."""
        return self._LATENCY + _PASSES.get(kind, 1) * num_bytes / self.hbm_bandwidth
