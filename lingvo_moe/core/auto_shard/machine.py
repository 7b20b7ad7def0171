"""The machine that a strategy is searched for: what a device computes, and how long a collective over mesh axes takes.

By a name of the planner's (a TPU slice, a GPU cluster) figures and network are the planner's. Without a name they are
round figures of one accelerator in a ring of such; 'cpu' has round figures of the virtual devices of one machine.
"""

import functools
import math
from dataclasses import dataclass

from lingvo_moe.core.planner import machine as machines
from lingvo_moe.core.planner import network
from lingvo_moe.core.planner.errors import PlanError
from lingvo_moe.core.planner.gpu_cluster import Cluster
from lingvo_moe.core.planner.machine import Machine
from lingvo_moe.core.sharding.mesh import Mesh

CPU = "cpu"


@dataclass(frozen=True)
class Ring:
    """Equal devices in a ring, in round figures.

    Attributes:
        name: for people.
        flops: FLOP/s of a device.
        memory_bandwidth, link_bandwidth: bytes/s of its memory, and to the next device.
        operation, hop: seconds that a collective takes beside its bytes, and those of each device on the way.
    """

    name: str
    flops: float
    memory_bandwidth: float
    link_bandwidth: float
    operation: float
    hop: float


_ACCELERATOR = Ring("an accelerator of round figures", 1e14, 1e12, 1e11, 2e-6, 1e-6)
# Eight virtual devices share the cores, and exchange through the memory of the machine.
_VIRTUAL_CPU = Ring("virtual CPU devices of round figures", 1e10, 2e9, 5e8, 2e-5, 5e-6)
# Of a ring: how often the bytes pass a link, and hops, for shares (n-1)/n of n devices. In an all-to-all half of the
# bytes go each way.
_PASSES = {
    "all-reduce": (2.0, 2),
    "all-gather": (1.0, 1),
    "reduce-scatter": (1.0, 1),
    "all-to-all": (0.5, 1),
}


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
        """How long a collective takes.

        Args:
            kind: e.g. 'all-reduce'.
            num_bytes: on one device, of the operand or the result, whichever is larger.
            axes: the mesh axes along which devices exchange.
        """
        count = self.mesh.axis_size(axes)
        if count == 1 or not num_bytes:
            return 0.0
        if isinstance(self.machine, Ring):
            return _in_ring(self.machine, kind, num_bytes, count)
        return _on_machine(self.machine, self.mesh, kind, int(num_bytes), axes)

    def SecondsAmong(self, kind: str, num_bytes: int, count: int) -> float:
        """The same for `count` devices that are as near to each other as can be."""
        if count == 1 or not num_bytes:
            return 0.0
        if isinstance(self.machine, Ring):
            return _in_ring(self.machine, kind, num_bytes, count)
        return network.seconds(kind, num_bytes, count, self.machine)


def mesh_machine(mesh: Mesh, topology: str) -> MeshMachine:
    """A mesh over the machine of that name: of the planner's, CPU, or '' for an accelerator of round figures.

    Raises:
        PlanError: no such machine, or one with fewer devices than the mesh.
    """
    if topology in ("", CPU):
        return MeshMachine(mesh, _VIRTUAL_CPU if topology else _ACCELERATOR)
    machine = machines.parse_machine(topology)
    if machine.num_devices < mesh.size:
        raise PlanError(
            f"topology {topology!r} has {machine.num_devices} devices, fewer than mesh {mesh} of {mesh.size}"
        )
    return MeshMachine(mesh, machine)


def _in_ring(ring: Ring, kind: str, num_bytes: float, count: int) -> float:
    if kind == "collective-permute":
        return ring.operation + num_bytes / ring.link_bandwidth + ring.hop
    passes, rounds = _PASSES[kind]
    sent = passes * num_bytes * (count - 1) / count
    return ring.operation + sent / ring.link_bandwidth + rounds * (count - 1) * ring.hop


@functools.lru_cache(maxsize=65536)
def _on_machine(
    machine: Machine, mesh: Mesh, kind: str, num_bytes: int, axes: tuple[str, ...]
) -> float:
    groups = _groups_along(mesh, axes)
    return network.seconds(
        kind, num_bytes, len(groups[0]), machine, network.spread(groups, machine)
    )


@functools.lru_cache(maxsize=256)
def _groups_along(mesh: Mesh, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """The devices that exchange in a collective along axes: a group for each position along the others."""
    places = [mesh.axis_names.index(a) for a in axes]
    rest = [i for i in range(len(mesh.shape)) if i not in places]
    count = math.prod(mesh.shape[i] for i in places)
    rows = mesh.device_array().transpose([*rest, *places]).reshape(-1, count)
    return tuple(tuple(int(d) for d in row) for row in rows)
