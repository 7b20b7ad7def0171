"""The share of a machine's rates that a training step reaches: the only fitted numbers of the model of time.

A generation has at most two, fitted to steps that others measured and published (docs/validation.md), on a part of the
rows there. A generation without a measured row has those of its nearest relative, and says so.
"""

from dataclasses import dataclass

# By how much a step may exceed its work and network one after the other, at the machine's pace: the upper bound.
MARGIN = 1.25


@dataclass(frozen=True)
class Pace:
    """The seconds of a step from those of its parts."""

    # The seconds of work at the machine's rates, as a share of those that it takes.
    efficiency: float = 1.0
    overlap: float = 0.0  # the share of the shorter of work and network that runs beside the longer
    source: str = ""  # the machines to whose steps it was fitted

    def Seconds(self, work: float, network: float, waiting: float = 0.0) -> float:
        """The estimate of a step.

        Args:
            work: seconds of the instructions, one after the other, each at the peak or at full bandwidth.
            network: seconds of collectives.
            waiting: seconds that nothing hides: for the host's memory, and of transfers between slices.
        """
        work /= self.efficiency
        return work + network - self.overlap * min(work, network) + waiting

    def Bounds(
        self, arithmetic: float, memory: float, work: float, network: float, waiting: float
    ) -> tuple[float, float]:
        """The least and the most seconds of a step: the longest of its resources, and all one after the other.

        Args:
            arithmetic: seconds of products at the peak.
            memory: seconds of memory traffic at full bandwidth.
            work, network, waiting: as for Seconds.
        """
        most = MARGIN * (work / self.efficiency + network + waiting)
        return max(arithmetic, memory, network), most


AS_RATED = Pace()  # rates as they are, and nothing overlapped
# By TPU generation or card; to two digits. TPUs from v4 on and GPUs have one overlap each.
_HOPPER = Pace(0.65, 0.5, "H100 and H200")
_AMPERE = Pace(0.71, 0.5, "A100")
_V6E = Pace(0.8, 0.9, "v6e")
PACES = {
    "v3": Pace(0.73, 0.0, "v3"),
    "v4": Pace(0.72, 0.9, "v4"),
    "v5e": Pace(0.83, 0.9, "v5e"),
    "v5p": Pace(0.82, 0.9, "v5p"),
    "v6e": _V6E,
    "tpu7x": _V6E,
    **dict.fromkeys(("a100", "a100-40"), _AMPERE),
    **dict.fromkeys(("h100", "h200", "h800", "b200", "gb200", "l40s", "l4"), _HOPPER),
}


def pace_of(kind: str) -> Pace:
    """The pace of a TPU generation or a card."""
    return PACES[kind]
