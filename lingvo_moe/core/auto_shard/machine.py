"""The machine that a strategy is searched for: what a device computes, and how long a collective over mesh axes takes.

`simple` machines have round figures of one accelerator and rings between devices. With a name, figures and network
are those of the planner (TPU slices, GPU clusters).
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from lingvo_moe.core.planner import machine as machines
from lingvo_moe.core.planner import network
from lingvo_moe.core.planner.errors import PlanError
from lingvo_moe.core.planner.gpu_cluster import Cluster
from lingvo_moe.core.planner.machine import Machine
from lingvo_moe.core.sharding.mesh import Mesh

# Where no machine is named: one accelerator and one link to the next, in round numbers of recent ones.
_FLOPS = 1e14  # FLOP/s
_MEMORY_BANDWIDTH = 1e12  # bytes/s
_LINK_BANDWIDTH = 1e11  # bytes/s, one way
_SECONDS_PER_OPERATION = 2e-6
_SECONDS_PER_HOP = 1e-6


@dataclass(frozen=True)
class MeshMachine:
    """A mesh laid over a machine.

    Attributes:
        mesh: whose axes collectives go along.
        machine: None for one of round figures.
        name: of the machine, for people.
    """

    mesh: Mesh
    machine: Machine | None

    @property
    def name(self) -> str:
        """Of the machine."""
        return self.machine.name if self.machine else "an accelerator of round figures"

    @property
    def flops(self) -> float:
        """FLOP/s of a device's products."""
        if self.machine is None:
            return _FLOPS
        return self.machine.peaks.get("tf32", self.machine.peaks["bfloat16"])

    @property
    def memory_bandwidth(self) -> float:
        """Bytes/s of a device's memory."""
        return self.machine.hbm_bandwidth if self.machine else _MEMORY_BANDWIDTH

    @property
    def scatters(self) -> bool:
        """Whether the compiler makes a sum of which each device keeps a part a reduce-scatter: the GPU's does. That for
        TPUs and CPUs sums everything everywhere and takes a slice (docs/spmd_conformance.md)."""
        return isinstance(self.machine, Cluster)

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
        if self.machine is None:
            return _rings(kind, num_bytes, count)
        return _on_machine(self, kind, int(num_bytes), axes)

    def SecondsAmong(self, kind: str, num_bytes: int, count: int) -> float:
        """The same for `count` devices that are as near to each other as can be."""
        if count == 1 or not num_bytes:
            return 0.0
        if self.machine is None:
            return _rings(kind, num_bytes, count)
        return network.seconds(kind, num_bytes, count, self.machine)


def mesh_machine(mesh: Mesh, topology: str) -> MeshMachine:
    """A mesh over the machine of that name; '' for one of round figures.

    Raises:
        PlanError: no such machine, or one with fewer devices than the mesh.
    """
    if not topology:
        return MeshMachine(mesh, None)
    machine = machines.parse_machine(topology)
    if machine.num_devices < mesh.size:
        raise PlanError(
            f"topology {topology!r} has {machine.num_devices} devices, fewer than mesh {mesh} of {mesh.size}"
        )
    return MeshMachine(mesh, machine)


def _rings(kind: str, num_bytes: float, count: int) -> float:
    """All devices in a ring that sends one way."""
    share = (count - 1) / count
    times, hops = {
        "all-reduce": (2 * share, 2 * (count - 1)),
        "all-gather": (share, count - 1),
        "reduce-scatter": (share, count - 1),
        # In a torus half of the bytes go each way, and a quarter of the ring far on average.
        "all-to-all": (share / 2, count - 1),
        "collective-permute": (1.0, 1),
    }[kind]
    return _SECONDS_PER_OPERATION + times * num_bytes / _LINK_BANDWIDTH + hops * _SECONDS_PER_HOP


@functools.lru_cache(maxsize=65536)
def _on_machine(on: MeshMachine, kind: str, num_bytes: int, axes: tuple[str, ...]) -> float:
    assert on.machine is not None
    groups = groups_along(on.mesh, axes)
    return network.seconds(
        kind, num_bytes, len(groups[0]), on.machine, network.spread(groups, on.machine)
    )


@functools.lru_cache(maxsize=256)
def groups_along(mesh: Mesh, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """The devices that exchange in a collective along axes: a group for each position along the others."""
    places = [mesh.axis_names.index(a) for a in axes]
    rest = [i for i in range(len(mesh.shape)) if i not in places]
    count = math.prod(mesh.shape[i] for i in places)
    rows = mesh.device_array().transpose([*rest, *places]).reshape(-1, count)
    return tuple(tuple(int(d) for d in row) for row in rows)


def product_seconds(on: MeshMachine, flops: float, num_bytes: float) -> float:
    """The time of a computation: of its products or of its memory traffic, whichever is longer."""
    return max(flops / on.flops, num_bytes / on.memory_bandwidth)


def axes_text(axes: Sequence[str]) -> str:
    """Axes for people: 'data' or 'data+model'."""
    return "+".join(axes)
