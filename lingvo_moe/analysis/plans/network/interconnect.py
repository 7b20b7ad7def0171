"""Estimates how long a collective takes, by the interconnect model of the machine: TPU slices or GPU cluster."""

from lingvo_moe.analysis.plans.machines.base_machine import Machine, PlanError
from lingvo_moe.analysis.plans.machines.gpu_cluster import Cluster
from lingvo_moe.analysis.plans.machines.ring import Ring
from lingvo_moe.analysis.plans.machines.topology import Topology
from lingvo_moe.analysis.plans.network import cluster_network, slices_network, torus, two_levels
from lingvo_moe.analysis.plans.network.two_levels import PASSES, Sent, Spread
from lingvo_moe.analysis.programs.hlo.collectives import COLLECTIVES
from lingvo_moe.analysis.programs.hlo.groups import Groups
from lingvo_moe.core.config.checks import did_you_mean


def seconds(
    kind: str,
    num_bytes: float,
    participants: int,
    machine: Machine,
    lies: Spread | None = None,
) -> float:
    """Estimates how long one collective takes.

    Args:
        kind: one of COLLECTIVES.
        num_bytes: bytes on one device, of its operand or its result, whichever is larger.
        participants: devices in one replica group. All groups work at the same time.
        lies: how each group lies in a cluster's nodes, or in several slices; None: in as few of them as can be.
            Inside a slice each group is a box of neighbouring chips; there it may say how it lies in the chips.

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
    if isinstance(machine, Ring):
        return _ring_seconds(kind, num_bytes, participants, machine)
    if isinstance(machine, Topology) and not machine.node_devices:
        return torus.seconds(kind, num_bytes, participants, machine, lies)
    lies = lies or two_levels.compact(participants, machine.node_devices)
    if isinstance(machine, Topology):
        return slices_network.seconds(kind, num_bytes, lies, machine)
    assert isinstance(machine, Cluster)
    return cluster_network.seconds(kind, num_bytes, lies, machine)


def _ring_seconds(kind: str, num_bytes: float, count: int, ring: Ring) -> float:
    if kind == "collective-permute":
        return ring.operation + num_bytes / ring.link_bandwidth + ring.hop
    rounds = PASSES.get(kind, 1)
    passes = 0.5 if kind == "all-to-all" else rounds  # half of its bytes go each way
    sent = passes * num_bytes * (count - 1) / count
    return ring.operation + sent / ring.link_bandwidth + rounds * (count - 1) * ring.hop


def spread(groups: Groups, machine: Machine) -> Spread | None:
    """Counts the nodes of a cluster, or the slices, that each group of devices spans; None where there are none.

    Inside a single slice whose chips have several devices it counts the chips.
    """
    size = machine.node_devices
    if not size and groups and isinstance(machine, Topology) and machine.chip.devices_per_chip > 1:
        size = machine.chip.devices_per_chip
    return two_levels.spread(groups, size) if size else None


def sent(kind: str, num_bytes: int, lies: Spread, machine: Machine) -> Sent:
    """Returns the bytes that one device sends inside its node or slice, and to others, during one collective."""
    if isinstance(machine, Cluster):
        return cluster_network.sent(kind, num_bytes, lies, machine)
    return two_levels.sent(kind, num_bytes, lies)


def describe(machine: Machine) -> str:
    """Explains the model and its figures for a machine, in sentences for the reader of a plan."""
    if isinstance(machine, Cluster):
        return cluster_network.describe(machine)
    assert isinstance(machine, Topology)
    between = slices_network.describe(machine) if machine.slices > 1 else ""
    return between + torus.describe(machine)
