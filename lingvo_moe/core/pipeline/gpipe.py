"""GPipe (Huang et al. 2018) for cells of different shapes and weights, in one program for all devices.

In tick t stage k works on micro-batch t - k. The forward loop has M + K - 1 ticks and keeps the input of each stage in
each tick. The backward loop runs the ticks in reverse order, computes the stages again and differentiates them. The
loops are ours, under one custom gradient, as those of layers/scan.py are.

A stage's weights are a row of packed variables [K, P], which a mesh axis shards. What passes between stages is a
packed vector too. Within a tick a manual region over all axes picks the device's stage: one branch of a conditional
for each cell, and one that does nothing, for ticks without a micro-batch. Then one collective-permute for each dtype
moves the outputs on by one stage.

Letters: Z stages, K their number, M micro-batches, D blocks of rows (one for each device that has other rows), A
elements of packed activations, P of packed weights, X of packed extras.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from lingvo_moe.core.nested_map import NestedMap, flatten, map_structure
from lingvo_moe.core.pipeline.cell_program import EXTRAS, Cell, CellProgram, Vectors
from lingvo_moe.core.pipeline.cells import Args
from lingvo_moe.core.pipeline.gpipe_loops import GPipeLoops
from lingvo_moe.core.pipeline.stage_vectors import PACKED_LETTERS, Boundary, packed_specs
from lingvo_moe.core.pipeline.ticks import ROWS, Stages
from lingvo_moe.core.sharding import ShardingError, SplitMap, current_mesh, dims_mapping
from lingvo_moe.core.sharding.letters import axes_of


class PipelineError(ValueError):
    """Raised for a pipeline that cannot run: numbers of stages, micro-batches, rows or devices that do not fit."""


class GPipe:
    """A pipeline of K cells, which may all be different.

    Its variables are packed: see `specs`. Results and gradients are those of the cells one after another for each of
    the micro-batches. `run` says more.

    Attributes:
        path: of the layer that it belongs to; the scopes of the loops are named after it.
        cells: in order.
        specs: VariableSpecs of the packed variables.
    """

    def __init__(
        self,
        path: str,
        name: str,
        cells: Sequence[Cell],
        weight_split: SplitMap,
        activation_split: SplitMap,
    ):
        """
        Args:
            name: where the layer's theta has the packed variables.
            weight_split: letter -> mesh axis. 'Z' is the axis of the stages.
            activation_split: 'B' is the axis or axes that rows are spread over.
        """
        self.path, self.cells = path, list(cells)
        self.specs = packed_specs(f"{path}.{name}", [cell.specs for cell in cells], weight_split)
        self._stage_axis = dims_mapping(PACKED_LETTERS, weight_split)[0]
        used = {"Z": self._stage_axis, "B": activation_split.get("B")}
        self._row_axes = axes_of(dims_mapping("ZB", used)[1])

    def Run(
        self,
        theta: NestedMap,
        args: Args,
        num_micro_batches: int,
        batch_dim: int = 0,
        seed: tf.Tensor | None = None,
        differentiate_inputs: bool = True,
    ) -> tuple[Args, NestedMap]:
        """Runs the cells over all micro-batches of a batch.

        Micro-batch m has rows m, m + M, m + 2 M, ... Its seed is `seed` folded with m. Where rows are spread over
        devices, each device draws its own random numbers for its rows.

        Args:
            theta: the packed variables, in the structure of `specs`.
            args: of the first cell: tensors, NestedMaps of them, None. Each tensor has the rows of the batch.
            num_micro_batches: M.
            batch_dim: the dimension of the rows, in arguments and results of all cells.
            seed: int32 [2] or None.
            differentiate_inputs: whether `args` get gradients.

        Returns:
            The outputs of the last cell for the batch, and the extras of all cells: means over micro-batches and over
            the devices that rows are spread over, by the cell's number. `updates` has the next values of the packed
            variables that are not trainable.

        Raises:
            PipelineError: M does not divide the rows, or their devices do not divide those of a micro-batch; a cell
                returns a tensor whose dimension `batch_dim` is not its rows.
            ShardingError: the mesh axis of the stages has neither one device nor K.
        """
        stages = self._Stages()
        rows = _num_rows(args, batch_dim)
        _check_rows(rows, num_micro_batches, stages.devices)
        with self._Scope("forward"):
            programs = self._Programs(args, rows // num_micro_batches, batch_dim, seed, stages)
            given = programs[0].inputs.PackBatch(args, num_micro_batches, stages.devices)
            given = {name: stages.Sharded(x, (None, ROWS, None)) for name, x in given.items()}
            loops = GPipeLoops(
                self._Scope, self.specs, programs, stages, num_micro_batches, differentiate_inputs
            )
            final, sums = loops.Run(theta, given, seed)
            share = 1.0 / (num_micro_batches * stages.sum_blocks)
            means = {name: tf.reduce_sum(x, 1) * share for name, x in sums.items()}
            outs = programs[-1].outputs.UnpackBatch(final, num_micro_batches, stages.devices)
            return outs, self._Extras(programs, means, stages)

    def _Stages(self) -> Stages:
        """Assigns the stages to the mesh in force. Raises ShardingError as Run."""
        mesh, count, axes = current_mesh(), len(self.cells), axes_of(self._stage_axis)
        if mesh is None or mesh.size == 1:
            return Stages(count)
        size = mesh.axis_size(axes)
        if size not in (1, count):
            raise ShardingError(
                f"{self.path}: mesh {mesh} has {size} devices along axis {'*'.join(axes)!r} of the stages, letter Z of "
                f"weight_split, but the pipeline has {count} stages; give the axis {count} devices, or as many stages "
                "as devices"
            )
        if len(axes) > 1:
            raise ShardingError(
                f"{self.path}: weight_split maps letter Z of the stages to {axes}; give it one mesh axis"
            )
        return Stages(count, mesh, axes[0] if size > 1 else None, self._row_axes)

    def _Scope(self, direction: str) -> contextlib.AbstractContextManager:
        return tf.name_scope(f"{self.path.replace('.', '/')}/pipeline.{direction}/")

    def _Programs(
        self, args: Args, rows: int, batch_dim: int, seed: tf.Tensor | None, stages: Stages
    ) -> list[CellProgram]:
        """The cells, traced one after another for micro-batches of so many rows."""
        local = rows // stages.sum_blocks

        def spec(x: Any) -> tf.TensorSpec | None:
            if x is None:
                return None
            shape = x.shape.as_list()
            shape[batch_dim] = local
            return tf.TensorSpec(shape, x.dtype)

        tree = map_structure(spec, tuple(args))
        boundary = Boundary(tree, batch_dim, stages.devices // stages.sum_blocks)
        programs = []
        for k, cell in enumerate(self.cells):
            program = CellProgram(k, cell, self.specs, boundary, seed is not None, stages.Inside)
            boundary = program.outputs
            self._CheckOutputs(k, boundary, local)
            programs.append(program)
        return programs

    def _CheckOutputs(self, k: int, boundary: Boundary, rows: int) -> None:
        for spec in boundary.Specs():
            dim, rank = boundary.batch_dim, spec.shape.rank
            if rank <= dim or spec.shape[dim] != rows:
                raise PipelineError(
                    f"{self.path}: cell {k} returns a tensor of shape {spec.shape} for {rows} rows; dimension "
                    f"batch_dim={dim} of all that cells return counts rows"
                )

    def _Extras(self, programs: Sequence[CellProgram], means: Vectors, stages: Stages) -> NestedMap:
        """The extras of all cells from means [K, X], and updates from [K, P]."""
        extras = NestedMap()
        if EXTRAS in means:
            rows = stages.Sharded(means[EXTRAS], (None, None))
            for k, program in enumerate(programs):
                if leaves := program.CutExtras(rows, k):
                    extras[f"cell_{k}"] = program.extras.Pack(leaves)
        for name, value in means.items():
            if name != EXTRAS:
                extras.Set(f"updates.{self.specs[name].path}", value)
        return extras


def _num_rows(args: Args, batch_dim: int) -> int:
    """The rows of a batch. Raises PipelineError where tensors disagree, or there are none."""
    found = {
        x.shape[batch_dim] for x in flatten(args) if x is not None and x.shape.rank > batch_dim
    }
    if len(found) != 1 or any(x is not None and x.shape.rank <= batch_dim for x in flatten(args)):
        shapes = [None if x is None else tuple(x.shape.as_list()) for x in flatten(args)]
        raise PipelineError(
            f"inputs of shapes {shapes}: dimension batch_dim={batch_dim} of all of them counts rows, so it is the same"
        )
    return found.pop()


def _check_rows(rows: int, num: int, devices: int) -> None:
    if num < 1:
        raise PipelineError(f"num_micro_batches={num}: must be an integer of at least 1")
    if rows % num:
        good = [str(n) for n in range(1, rows + 1) if rows % n == 0]
        raise PipelineError(
            f"num_micro_batches={num}: a batch of {rows} rows does not divide into that many equal parts; choose "
            f"one of {', '.join(good)}"
        )
    if rows // num % devices:
        raise PipelineError(
            f"num_micro_batches={num}: the {rows // num} rows of a micro-batch do not divide among the {devices} "
            "devices that rows are spread over; choose fewer micro-batches, or a larger batch"
        )
