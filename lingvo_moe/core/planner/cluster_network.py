"""The interconnect model of a GPU cluster: how long a collective takes, from the bytes that each GPU sends.

Nothing is fitted. A GPU reaches the others of its node over NVLink and NVSwitch, or over PCI Express if it has no
NVLink, and the other nodes through a network interface of its own. The network is a rail-optimised fat tree with full
bisection: the interfaces of equal rank in their nodes share a rail, and no link above them is a bottleneck. NCCL sends
pieces over both levels at the same time, so the slower level sets the pace.

A group has p GPUs in each of n nodes. B is what a GPU has before or after (num_bytes), whichever is more:

    collective                      inside a node     between nodes
    all-gather, reduce-scatter      B (p-1)/p         B/p (n-1)/n
    all-reduce                      twice that        twice that
    all-to-all                      B (p-1)/p         B (n-1)/n
    permute (one pair)              B, if n = 1       B, if n = 2
    broadcast                       B, if p > 1       B/p, if n > 1

All-gather, reduce-scatter and all-reduce are hierarchical: a GPU exchanges between nodes only its 1/p of the node's
data, along its rail. In an all-to-all, data for another node first goes over NVLink to the GPU whose rail leads there;
without NVLink a GPU sends to each of the others directly, and its lanes of PCI Express carry what leaves the node too.
"""

import functools
import math
from collections import Counter
from dataclasses import dataclass

from lingvo_moe.core.hlo.groups import Groups
from lingvo_moe.core.planner.gpu_cluster import Cluster

# What NCCL itself assumes when it picks an algorithm (src/graph/tuning.cc, ring, protocol "Simple"): the latency of an
# operation, and of each step over NVLink, PCI Express and the network.
SECONDS_PER_OPERATION = 8.4e-6
SECONDS_PER_NVLINK_STEP = 3.4e-6
SECONDS_PER_PCIE_STEP = 5.7e-6
SECONDS_PER_NETWORK_STEP = 14e-6

# Operations that pass each part of the data on once, or twice.
_PASSES = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}
_DIRECT = ("all-to-all", "ragged-all-to-all", "collective-permute")


@dataclass(frozen=True, order=True)
class Spread:
    """How the devices of one group lie in the nodes.

    Attributes:
        nodes: how many nodes they are in.
        inside: how many of them are in each of these.
    """

    nodes: int
    inside: int


@dataclass(frozen=True)
class Sent:
    """Bytes that one GPU sends during one collective.

    Attributes:
        inside: to other GPUs of its node.
        between: to other nodes.
    """

    inside: float
    between: float


@functools.lru_cache(maxsize=1024)
def spread(groups: Groups, cluster: Cluster) -> Spread:
    """How the groups of a collective lie in the nodes; of groups that lie differently, the slowest.

    A group with more devices in one node than in another counts as having one in each, which is slower than it is.

    Args:
        groups: the ids of the devices in each replica group, or (source, target) pairs.
        cluster: device i is in its node i // gpus_per_node.
    """
    return max(
        (_spread(group, cluster) for group in groups),
        key=lambda lies: (lies.nodes, -lies.inside),
        default=Spread(1, 1),
    )


def _spread(group: tuple[int, ...], cluster: Cluster) -> Spread:
    devices = set(group)
    counts = set(Counter(map(cluster.node_of, devices)).values())
    if len(counts) > 1:
        return Spread(len(devices), 1)
    (inside,) = counts
    return Spread(len(devices) // inside, inside)


def compact(participants: int, cluster: Cluster) -> Spread:
    """How a group lies in as few nodes as can be, with equally many devices in each."""
    inside = math.gcd(participants, cluster.gpus_per_node)
    return Spread(participants // inside, inside)


def sent(kind: str, num_bytes: int, lies: Spread, cluster: Cluster) -> Sent:
    """Returns the bytes that one GPU sends inside its node and between nodes, as the table above says.

    Args:
        kind: as in network.seconds.
        num_bytes: bytes on one device.
        lies: how each group lies in the nodes.
        cluster: decides, by its NVLink, which way data for other nodes takes.
    """
    inside, nodes = lies.inside, lies.nodes
    others_inside, others_between = (inside - 1) / inside, (nodes - 1) / nodes
    if kind in _PASSES:
        once = _PASSES[kind] * num_bytes
        return Sent(once * others_inside, once * others_between / inside)
    if kind == "collective-permute":
        across = nodes > 1
        return Sent(num_bytes * (inside > 1 and not across), num_bytes * across)
    if kind == "collective-broadcast":
        return Sent(num_bytes * (inside > 1), num_bytes * (nodes > 1) / inside)
    over_rails = 1 if cluster.card.nvlink_bandwidth else nodes
    return Sent(num_bytes * others_inside / over_rails, num_bytes * others_between)


def seconds(kind: str, num_bytes: int, lies: Spread, cluster: Cluster) -> float:
    """Estimates how long one collective takes; see network.seconds."""
    card, moved = cluster.card, sent(kind, num_bytes, lies, cluster)
    through_node = moved.inside
    if not card.nvlink_bandwidth:
        through_node += moved.between
    slowest = max(through_node / card.node_bandwidth, moved.between / card.nic_bandwidth)
    return SECONDS_PER_OPERATION + slowest + _latency(kind, lies, cluster)


def _latency(kind: str, lies: Spread, cluster: Cluster) -> float:
    """The steps in sequence: a ring inside a node, then a tree between nodes; a single one where GPUs send directly."""
    in_node = SECONDS_PER_NVLINK_STEP if cluster.card.nvlink_bandwidth else SECONDS_PER_PCIE_STEP
    if kind in _DIRECT:
        return SECONDS_PER_NETWORK_STEP if lies.nodes > 1 else in_node
    between = math.ceil(math.log2(lies.nodes)) * SECONDS_PER_NETWORK_STEP
    return _PASSES.get(kind, 1) * ((lies.inside - 1) * in_node + between)


def describe(cluster: Cluster) -> str:
    """Explains the model and its figures for a cluster, in sentences for the reader of a plan."""
    card = cluster.card
    link = "NVLink and NVSwitch" if card.nvlink_bandwidth else "PCI Express"
    step = SECONDS_PER_NVLINK_STEP if card.nvlink_bandwidth else SECONDS_PER_PCIE_STEP
    way = (
        "data for another node first goes over NVLink to the GPU whose rail leads there"
        if card.nvlink_bandwidth
        else "each GPU sends to all others directly, and what leaves the node passes through PCI Express too"
    )
    return (
        f"{cluster.name} has {cluster.nodes} nodes of {cluster.gpus_per_node} {card.label}. Inside a node"
        f" {link} carries {card.node_bandwidth / 1e9:g} GB/s each way for every GPU; between nodes each GPU has a"
        f" network interface of {card.nic_bandwidth / 1e9:g} GB/s each way, which is an assumption, in a rail-optimised"
        " fat tree with full bisection."
        " All-reduce, all-gather and reduce-scatter are hierarchical: between nodes a GPU exchanges only its share of"
        " its node's data. Both levels work at the same time, so the slower one sets the pace."
        f" In an all-to-all {way}."
        f" Each operation adds {SECONDS_PER_OPERATION * 1e6:g} us, each step inside a node {step * 1e6:g} us and each"
        f" step between nodes {SECONDS_PER_NETWORK_STEP * 1e6:g} us, as NCCL assumes."
        " Links run at their data sheets' rates. Collectives are taken not to overlap with each other or with"
        " computation."
    )
