"""Cells of different shapes and weights as the equal blocks of a stack: GPipe's stages (Huang et al. 2018).

The weights of a stage are a row of packed variables [K, P], which a mesh axis shards. What passes between stages is a
packed vector too, one for each dtype. So loops.py runs cells as it runs equal blocks. Only the work of a tick differs:
in a manual region over all axes, a conditional with one branch for each cell picks that of the device's stage, and one
more branch does nothing, for ticks without a micro-batch.

The rows of a micro-batch are spread over the D devices along axis `data`. A device's rows are packed, and their loss is
a term of the batch's, as if they were a micro-batch. Only the cells see all rows of it: statistics of BatchNorm are
those of the micro-batch.

Letters: K cells, M micro-batches, D devices that have other rows, A elements of packed activations, P of packed
weights, X of packed extras.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from lingvo_moe.core import randomness
from lingvo_moe.core.base_layer import BaseLayer
from lingvo_moe.core.nested_map import NestedMap, flatten, map_structure
from lingvo_moe.core.pipeline.cell_program import EXTRAS, Cell, CellProgram, Vectors, weights_of
from lingvo_moe.core.pipeline.cells import Args, fprop_in_sequence, join_all_extras
from lingvo_moe.core.pipeline.parts import Context, Parts, Rest, Stack
from lingvo_moe.core.pipeline.schedule import DATA, STAGE
from lingvo_moe.core.pipeline.stage_vectors import Boundary, largest, packed_row, packed_specs
from lingvo_moe.core.sharding import (
    DimsMapping,
    Mesh,
    SplitMap,
    current_mesh,
    single_device,
    use_mesh,
)
from lingvo_moe.core.sharding.manual import manual_region
from lingvo_moe.core.sharding.row_parts import rows_spread_over
from lingvo_moe.core.tensors import sum_type


class PipelineError(ValueError):
    """Raised for cells that cannot be stages: tensors without rows, or rows that do not divide among devices."""


class CellStack:
    """K cells, whose variables are packed.

    Attributes:
        path: the path of the layer that they belong to.
        cells: the cells, in order.
        specs: VariableSpecs of the packed variables.
    """

    def __init__(
        self,
        path: str,
        name: str,
        cells: Sequence[Sequence[tuple[str, BaseLayer]]],
        weight_split: SplitMap,
    ):
        """
        Args:
            name: where the layer's theta has the packed variables.
            cells: the names and the layers of each cell. A layer's seed is folded with its name.
            weight_split: letter -> mesh axis. 'Z' is the axis of the stages.
        """
        self.path, self.cells = path, [_cell(layers) for layers in cells]
        self.specs = packed_specs(
            f"{path}.{name}", [cell.specs for cell in self.cells], weight_split
        )

    def InSequence(
        self, theta: NestedMap, args: Args, seed: tf.Tensor | None
    ) -> tuple[Args, NestedMap]:
        """Runs the cells one after another on a whole batch, as fprop_in_sequence runs layers.

        `updates` among the extras has the next values of packed variables.
        """
        extras, by_path = NestedMap(), dict[str, tf.Tensor]()
        for k, cell in enumerate(self.cells):
            weights = weights_of(self.specs, k, {name: rows[k] for name, rows in theta.items()})
            by_path.update(weights)
            of_cell = cell.specs.Pack([weights[spec.path] for spec in cell.specs.Flatten()])
            args, of_layers = cell.run(of_cell, args, seed)
            by_path.update(of_layers.pop("updates", NestedMap()).FlattenItems())
            join_all_extras(extras, of_layers)
        for spec in self.specs.Flatten():
            if not spec.trainable and seed is not None:
                rows = [packed_row(spec, k, by_path) for k in range(len(self.cells))]
                extras.Set(f"updates.{spec.path}", tf.stack(rows))
        return args, extras


@dataclass(frozen=True)
class CellParts:
    """A task, as one stack of cells, its loss and its metrics: see Parts, which `Traced` makes of it."""

    name: str  # the name of the stack, which operations carry
    weights: str  # the path in theta of the packed weights
    stack: CellStack
    # (rest, context) -> the arguments of the first cell: tensors, NestedMaps of them, None. Each tensor has the rows of
    # the micro-batch.
    enter: Callable[[Rest, Context], Args]
    # (rest, the outputs of the last cell, context) -> loss and metrics, as those of Parts.
    loss: Callable[[Rest, Args, Context], tuple[tf.Tensor, NestedMap]]
    # (sums of the metrics of `loss`, the sum of all losses, the extras of the cells) -> metrics of the step. Extras are
    # means over micro-batches, by the layer's name; `updates` are sums, as those of Parts.
    metrics: Callable[[NestedMap, tf.Tensor, NestedMap], NestedMap]
    added_loss: Callable[[NestedMap], tf.Tensor] | None = None  # see CellProgram
    batch_dim: int = 0  # the dimension of rows, in arguments and results of all cells
    enter_is_trained: bool = True  # whether the arguments of the first cell depend on weights

    @property
    def paths(self) -> list[str]:
        """The path in theta of the stack's weights, in a list; see Parts."""
        return [self.weights]

    @property
    def sizes(self) -> list[tuple[str, int]]:
        """The name of the stack and its number of cells; see Parts."""
        return [(self.name, len(self.stack.cells))]

    def Traced(self, rest: Rest, first: Callable[[], Context], num: int, devices: int) -> Parts:
        """The parts, with cells that are traced for micro-batches of the shapes of the first one.

        Args:
            first: makes the context of the first micro-batch.
            num: M, the number of micro-batches of the batch.
            devices: D, the devices along `data` that rows are spread over.

        Raises:
            PipelineError: the rows do not divide among the devices that they are spread over; a cell takes or returns a
                tensor whose dimension `batch_dim` is not its rows.
        """
        stages = CellStages(self, self.enter(rest, first()), num, devices)

        def enter(rest: Rest, context: Context) -> NestedMap:
            return NestedMap(stages.Packed(self.enter(rest, context)))

        def loss(rest: Rest, carry: NestedMap, context: Context) -> tuple[tf.Tensor, NestedMap]:
            return self.loss(rest, stages.last.Unpack(carry), context)

        def metrics(sums: NestedMap, loss: tf.Tensor, extras: NestedMap) -> NestedMap:
            return self.metrics(sums, loss, stages.Extras(extras[self.name]))

        stack = Stack(
            name=self.name,
            weights=self.weights,
            num_blocks=len(self.stack.cells),
            carry=dict.fromkeys(stages.lengths, "A"),
            enter=enter,
            takes={},
            cells=stages,
        )
        lengths = stages.last.Lengths()
        return Parts((stack,), tuple(lengths), loss, metrics, cut=lengths)


class CellStages:
    """The work of all stages in a tick, for cells that are traced.

    Attributes:
        lengths: A of what passes between stages, by dtype.
        last: the boundary after the last cell.
    """

    def __init__(self, parts: CellParts, args: Args, num: int, devices: int):
        mesh, stack, dim = current_mesh(), parts.stack, parts.batch_dim
        self._mesh: Mesh | None = None if mesh is None or mesh.size == 1 else mesh
        self._parts, self._devices = parts, devices
        self._share = 1.0 / (num * devices)
        rows = _num_rows(args, dim)
        if rows % devices:
            raise PipelineError(
                f"{stack.path}: the {rows} rows of a micro-batch do not divide among the {devices} devices that rows "
                "are spread over; choose fewer micro-batches, or a larger batch"
            )
        rows //= devices
        boundary = _boundary(args, dim, rows)
        self._programs = list[CellProgram]()
        for k, cell in enumerate(stack.cells):
            program = CellProgram(k, cell, stack.specs, boundary, parts.added_loss, self._Inside)
            boundary = program.outputs
            _check_outputs(f"{stack.path}: cell {k}", boundary, rows)
            self._programs.append(program)
        self.lengths = largest([*(program.inputs for program in self._programs), boundary])
        self.last = boundary

    def Packed(self, args: Args) -> Vectors:
        """The arguments of the first cell as vectors [A], by dtype."""
        blank = {name: tf.zeros([n], tf.as_dtype(name)) for name, n in self.lengths.items()}
        return self._programs[0].inputs.Pack(args, blank)

    def Extras(self, packed: NestedMap) -> NestedMap:
        """The extras of all layers by name, and `updates`, from sums [K, X] and [K, P]."""
        extras = NestedMap()
        for k, program in enumerate(self._programs):
            if program.extras:
                extras.update(program.CutExtras(packed[EXTRAS][k]))
        for name, total in packed.items():
            if name != EXTRAS:
                extras.Set(f"updates.{self._parts.stack.specs[name].path}", total)
        return extras

    def Forward(self, args: NestedMap, shared: NestedMap) -> NestedMap:
        """See Programs.Forward. Loss and extras have a dimension D, over which they are added up at the end."""
        extras = self._ExtraLengths()

        def work(k: int, stage: NestedMap) -> NestedMap:
            outs, loss, rows = self._programs[k].Forward(
                _rows(stage.weights), _rows(stage.carry), self._Seed(stage)
            )
            # The sums of updates are divided by M when they are applied.
            shares = {
                name: self._share if name == EXTRAS else 1.0 / self._devices for name in extras
            }
            sums = {
                name: shares[name] * _filled(rows.get(name), length, dtype, stage)
                for name, (length, dtype) in extras.items()
            }
            return NestedMap(
                carry=_as_carry(self._programs[k].outputs.Pack(outs, _rows(stage.carry))),
                loss=tf.reshape((loss + tf.cast(stage.zero, loss.dtype)) * self._share, [1, 1]),
                extras=NestedMap(
                    {n: x[tf.newaxis, tf.newaxis, tf.newaxis] for n, x in sums.items()}
                ),
            )

        return self._InStages(work, args, shared)

    def Backward(self, args: NestedMap, shared: NestedMap, carry: bool, weights: bool) -> NestedMap:
        """See Programs.Gradients. Those of weights have a dimension D, over which they are added up at the end."""
        trained = {n: s for n, s in self._parts.stack.specs.items() if s.trainable and weights}

        def work(k: int, stage: NestedMap) -> NestedMap:
            of_inputs = carry and (k > 0 or self._parts.enter_is_trained)
            inputs, rows = self._programs[k].Backward(
                _rows(stage.weights),
                _rows(stage.carry),
                self._Seed(stage),
                _rows(stage.upstream),
                self._share,
                (of_inputs, weights),
            )
            result = NestedMap(weights=[], rest=NestedMap())
            for name, spec in sorted(trained.items()):
                dtype = sum_type(tf.as_dtype(spec.dtype))
                row = _filled(rows.get(name), spec.shape[1], dtype, stage)
                result.weights.append(row[tf.newaxis, tf.newaxis, tf.newaxis])
            if carry:
                upstream = _rows(stage.upstream)
                result.carry = _as_carry(
                    self._programs[k].inputs.Pack(inputs, upstream) if of_inputs else upstream
                )
            return result

        return self._InStages(work, args, shared)

    def _InStages(
        self,
        work: Callable[[int, NestedMap], NestedMap],
        args: NestedMap,
        shared: NestedMap,
    ) -> NestedMap:
        """`work(cell, the stage's tensors)` of every stage's cell, zeros where it has no micro-batch.

        Tensors of a stage have a leading dimension 1, and those that differ by row a dimension 1 of D.
        """
        stage = _tensors_of_stages(args, shared)
        structure = NestedMap()
        K, numbers = args.first.shape[0], range(len(self._programs))

        def of_stage(cells: Sequence[int], index: tf.Tensor, part: NestedMap) -> list[tf.Tensor]:
            """The work of the cell of which `index` is the place in `cells`, or of none."""
            part.zero = tf.minimum(part.number[0, 0], 0)
            specs: list[tf.TensorSpec] = []

            def branch(k: int) -> list[tf.Tensor]:
                nonlocal structure
                structure = work(k, part)
                specs[:] = [tf.TensorSpec(x.shape, x.dtype) for x in structure.Flatten()]
                return structure.Flatten()

            def idle() -> list[tf.Tensor]:
                return [tf.fill(s.shape, tf.cast(part.zero, s.dtype)) for s in specs]

            index = tf.where(part.valid[0, 0], index, len(cells))
            branches: list[Any] = [lambda k=k: branch(k) for k in cells]
            return flatten(tf.switch_case(index, [*branches, idle]))

        if self._mesh is None:
            stages = []
            for s in range(K):
                part = stage.Pack([x[s : s + 1] for x in stage.Flatten()])
                stages.append(of_stage(numbers[s::K], part.first[0, 0] // K, part))
            return structure.Pack([tf.concat(parts, 0) for parts in zip(*stages, strict=True)])

        data = DATA if self._devices > 1 else None
        by_rows = ("carry", "upstream", "number")
        ins = [
            (STAGE, data if path.startswith(by_rows) else None) + (None,) * (x.shape.rank - 2)
            for path, x in stage.FlattenItems()
        ]
        outs: list[DimsMapping] = []

        def region(*local: tf.Tensor) -> tuple[tf.Tensor, ...]:
            part = stage.Pack(list(local))
            results = of_stage(numbers, part.first[0, 0], part)
            outs.extend((STAGE, data) + (None,) * (x.shape.rank - 2) for x in results)
            return tuple(results)

        results = manual_region(region, ins, outs, self._mesh)(*stage.Flatten())
        return structure.Pack(list(results))

    @contextlib.contextmanager
    def _Inside(self) -> Iterator[None]:
        """Enters the mesh with which a stage's layers run."""
        if self._mesh is None:
            yield
            return
        with use_mesh(single_device()), rows_spread_over(self._mesh, (DATA,)):
            yield

    def _Seed(self, stage: NestedMap) -> tf.Tensor:
        """The seed of the stage's micro-batch and of the device's rows."""
        return randomness.fold_in(stage.seed[0], stage.number[0, 0])

    def _ExtraLengths(self) -> dict[str, tuple[int, tf.DType]]:
        """The length and the dtype of each row of extras: P of each packed variable with updates, and X."""
        updated = {path for program in self._programs for path in program.updated}
        lengths = {
            name: (spec.shape[1], sum_type(tf.as_dtype(spec.dtype)))
            for name, spec in self._parts.stack.specs.items()
            if any(part.path in updated for row in spec.packs for part in row)
        }
        extras = [program.extras.Flatten() for program in self._programs]
        if any(extras):
            wide = any(x.dtype == tf.float64 for cell in extras for x in cell)
            length = max(sum(x.shape.num_elements() for x in cell) for cell in extras)
            lengths[EXTRAS] = (length, tf.float64 if wide else tf.float32)
        return lengths


def _tensors_of_stages(args: NestedMap, shared: NestedMap) -> NestedMap:
    """The tensors of all stages [K, ...] from the arguments of a tick; `shared` has the seed of the step."""
    stages = NestedMap(
        weights=args.weights,
        carry=args.parts.carry,
        number=args.parts.number,
        first=args.first[:, tf.newaxis],
        valid=args.valid[:, tf.newaxis],
        seed=tf.broadcast_to(shared.seed, [args.first.shape[0], 2]),
    )
    if "upstream" in args.parts:
        stages.upstream = args.parts.upstream
    return stages


def _cell(layers: Sequence[tuple[str, BaseLayer]]) -> Cell:
    specs = NestedMap(layers=[layer.VariableSpecs() for _, layer in layers])

    def run(theta: NestedMap, args: Args, seed: tf.Tensor | None) -> tuple[Args, NestedMap]:
        return fprop_in_sequence(layers, theta.layers, args, seed)

    return Cell(specs, run)


def _rows(vectors: NestedMap) -> Vectors:
    """A stage's own part of packed tensors: [P] of [1, 1, P]."""
    return {name: x[0, 0] for name, x in vectors.items()}


def _as_carry(vectors: Vectors) -> NestedMap:
    """Vectors [A] as [1, 1, A]."""
    return NestedMap({name: x[tf.newaxis, tf.newaxis] for name, x in vectors.items()})


def _filled(row: tf.Tensor | None, length: int, dtype: tf.DType, stage: NestedMap) -> tf.Tensor:
    """The row [P], with zeros after it up to a length. Zeros alone are no constants, which the partitioner would take
    for tensors from outside of the region."""
    if row is None:
        return tf.fill([length], tf.cast(stage.zero, dtype))
    return tf.pad(tf.cast(row, dtype), [[0, length - row.shape[0]]])


def _boundary(args: Args, dim: int, rows: int) -> Boundary:
    """The boundary of tensors, of which a device has so many rows."""

    def spec(x: Any) -> tf.TensorSpec | None:
        if x is None:
            return None
        shape = x.shape.as_list()
        shape[dim] = rows
        return tf.TensorSpec(shape, x.dtype)

    return Boundary(map_structure(spec, tuple(args)), dim)


def _num_rows(args: Args, dim: int) -> int:
    """The rows of a micro-batch. Raises PipelineError where tensors disagree, or there are none."""
    tensors = [x for x in flatten(args) if x is not None]
    rows = {x.shape[dim] if x.shape.rank > dim else None for x in tensors}
    if len(rows) != 1 or None in rows:
        shapes = [tuple(x.shape.as_list()) for x in tensors]
        raise PipelineError(
            f"inputs of shapes {shapes}: dimension batch_dim={dim} of all of them counts rows, so it is the same"
        )
    return rows.pop()  # type: ignore[return-value]


def _check_outputs(cell: str, boundary: Boundary, rows: int) -> None:
    for spec in boundary.Specs():
        dim, rank = boundary.batch_dim, spec.shape.rank
        if rank <= dim or spec.shape[dim] != rows:
            raise PipelineError(
                f"{cell} returns a tensor of shape {spec.shape} for {rows} rows; dimension batch_dim={dim} of all that "
                "cells return counts rows"
            )
