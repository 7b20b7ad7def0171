"""The machine that a plan is for: a TPU slice or a GPU cluster, by name."""

import re
from collections.abc import Mapping
from typing import Any, Protocol

from lingvo_moe.core.planner.errors import PlanError
from lingvo_moe.core.planner.gpu_cluster import CARDS, Cluster
from lingvo_moe.core.planner.topology import CHIPS, Topology
from lingvo_moe.core.suggest import did_you_mean


class Machine(Protocol):
    """What a plan asks of a machine. `Topology` and `Cluster` are the two kinds."""

    @property
    def name(self) -> str:
        """As the compiler takes it, e.g. 'v3:32x32'."""

    @property
    def num_devices(self) -> int:
        """The number of devices as JAX counts them."""

    @property
    def num_chips(self) -> int:
        """The number of chips, or of GPUs."""

    @property
    def hbm_bytes(self) -> int:
        """Memory of a device that a program may use."""

    @property
    def hbm_bandwidth(self) -> float:
        """Bytes/s between a device and its memory."""

    @property
    def peaks(self) -> Mapping[str, float]:
        """FLOP/s of a device's matrix products by number format, of which 'bfloat16' is one.

        The formats are those of `flops.FORMATS`; the peak of one that is missing is that of bfloat16.
        """

    @property
    def clock_hz(self) -> float:
        """The rate of the cycles that the compiler counts; 0 if it counts none."""

    def Describe(self) -> dict[str, Any]:
        """The figures of the machine that go into a plan's `topology`, without the network's."""


def is_gpu(name: str) -> bool:
    """Whether a name, with or without a size, is of a known GPU."""
    return name.strip().lower().partition(":")[0] in CARDS


def parse_machine(name: str) -> Topology | Cluster:
    """Makes a machine from a name: 'v3:32x32' is a TPU slice, 'h100:32x8' a GPU cluster.

    Raises:
        PlanError: no such generation or card, unreadable sizes, or a machine that does not exist.
    """
    kind = name.strip().lower().partition(":")[0]
    if kind in CARDS:
        return Cluster.parse(name)
    if kind in CHIPS or re.fullmatch(r"(v\d{1,2}[a-z]?)?", kind):
        return Topology.parse(name)
    known = [*CHIPS, *CARDS]
    raise PlanError(
        f"topology {name!r}: no TPU generation and no GPU {kind!r}{did_you_mean(kind, known)}; a topology is e.g."
        " v3:32x32 or h100:32x8"
    )
