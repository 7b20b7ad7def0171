"""One tick of a pipeline: every stage's work at once, each on its own devices, then the move to the next stage."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from lingvo_moe.core.nested_map import flatten, pack_as
from lingvo_moe.core.sharding import DimsMapping, Mesh, single_device, use_mesh
from lingvo_moe.core.sharding.annotate import mesh_split
from lingvo_moe.core.sharding.manual import auto_to_manual, device_index, manual_to_auto, rotate
from lingvo_moe.core.sharding.row_parts import rows_spread_over

STAGE, ROWS = "stage", "rows"  # in the mappings of Stages.Sharded


@dataclass(frozen=True)
class StageWork:
    """The work of the stages. Results are (what moves on, what stays): trees of tensors [D, ...]."""

    num: int  # M, of micro-batches
    # (stage, block of rows: int32 scalar, the stage's own tensors, shared tensors) -> results
    do: Callable[[int, tf.Tensor, Any, Any], tuple[Any, Any]]
    # (own, shared) -> results of the same structure, of a stage without a micro-batch
    idle: Callable[[Any, Any], tuple[Any, Any]]
    by: int  # results that move go to the stage this many further; 1 or -1


@dataclass(frozen=True)
class Stages:
    """The stages of a pipeline: each on its own devices, or one after another on all of them."""

    count: int  # K
    mesh: Mesh | None = None  # that of the program; None for one device
    axis: str | None = None  # the mesh axis of the stages; None: they run one after another
    row_axes: tuple[str, ...] = ()  # the axes that rows are spread over

    @property
    def devices(self) -> int:
        """D, the devices that have other rows."""
        return 1 if self.mesh is None else self.mesh.axis_size(self.row_axes)

    @property
    def sum_blocks(self) -> int:
        """The number of sums over rows: one for each of D devices where each stage has its own."""
        return self.devices if self.axis is not None else 1

    @contextlib.contextmanager
    def Inside(self) -> Iterator[None]:
        """Enters the mesh with which a stage's layers run."""
        if self.mesh is None or self.axis is None:
            yield
            return
        with use_mesh(single_device()), rows_spread_over(self.mesh, self.row_axes):
            yield

    def Sharded(self, x: tf.Tensor, mapping: tuple[str | None, ...]) -> tf.Tensor:
        """Annotates a tensor outside of a tick; the mapping has STAGE, ROWS or None for each dimension."""
        if self.mesh is None:
            return x
        return mesh_split(x, self.mesh, self._Axes(mapping))

    def _Axes(self, mapping: tuple[str | None, ...]) -> DimsMapping:
        named = {STAGE: self.axis, ROWS: self.row_axes or None, None: None}
        return tuple(named[name] for name in mapping)

    def Tick(self, t: tf.Tensor, work: StageWork, own: Any, shared: Any) -> tuple[Any, Any]:
        """The work of every stage in one tick.

        Args:
            t: the tick, int32 scalar. Stage k works if k <= t < k + M, else it is idle.
            own: tensors [K, ...] of which each stage sees its row: [K, P], or [K, D, A] whose blocks of rows are
                spread over devices.
            shared: tensors that all stages see: scalars, vectors, or [D, A].

        Returns:
            (what moved, what stayed), in the structures of work's results, with a leading dimension K.
        """
        tick = _Tick(self, t, work, (own, shared))
        run = tick.InTurn if self.axis is None else tick.AtOnce
        return run(flatten(own), flatten(shared))


@dataclass
class _Tick:
    """See Stages.Tick; `structure` is that of (own, shared)."""

    stages: Stages
    t: tf.Tensor
    work: StageWork
    structure: Any
    results: Any = None
    num_moving: int = 0

    def InTurn(self, own: list[tf.Tensor], shared: list[tf.Tensor]) -> tuple[Any, Any]:
        """All stages on all devices, one after another."""
        found, block = [], tf.constant(0)
        for k in range(self.stages.count):
            flat = [x[k] for x in own] + shared
            index = tf.cast(self._Works(tf.constant(k)), tf.int32)
            branches = [self._Branch(None, block, flat), self._Branch(k, block, flat)]
            found.append(flatten(tf.switch_case(index, branches)))
        stacked = [tf.stack(rows) for rows in zip(*found)]
        moved = [tf.roll(x, self.work.by, 0) for x in stacked[: self.num_moving]]
        mapping = (STAGE, ROWS, None)
        sharded = [
            self.stages.Sharded(x, mapping) if x.shape[1] == self.stages.devices else x
            for x in [*moved, *stacked[self.num_moving :]]
        ]
        return pack_as(self.results, sharded)

    def AtOnce(self, own: list[tf.Tensor], shared: list[tf.Tensor]) -> tuple[Any, Any]:
        """Each stage on its own devices, in a manual region."""
        stages = self.stages
        mesh, axis = stages.mesh, stages.axis
        assert mesh is not None and axis is not None

        each = stages._Axes((STAGE, ROWS, None))
        own = [
            auto_to_manual(x, each if x.shape.rank == 3 else stages._Axes((STAGE, None)), mesh)[0]
            for x in own
        ]
        shared = [
            auto_to_manual(
                x, stages._Axes((ROWS, None) if x.shape.rank == 2 else (None,) * x.shape.rank), mesh
            )
            for x in shared
        ]
        with use_mesh(mesh):
            self.t = auto_to_manual(self.t, (), mesh)
            stage = device_index(axis, mesh)
            block = tf.constant(0)
            for name in stages.row_axes:
                block = block * mesh.axis_size(name) + device_index(name, mesh)
            given = own + shared
            branches = [self._Branch(k, block, given) for k in range(stages.count)]
            branches.append(self._Branch(None, block, given))
            index = tf.where(self._Works(stage), stage, stages.count)
            found = [x[tf.newaxis] for x in flatten(tf.switch_case(index, branches))]
            moved = [rotate(x, axis, mesh, -self.work.by) for x in found[: self.num_moving]]
        results = [*moved, *found[self.num_moving :]]
        return pack_as(self.results, [manual_to_auto(x, each, None, mesh) for x in results])

    def _Works(self, stage: tf.Tensor) -> tf.Tensor:
        """Whether a stage has a micro-batch in this tick."""
        return (self.t >= stage) & (self.t < stage + self.work.num)

    def _Branch(self, k: int | None, block: tf.Tensor, flat: list[tf.Tensor]) -> Callable:
        def branch() -> list[tf.Tensor]:
            own, shared = pack_as(self.structure, flat)
            work = self.work
            found = work.idle(own, shared) if k is None else work.do(k, block, own, shared)
            self.results, self.num_moving = found, len(flatten(found[0]))
            return flatten(found)

        return branch
