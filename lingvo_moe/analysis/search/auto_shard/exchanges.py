"""The bytes that the partitioner moves between two shardings of a tensor, and the seconds that it takes.

`plan_redistribution` finds the best steps of one tensor; a search compares many thousands. Here each mesh axis is
looked at once: it stays, it moves from one dimension to another (all-to-all), it goes (all-gather), or it comes (a
slice, which is free, and made first where nothing leaves that dimension). Where no dimension loses one axis and gets
another, these are the steps of `plan_redistribution`; elsewhere the bytes are roughly those. Tests compare both.
"""

import functools
from typing import NamedTuple

from lingvo_moe.analysis.plans.network.mesh_machine import MeshMachine
from lingvo_moe.core.sharding.mesh import Mesh

# The mesh axes of each dimension, major first.
Layout = tuple[tuple[str, ...], ...]


class LayoutExchange(NamedTuple):
    """One collective: its kind, the share of the whole tensor on a device (of operand or result, whichever is larger),
    and the axes along which devices exchange."""

    kind: str
    share: float
    axes: tuple[str, ...]


@functools.lru_cache(maxsize=1 << 16)
def exchanges(mesh: Mesh, source: Layout, target: Layout) -> tuple[LayoutExchange, ...]:
    """The collectives between two layouts of a tensor that they shard evenly."""
    if source == target:
        return ()
    leaving: dict[str, int] = {}
    coming: dict[str, int] = {}
    for dim, (before, after) in enumerate(zip(source, target, strict=True)):
        same = 0
        while same < min(len(before), len(after)) and before[same] == after[same]:
            same += 1
        leaving |= dict.fromkeys(before[same:], dim)
        coming |= dict.fromkeys(after[same:], dim)
    share = 1.0
    for axis in {a for axes in source for a in axes}:
        share /= mesh.axis_size(axis)
    for axis, dim in coming.items():
        # Where another axis leaves the same dimension, parts are cut afterwards.
        if axis not in leaving and dim not in leaving.values():
            share /= mesh.axis_size(axis)
    steps = []
    moved: dict[tuple[int, int], tuple[str, ...]] = {}  # axes that move together are one collective
    for axis, dim in leaving.items():
        if axis in coming:
            way = dim, coming[axis]
            moved[way] = (*moved.get(way, ()), axis)
    for (start, end), axes in moved.items():
        kind = "collective-permute" if start == end else "all-to-all"
        steps.append(LayoutExchange(kind, share, axes))
    gone: dict[int, tuple[str, ...]] = {}
    for axis, dim in leaving.items():
        if axis not in coming:
            gone[dim] = (*gone.get(dim, ()), axis)
    for _, axes in sorted(gone.items(), key=lambda item: mesh.axis_size(item[1])):
        share *= mesh.axis_size(axes)
        steps.append(LayoutExchange("all-gather", share, axes))
    return tuple(steps)


@functools.lru_cache(maxsize=1 << 16)
def gradient_exchanges(
    mesh: Mesh, used: Layout, held: Layout, partial: tuple[str, ...], scatters: bool
) -> tuple[LayoutExchange, ...]:
    """The collectives that bring a gradient back.

    Args:
        used: the layout in which an operation read the tensor.
        held: the layout in which another made it.
        partial: axes along which each device has a part of every sum of the gradient.
        scatters: whether a sum of which each device keeps a part is one collective.
    """
    steps = []
    if partial and scatters:
        kept = [
            (dim, axis)
            for dim, axes in enumerate(held)
            for axis in axes
            if axis in partial and axes[: axes.index(axis)] == used[dim][: axes.index(axis)]
        ]
        for dim, axis in kept:
            if held[dim][: len(used[dim]) + 1] == (*used[dim], axis):
                steps.append(LayoutExchange("reduce-scatter", _share(mesh, used), (axis,)))
                used = (*used[:dim], (*used[dim], axis), *used[dim + 1 :])
                partial = tuple(a for a in partial if a != axis)
    if partial:
        steps.append(LayoutExchange("all-reduce", _share(mesh, used), partial))
    return (*steps, *exchanges(mesh, used, held))


def seconds(on: MeshMachine, steps: tuple[LayoutExchange, ...], num_bytes: int) -> float:
    """The seconds that `steps` take for a tensor of `num_bytes` in all."""
    return sum(on.Seconds(step.kind, step.share * num_bytes, step.axes) for step in steps)


def _share(mesh: Mesh, layout: Layout) -> float:
    return 1 / mesh.axis_size([a for axes in layout for a in axes])
