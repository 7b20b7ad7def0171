"""The machine that a strategy is searched for: what a device computes, and how long a collective over mesh axes takes.

By a name of the planner's (a TPU slice, a GPU cluster) figures and network are the planner's. Without a name they are
round figures of one accelerator in a ring of such; 'cpu' has round figures of the virtual devices of one machine.
"""

from dataclasses import dataclass

from lingvo_moe.core.planner.errors import PlanError
from lingvo_moe.core.planner.machines.gpu_cluster import Cluster
from lingvo_moe.core.planner.machines.machine import Machine, parse_machine
from lingvo_moe.core.planner.machines.ring import ACCELERATOR, VIRTUAL_CPU, Ring
from lingvo_moe.core.planner.network import interconnect
from lingvo_moe.core.planner.network.mesh_network import seconds_along
from lingvo_moe.core.sharding.mesh import Mesh

CPU = "cpu"


@dataclass(frozen=True)
class MeshMachine:
    """A mesh laid over a machine.

    Attributes:
        mesh: whose axes collectives go along.
        machine: of the planner, or a ring.
    """

    mesh: Mesh
    machine: Machine | Ring

    @property
    def name(self) -> str:
        """The machine's name."""
        return self.machine.name

    @property
    def flops(self) -> float:
        """FLOP/s of a device's products."""
        if isinstance(self.machine, Ring):
            return self.machine.flops
        return self.machine.peaks.get("tf32", self.machine.peaks["bfloat16"])

    @property
    def memory_bandwidth(self) -> float:
        """Bytes/s of a device's memory."""
        if isinstance(self.machine, Ring):
            return self.machine.memory_bandwidth
        return self.machine.hbm_bandwidth

    @property
    def scatters(self) -> bool:
        """Whether the compiler makes a sum of which each device keeps a part a reduce-scatter: the GPU's does. That for
        TPUs and CPUs sums everything everywhere and takes a slice (docs/spmd_conformance.md)."""
        return isinstance(self.machine, Cluster)

    def Computing(self, flops: float, num_bytes: float) -> float:
        """Seconds of a computation: of its products or of its memory traffic, whichever is longer."""
        return max(flops / self.flops, num_bytes / self.memory_bandwidth)

    def Seconds(self, kind: str, num_bytes: float, axes: tuple[str, ...]) -> float:
        """The seconds that a collective along mesh axes takes: see seconds_along."""
        return seconds_along(kind, num_bytes, axes, self.mesh, self.machine)

    def SecondsAmong(self, kind: str, num_bytes: int, count: int) -> float:
        """The same for `count` devices that are as near to each other as can be."""
        if count == 1 or not num_bytes:
            return 0.0
        if isinstance(self.machine, Ring):
            return self.machine.Seconds(kind, num_bytes, count)
        return interconnect.seconds(kind, num_bytes, count, self.machine)


def mesh_machine(mesh: Mesh, topology: str) -> MeshMachine:
    """A mesh over the machine of that name: of the planner's, CPU, or '' for an accelerator of round figures.

    Raises:
        PlanError: no such machine, or one with fewer devices than the mesh.
    """
    if topology in ("", CPU):
        return MeshMachine(mesh, VIRTUAL_CPU if topology else ACCELERATOR)
    machine = parse_machine(topology)
    if machine.num_devices < mesh.size:
        raise PlanError(
            f"topology {topology!r} has {machine.num_devices} devices, fewer than mesh {mesh} of {mesh.size}"
        )
    return MeshMachine(mesh, machine)
