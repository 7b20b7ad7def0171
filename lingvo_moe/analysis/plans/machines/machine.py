"""The machine that a plan is for: a TPU slice or a GPU cluster, by name."""

from lingvo_moe.analysis.plans.machines.base_machine import Machine, PlanError
from lingvo_moe.analysis.plans.machines.gpu_cluster import CARDS, Cluster
from lingvo_moe.analysis.plans.machines.topology import CHIPS, Topology
from lingvo_moe.core.config.checks import did_you_mean
from lingvo_moe.core.topology_names import TopologyName


def parse_machine(name: str) -> Machine:
    """Makes a machine from a name: 'v3:32x32' is a TPU slice, 'v5p:4x4x4*2' are two, 'h100:32x8' is a GPU cluster.

    Raises:
        PlanError: no such generation or card, unreadable sizes, or a machine that does not exist.
    """
    parsed = TopologyName.parse(name.lower())
    kind = parsed.kind
    if parsed.is_tpu:
        return Topology.parse(name)
    if kind in CARDS:
        return Cluster.parse(name)
    names = [*CHIPS, *CARDS]
    raise PlanError(
        f"topology {name!r}: no TPU generation and no GPU {kind!r}{did_you_mean(kind, names)}; a topology is e.g."
        " v3:32x32 or h100:32x8"
    )
