"""How long a collective takes on a machine: the door to the interconnect models of TPU slices and GPU clusters."""

from lingvo_moe.core.hlo.collectives import COLLECTIVES
from lingvo_moe.core.hlo.groups import Groups
from lingvo_moe.core.planner import cluster_network, torus
from lingvo_moe.core.planner.cluster_network import Spread
from lingvo_moe.core.planner.errors import PlanError
from lingvo_moe.core.planner.gpu_cluster import Cluster
from lingvo_moe.core.planner.machine import Machine
from lingvo_moe.core.suggest import did_you_mean


def seconds(
    kind: str, num_bytes: int, participants: int, machine: Machine, spread: Spread | None = None
) -> float:
    """Estimates how long one collective takes.

    Args:
        kind: one of COLLECTIVES.
        num_bytes: bytes on one device, of its operand or its result, whichever is larger.
        participants: devices in one replica group. All groups work at the same time.
        machine: the slice or the cluster.
        spread: how each group lies in a cluster's nodes; None: in as few nodes as can be. On a slice each group is a
            box of neighbouring chips.

    Returns:
        Seconds; 0 for one participant.

    Raises:
        PlanError: no such kind, or more participants than devices.
    """
    if kind not in COLLECTIVES:
        raise PlanError(f"no collective {kind!r}{did_you_mean(kind, COLLECTIVES)}")
    if not 1 <= participants <= machine.num_devices:
        raise PlanError(
            f"{kind} of {participants} participants: {machine.name} has {machine.num_devices} devices"
        )
    if num_bytes < 0:
        raise PlanError(f"{kind} of {num_bytes} bytes: must not be negative")
    if participants == 1:
        return 0.0
    if isinstance(machine, Cluster):
        lies = spread or cluster_network.compact(participants, machine)
        return cluster_network.seconds(kind, num_bytes, lies, machine)
    return torus.seconds(kind, num_bytes, participants, machine)


def spread(groups: Groups, machine: Machine) -> Spread | None:
    """How groups of device ids lie in the nodes of a cluster; None on a slice, which has no nodes."""
    return cluster_network.spread(groups, machine) if isinstance(machine, Cluster) else None


def describe(machine: Machine) -> str:
    """Explains the model and its figures for a machine, in sentences for the reader of a plan."""
    model = cluster_network if isinstance(machine, Cluster) else torus
    return model.describe(machine)
