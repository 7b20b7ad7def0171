"""The seconds of a collective along mesh axes, on a machine whose devices the mesh has in their order."""

import functools
import math

from lingvo_moe.core.planner.machines.gpu_cluster import Cluster
from lingvo_moe.core.planner.machines.machine import Machine
from lingvo_moe.core.planner.machines.ring import Ring
from lingvo_moe.core.planner.network import interconnect
from lingvo_moe.core.planner.network.two_levels import Spread
from lingvo_moe.core.sharding import Mesh


def seconds_along(
    kind: str, num_bytes: float, axes: tuple[str, ...], mesh: Mesh, machine: Machine | Ring
) -> float:
    """Estimates the seconds that a collective takes.

    Args:
        kind: e.g. 'all-reduce'.
        num_bytes: on one device, of the operand or the result, whichever is larger.
        axes: the mesh axes along which devices exchange.
        mesh, machine: the devices.
    """
    count = mesh.axis_size(axes)
    if count == 1 or num_bytes <= 0:
        return 0.0
    if isinstance(machine, Ring):
        return machine.Seconds(kind, num_bytes, count)
    return _on_machine(kind, int(num_bytes), axes, mesh, machine)


@functools.lru_cache(maxsize=65536)
def _on_machine(
    kind: str, num_bytes: int, axes: tuple[str, ...], mesh: Mesh, machine: Machine
) -> float:
    lies = _spread(axes, mesh, machine)
    return interconnect.seconds(kind, num_bytes, mesh.axis_size(axes), machine, lies)


@functools.lru_cache(maxsize=4096)
def _spread(axes: tuple[str, ...], mesh: Mesh, machine: Machine) -> Spread | None:
    """Counts the nodes that each group spans; None on a single slice, where a group is a box of neighbours."""
    # As network.spread says; but a search asks for thousands of meshes, so groups are listed only where they count.
    if not isinstance(machine, Cluster) and machine.slices == 1:
        return None
    places = [mesh.axis_names.index(a) for a in axes]
    rest = [i for i in range(len(mesh.shape)) if i not in places]
    count = math.prod(mesh.shape[i] for i in places)
    rows = mesh.device_array().transpose([*rest, *places]).reshape(-1, count)
    return interconnect.spread(tuple(tuple(int(d) for d in row) for row in rows), machine)
