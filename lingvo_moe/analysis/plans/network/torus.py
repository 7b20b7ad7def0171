"""The interconnect model of a TPU slice: how long a collective takes, from the bytes each link carries.

Nothing is fitted. The busiest link sets the time. Where all links can be kept equally busy, the chip
with the fewest links sets it. Each hop between chips adds a latency.
"""

import functools
import itertools
import math
from dataclasses import dataclass

from lingvo_moe.analysis.plans.machines.topology import Topology
from lingvo_moe.analysis.plans.network.two_levels import Spread

# Assumptions, of the order commonly quoted for TPUs; no data sheet gives them.
SECONDS_PER_HOP = 1e-6
SECONDS_PER_OPERATION = 2e-6


@dataclass(frozen=True)
class _Group:
    """The box of chips that one replica group occupies."""

    dims: tuple[int, ...]  # chips in each dimension
    wraps: tuple[bool, ...]  # whether each dimension closes to a ring
    devices_per_chip: int  # devices of the group on each chip
    sharing: int = 1  # groups that send over the links of each chip

    @property
    def chips(self) -> int:
        return math.prod(self.dims)


def seconds(
    kind: str,
    num_bytes: float,
    participants: int,
    topology: Topology,
    lies: Spread | None = None,
) -> float:
    """Estimates how long one collective of at least two participants takes; see network.seconds.

    All groups work at the same time, each in its own box of neighbouring chips; those of the devices of one chip share
    its links.
    """
    on_chip = lies.inside if lies else min(topology.chip.devices_per_chip, participants)
    group = _group(participants, topology, on_chip)
    bandwidth = topology.chip.link_bandwidth
    # A permute's group is a pair, and most pairs lie on two chips where nothing is said.
    placed = lies is not None or kind != "collective-permute" or topology.slice_chips == 1
    if group.chips == 1 and placed:
        # All participants are on one chip, so the data goes through its memory and over no link.
        return SECONDS_PER_OPERATION + num_bytes / topology.chip.hbm_bandwidth
    link_bytes, hops = _load(kind, num_bytes, group)
    return SECONDS_PER_OPERATION + group.sharing * link_bytes / bandwidth + hops * SECONDS_PER_HOP


def describe(topology: Topology) -> str:
    """Explains the model and its figures for a slice, in sentences for the reader of a plan."""
    chip, dims = topology.chip, "x".join(str(n) for n in topology.dims)
    closed = [str(i) for i, wraps in enumerate(topology.wraps) if wraps]
    rings = f"dimensions {', '.join(closed)} close to rings" if closed else "no dimension closes"
    shared = (
        f" The {chip.devices_per_chip} devices of a chip share its links."
        if chip.devices_per_chip > 1
        else ""
    )
    subject = "a slice" if topology.slices > 1 else topology.name
    return (
        f"{subject} is a grid of {dims} chips; {rings}; a link carries"
        f" {chip.link_bandwidth / 1e9:g} GB/s each way.{shared}"
        " All-reduce, all-gather and reduce-scatter run pipelined rings in all dimensions at once, so"
        " the chip with the fewest links sets their pace, whatever the number of chips."
        " In an all-to-all every device sends equal parts to all others, each the shorter way, one"
        " dimension after the other; the busiest link sets the pace."
        " A permute goes to a neighbouring chip over one link."
        f" Each chip on the way adds {SECONDS_PER_HOP * 1e6:g} us and each operation"
        f" {SECONDS_PER_OPERATION * 1e6:g} us, which are assumptions, not data-sheet figures."
        " Replica groups are taken to be boxes of neighbouring chips, and collectives not to overlap with each other."
    )


def _load(kind: str, num_bytes: float, group: _Group) -> tuple[float, int]:
    """Returns (bytes over the slowest link, hops in sequence)."""
    chips, dims = group.chips, list(zip(group.dims, group.wraps, strict=True))
    # Hops between the two chips that are farthest apart.
    across = sum(n // 2 if wraps else n - 1 for n, wraps in dims)
    if kind in ("all-to-all", "ragged-all-to-all"):
        leaves_chip = num_bytes * group.devices_per_chip
        return leaves_chip * max(_busiest_link(n, wraps) for n, wraps in dims), across
    if kind == "collective-permute":
        return num_bytes * group.devices_per_chip, 1
    links = sum(_fewest_links(n, wraps) for n, wraps in dims)
    if kind == "collective-broadcast":
        return num_bytes / links, across
    # Each chip must send everything except its own part: (chips - 1) / chips of the data.
    once = num_bytes * (chips - 1) / chips / links
    return (2 * once, 2 * across) if kind == "all-reduce" else (once, across)


@functools.lru_cache(maxsize=256)
def _group(participants: int, topology: Topology, on_chip: int) -> _Group:
    """The most compact box of chips that holds `participants` devices; part of a ring is a line."""
    chips = math.ceil(participants / on_chip)
    sizes = [[n for n in range(1, size + 1) if size % n == 0] for size in topology.dims]
    boxes = [box for box in itertools.product(*sizes) if math.prod(box) >= chips]
    dims = min(boxes, key=lambda box: (math.prod(box), max(box), box))
    wraps = tuple(
        wrap and part == size
        for wrap, part, size in zip(topology.wraps, dims, topology.dims, strict=True)
    )
    return _Group(dims, wraps, on_chip, topology.chip.devices_per_chip // on_chip)


def _fewest_links(chips: int, wraps: bool) -> int:
    """The fewest links that any chip has along a dimension: two on a ring, one at the end of a line."""
    if chips == 1:
        return 0
    return 2 if wraps and chips > 2 else 1


def _busiest_link(chips: int, wraps: bool) -> float:
    """The load of the busiest link, one way, when every chip of a line or ring sends 1/chips to each.

    The unit is what one chip sends in total. The dimensions of a grid are independent: data travels along one dimension
    after the other, and along each of them every chip sends equal parts to all chips of its line. The link in the
    middle of a line carries what each chip on its one side sends to each on the other. On a ring all links carry half
    of that, as data goes the shorter way, and half each way to the opposite chip.
    """
    on_line = (chips // 2) * (chips - chips // 2) / chips
    return on_line / 2 if wraps else on_line
