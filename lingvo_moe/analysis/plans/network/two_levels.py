"""The bytes that a device sends during a collective on a machine of two levels: inside its node, and between nodes.

A node is one of a GPU cluster, or a TPU slice among several. It has a faster network inside than between. A group has
p devices in each of n nodes. B is what a device has before or after, whichever is more:

    collective                      inside a node     between nodes
    all-gather, reduce-scatter      B (p-1)/p         B/p (n-1)/n
    all-reduce                      twice that        twice that
    all-to-all                      B (p-1)/p         B (n-1)/n
    permute (one pair)              B, if n = 1       B, if n = 2
    broadcast                       B, if p > 1       B/p, if n > 1

All-gather, reduce-scatter and all-reduce are hierarchical: a device exchanges between nodes only its 1/p of the node's
data.
"""

import functools
import math
from collections import Counter
from dataclasses import dataclass

from lingvo_moe.analysis.programs.hlo.groups import Groups

# Operations that pass each part of the data on once, or twice.
PASSES = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}
DIRECT = ("all-to-all", "ragged-all-to-all", "collective-permute")


@dataclass(frozen=True, order=True)
class Spread:
    """The number of nodes that a group of devices spans, and of its devices in each."""

    nodes: int  # how many nodes (or slices) they are in
    inside: int  # how many of them are in each of these


@dataclass(frozen=True)
class Sent:
    """Bytes that one device sends during one collective."""

    inside: float  # to other devices of its node
    between: float  # to other nodes


@functools.lru_cache(maxsize=1024)
def spread(groups: Groups, node_size: int) -> Spread:
    """Counts the nodes that each group of a collective spans; of groups that differ, takes the slowest.

    A group with more devices in one node than in another counts as having one in each, which is slower than it is.

    Args:
        groups: the ids of the devices in each replica group, or (source, target) pairs.
        node_size: devices of a node; device i is in node i // node_size.
    """
    return max(
        (_spread(group, node_size) for group in groups),
        key=lambda lies: (lies.nodes, -lies.inside),
        default=Spread(1, 1),
    )


def _spread(group: tuple[int, ...], node_size: int) -> Spread:
    devices = set(group)
    counts = set(Counter(device // node_size for device in devices).values())
    if len(counts) > 1:
        return Spread(len(devices), 1)
    (inside,) = counts
    return Spread(len(devices) // inside, inside)


def compact(participants: int, node_size: int) -> Spread:
    """Places a group in as few nodes as can be, with equally many devices in each."""
    inside = math.gcd(participants, node_size)
    return Spread(participants // inside, inside)


def sent(kind: str, num_bytes: float, lies: Spread) -> Sent:
    """Returns the bytes that one device sends inside its node and between nodes, as the table above says.

    Args:
        num_bytes: bytes on one device.
    """
    inside, nodes = lies.inside, lies.nodes
    others_inside, others_between = (inside - 1) / inside, (nodes - 1) / nodes
    if kind in PASSES:
        once = PASSES[kind] * num_bytes
        return Sent(once * others_inside, once * others_between / inside)
    if kind == "collective-permute":
        across = nodes > 1
        return Sent(num_bytes * (inside > 1 and not across), num_bytes * across)
    if kind == "collective-broadcast":
        return Sent(num_bytes * (inside > 1), num_bytes * (nodes > 1) / inside)
    return Sent(num_bytes * others_inside, num_bytes * others_between)


def steps_between(kind: str, lies: Spread) -> int:
    """Steps in sequence between nodes: those of a tree, or a single one where devices send directly."""
    if kind in DIRECT:
        return int(lies.nodes > 1)
    return PASSES.get(kind, 1) * math.ceil(math.log2(lies.nodes))
