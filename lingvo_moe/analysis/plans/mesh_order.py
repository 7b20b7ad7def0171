"""Finds the mesh axes inside the nodes of a GPU cluster, and whether another order of the axes would be faster.

Device i of a mesh is number i in row-major order, so the last axis changes fastest and is the first to lie inside a
node. For another order of the axes the same program is taken, with its devices renumbered: it is not compiled again.
"""

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from lingvo_moe.analysis.plans.machines.gpu_cluster import Cluster
from lingvo_moe.analysis.plans.network import cluster_network, interconnect, two_levels
from lingvo_moe.analysis.plans.work.costs import Cost
from lingvo_moe.analysis.programs.hlo.collectives import CollectiveUse
from lingvo_moe.analysis.programs.hlo.groups import Groups
from lingvo_moe.core.console import units
from lingvo_moe.core.sharding import Mesh

# Another order is proposed only if it saves this share of the collectives' time.
_WORTH = 0.01


@dataclass
class Moved:
    """The bytes that some collectives of a step send, and the seconds that they take."""

    count: int = 0  # executions
    # `inside`, `between`: bytes that one GPU sends inside its node, and between nodes.
    inside: float = 0.0
    between: float = 0.0
    seconds: float = 0.0  # the sum over all executions

    def Add(self, use: CollectiveUse, times: int, groups: Groups, cluster: Cluster) -> None:
        """Adds `times` executions of a collective among `groups`."""
        lies = two_levels.spread(groups, cluster.gpus_per_node)
        sent = cluster_network.sent(use.kind, use.bytes, lies, cluster)
        self.count += times
        self.inside += times * sent.inside
        self.between += times * sent.between
        one = interconnect.seconds(use.kind, use.bytes, use.participants, cluster, lies)
        self.seconds += times * one

    def AsPlan(self) -> dict[str, Any]:
        """The fields of a plan."""
        return {
            "count": self.count,
            "sent_inside": round(self.inside),
            "sent_between": round(self.between),
            "seconds": self.seconds,
        }


@functools.lru_cache(maxsize=1024)
def axes_between(groups: Groups, mesh: Mesh) -> tuple[str, ...]:
    """The axes of a mesh along which the devices of a group differ, in the mesh's order."""
    places = np.unravel_index(np.arange(mesh.size), mesh.shape)
    return tuple(
        name
        for name, place in zip(mesh.axis_names, places, strict=True)
        if any(len(set(place[list(group)].tolist())) > 1 for group in groups)
    )


def orders(mesh: Mesh) -> Iterator[Mesh]:
    """The mesh with its axes in every order, its own first; axes of size 1 keep their places."""
    long = [i for i, size in enumerate(mesh.shape) if size > 1]
    for places in itertools.permutations(long):
        order = list(range(len(mesh.shape)))
        for old, new in zip(long, places, strict=True):
            order[old] = new
        yield Mesh(tuple(mesh.axis_names[i] for i in order), tuple(mesh.shape[i] for i in order))


@functools.lru_cache(maxsize=4096)
def renumbered(groups: Groups, mesh: Mesh, other: Mesh) -> Groups:
    """The groups of a program for `mesh`, with the numbers that their devices have in `other`."""
    order = [mesh.axis_names.index(name) for name in other.axis_names]
    number = np.empty(mesh.size, int)
    number[np.arange(mesh.size).reshape(mesh.shape).transpose(order).ravel()] = np.arange(mesh.size)
    return tuple(tuple(number[list(group)].tolist()) for group in groups)


def mesh_plan(costs: Iterable[Cost], mesh: Mesh, cluster: Cluster) -> dict[str, Any]:
    """Returns the plan's `mesh_axes`: bytes and seconds by axis, and by order of the axes.

    Args:
        costs: of every executed instruction of a program for `mesh`.
        cluster: as many GPUs as the mesh has devices.

    Returns:
        `by_axis`: for each set of axes that collectives run along, the slowest first, `axes` and the fields of Moved;
        `orders`: for each order of the axes, the given one first, `mesh` (as --mesh takes it) and the fields of Moved;
        `advice`: one sentence.
    """
    uses: Counter[CollectiveUse] = Counter()
    for cost in costs:
        if cost.collective is not None and cost.collective.devices:
            uses[cost.collective] += cost.times
    by_axis: dict[tuple[str, ...], Moved] = defaultdict(Moved)
    for use, times in uses.items():
        by_axis[axes_between(use.devices, mesh)].Add(use, times, use.devices, cluster)
    by_order = {}
    for other in orders(mesh):
        by_order[str(other)] = total = Moved()
        for use, times in uses.items():
            total.Add(use, times, renumbered(use.devices, mesh, other), cluster)
    slowest_first = sorted(by_axis.items(), key=lambda item: -item[1].seconds)
    return {
        "by_axis": [{"axes": ",".join(axes)} | moved.AsPlan() for axes, moved in slowest_first],
        "orders": [{"mesh": text} | moved.AsPlan() for text, moved in by_order.items()],
        "advice": _advice(by_order, cluster),
    }


def _advice(by_order: dict[str, Moved], cluster: Cluster) -> str:
    (order, here), *others = by_order.items()
    if not others:
        return f"The mesh {order} has one axis of several devices, so its order cannot be changed."
    if cluster.nodes == 1:
        return "All devices are in one node, so the order of the mesh's axes does not matter."
    best, then = min(others, key=lambda item: item[1].seconds)
    if here.seconds - then.seconds < _WORTH * here.seconds or not here.seconds:
        return f"No other order of the mesh's axes is faster than {order}."
    then_sends, now_sends = (
        f"{units.size(round(moved.inside))} inside its node and {units.size(round(moved.between))} to others"
        for moved in (then, here)
    )
    takes = [units.duration(s) for s in (then.seconds, here.seconds, here.seconds - then.seconds)]
    return (
        f"--mesh={best}, or train.mesh={best} beside --layout, is faster: in a step each GPU would send {then_sends}, "
        f"instead of {now_sends}, and the collectives would take {takes[0]} instead of {takes[1]}, which saves "
        f"{takes[2]}. This is an estimate for the same program with its devices in that order."
    )
