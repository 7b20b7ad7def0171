"""A mesh laid over a machine: the seconds of work on a device, and of collectives along mesh axes.

Both searches for strategies estimate with it. A machine with a name is the planner's: a TPU slice or a GPU cluster.
Without a name it is a ring of accelerators in round figures; 'cpu' has round figures of the virtual devices of a CPU.
"""

import functools
import math
from collections.abc import Collection
from dataclasses import dataclass

from lingvo_moe.analysis.plans.machines.base_machine import Machine, PlanError
from lingvo_moe.analysis.plans.machines.gpu_cluster import Cluster
from lingvo_moe.analysis.plans.machines.machine import parse_machine
from lingvo_moe.analysis.plans.machines.ring import ACCELERATOR, VIRTUAL_CPU
from lingvo_moe.analysis.plans.network import interconnect
from lingvo_moe.analysis.programs.hlo.groups import Groups
from lingvo_moe.core.sharding.mesh import Mesh

CPU = "cpu"


@dataclass(frozen=True)
class MeshMachine:
    """A mesh whose devices are those of a machine, in order."""

    mesh: Mesh  # whose axes collectives go along
    machine: Machine  # with at least as many devices

    @property
    def scatters(self) -> bool:
        """Whether the compiler makes a sum of which each device keeps a part a reduce-scatter: the GPU's does. That for
        TPUs and CPUs sums everything everywhere and takes a slice (docs/spmd_conformance.md)."""
        return isinstance(self.machine, Cluster)

    def Computing(self, flops: float, num_bytes: float, itemsize: int = 4) -> float:
        """Seconds of a computation on a device: of its products or of its memory traffic, whichever is longer.

        Args:
            flops: of products; a multiply-add counts as two.
            num_bytes: that it reads and writes.
            itemsize: bytes of an element of the products' operands.
        """
        peaks = self.machine.peaks
        peak = peaks["bfloat16"] if itemsize <= 2 else peaks.get("tf32", peaks["bfloat16"])
        return max(flops / peak, num_bytes / self.machine.hbm_bandwidth)

    def Seconds(self, kind: str, num_bytes: float, axes: Collection[str]) -> float:
        """Seconds of a collective.

        Args:
            kind: e.g. 'all-reduce'.
            num_bytes: on one device, of the operand or the result, whichever is larger.
            axes: the mesh axes along which devices exchange.
        """
        along = tuple(a for a in self.mesh.axis_names if a in axes)
        if num_bytes <= 0 or self.mesh.axis_size(along) == 1:
            return 0.0
        return _seconds(kind, num_bytes, along, self)


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


@functools.lru_cache(maxsize=65536)
def _seconds(kind: str, num_bytes: float, axes: tuple[str, ...], on: MeshMachine) -> float:
    # A search asks for thousands of meshes, so groups are listed only where it matters how they lie.
    groups = _groups(axes, on.mesh) if on.machine.node_devices else ()
    lies = interconnect.spread(groups, on.machine)
    return interconnect.seconds(kind, num_bytes, on.mesh.axis_size(axes), on.machine, lies)


@functools.lru_cache(maxsize=4096)
def _groups(axes: tuple[str, ...], mesh: Mesh) -> Groups:
    """The groups of devices that differ along these axes alone."""
    places = [mesh.axis_names.index(a) for a in axes]
    rest = [i for i in range(len(mesh.shape)) if i not in places]
    count = math.prod(mesh.shape[i] for i in places)
    rows = mesh.device_array().transpose([*rest, *places]).reshape(-1, count)
    return tuple(map(tuple, rows.tolist()))
