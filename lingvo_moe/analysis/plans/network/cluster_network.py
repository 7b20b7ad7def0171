"""The interconnect model of a GPU cluster: how long a collective takes, from the bytes that each GPU sends.

Nothing is fitted. A GPU reaches the others of its node over NVLink and NVSwitch, or over PCI Express if it has no
NVLink, and the other nodes through a network interface of its own. The network is a rail-optimised fat tree with full
bisection: the interfaces of equal rank in their nodes share a rail, and no link above them is a bottleneck. NCCL sends
pieces over both levels at the same time, so the slower level sets the pace.

What a GPU sends inside its node and between nodes is in two_levels.py. Hierarchical operations exchange between nodes
along the rails. In an all-to-all, data for another node first goes over NVLink to the GPU whose rail leads there;
without NVLink a GPU sends to each of the others directly, and its lanes of PCI Express carry what leaves the node too.
"""

from lingvo_moe.analysis.plans.machines.gpu_cluster import Cluster
from lingvo_moe.analysis.plans.network import two_levels
from lingvo_moe.analysis.plans.network.two_levels import DIRECT, PASSES, Sent, Spread

# What NCCL itself assumes when it picks an algorithm (src/graph/tuning.cc, ring, protocol "Simple"): the latency of an
# operation, and of each step over NVLink, PCI Express and the network.
SECONDS_PER_OPERATION = 8.4e-6
SECONDS_PER_NVLINK_STEP = 3.4e-6
SECONDS_PER_PCIE_STEP = 5.7e-6
SECONDS_PER_NETWORK_STEP = 14e-6


def sent(kind: str, num_bytes: float, lies: Spread, cluster: Cluster) -> Sent:
    """Returns the bytes that one GPU sends inside its node and between nodes; see two_levels.sent.

    Without NVLink an all-to-all sends only what is for its own node inside the node.
    """
    moved = two_levels.sent(kind, num_bytes, lies)
    if cluster.card.nvlink_bandwidth or kind not in ("all-to-all", "ragged-all-to-all"):
        return moved
    return Sent(moved.inside / lies.nodes, moved.between)


def seconds(kind: str, num_bytes: float, lies: Spread, cluster: Cluster) -> float:
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
    if kind in DIRECT:
        return SECONDS_PER_NETWORK_STEP if lies.nodes > 1 else in_node
    between = two_levels.steps_between(kind, lies) * SECONDS_PER_NETWORK_STEP
    return PASSES.get(kind, 1) * (lies.inside - 1) * in_node + between


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
        " Links run at their data sheets' rates. Collectives are taken not to overlap with each other."
    )
