"""Runs one cell of a pipeline on packed tensors: forward, and the gradient of a recomputed forward.

Letters: K cells, P elements of packed weights, A of packed activations, X of packed extras.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from lingvo_moe.core.base_layer import VariableSpec
from lingvo_moe.core.nested_map import NestedMap, flatten, flatten_items, map_structure, pack_as
from lingvo_moe.core.pipeline.cells import Args
from lingvo_moe.core.pipeline.stage_vectors import Boundary, packed_row, unpacked_row
from lingvo_moe.core.tensors import or_zeros, sum_type

Vectors = dict[str, tf.Tensor]
EXTRAS = "extras"  # the name of the vector of a cell's extras, beside those of its updates


@dataclass(frozen=True)
class Cell:
    """The layers of one cell."""

    specs: NestedMap  # the VariableSpecs of theta
    # (theta, args, seed or None) -> (outputs, extras), as HasExtras.FPropWithExtras.
    run: Callable[[NestedMap, Args, tf.Tensor | None], tuple[Args, NestedMap]]


@dataclass
class CellProgram:
    """A cell that was traced for arguments of known shapes."""

    number: int  # the cell's number
    cell: Cell  # what it computes
    packed: NestedMap  # the specs of the packed variables, whose rows of this number have the cell's weights
    inputs: Boundary  # the boundary before the cell
    # Computes from the extras of a cell the loss that it adds: a mean over rows, or None where it adds none.
    added_loss: Callable[[NestedMap], tf.Tensor] | None
    # Opens what is in force where the cell runs, e.g. a mesh of one device inside a manual region.
    context: Callable[[], contextlib.AbstractContextManager]
    outputs: Boundary = field(init=False)  # the boundary after it
    extras: NestedMap = field(init=False)  # the specs of its extras, without updates
    updated: list[str] = field(init=False)  # the paths of variables whose next values it returns

    def __post_init__(self) -> None:
        leaves = [tf.TensorSpec(s.shape, s.dtype) for s in self.cell.specs.Flatten()]
        args = self.inputs.Specs()

        def run(seed: tf.Tensor, *tensors: tf.Tensor) -> list[tf.Tensor]:
            weights, arguments = tensors[: len(leaves)], tensors[len(leaves) :]
            outs, loss, updates, extras = self._Run(weights, arguments, seed)
            self.outputs = self._Outputs(outs)
            self.updated = list(updates)
            self.extras = extras.Transform(lambda x: tf.TensorSpec(x.shape, x.dtype))
            tensors_out = [x for x in flatten(outs) if x is not None]
            return [loss, *tensors_out, *updates.values(), *extras.Flatten()]

        traced = tf.function(run, autograph=False)
        seed = tf.TensorSpec([2], tf.int32)
        self._traced = traced.get_concrete_function(seed, *leaves, *args)

    def Forward(
        self, weights: Vectors, inputs: Vectors, seed: tf.Tensor
    ) -> tuple[Any, tf.Tensor, Vectors]:
        """The outputs for a micro-batch; the loss that the cell adds, float32; and rows: [P] of each packed variable
        of which it returns next values, by name, and [X] of its extras.

        Args:
            weights: row `number` [P] of each packed variable.
            inputs: the packed inputs, [A] by dtype.
        """
        theta = self._Weights(weights)
        leaves = [theta[spec.path] for spec in self.cell.specs.Flatten()]
        results = iter(self._traced(seed, *leaves, *self._Arguments(inputs)))
        loss = next(results)
        outs = [None if spec is None else next(results) for spec in flatten(self.outputs.tree)]
        updates = {path: next(results) for path in self.updated}
        rows = {}
        for name, spec in self._Groups().items():
            if any(part.path in updates for part in spec.packs[self.number]):
                rows[name] = packed_row(spec, self.number, theta | updates)
        if extras := [tf.reshape(tf.cast(x, sum_type(x.dtype)), [-1]) for x in results]:
            rows[EXTRAS] = tf.concat(extras, 0)
        return pack_as(self.outputs.tree, outs), loss, rows

    def Backward(
        self,
        weights: Vectors,
        inputs: Vectors,
        seed: tf.Tensor,
        upstream: Vectors,
        share: float,
        wanted: tuple[bool, bool],
    ) -> tuple[Any, Vectors]:
        """The gradients of the inputs (None for integers), and rows [P] of those of the packed variables that are
        trained and of which the cell has a part, by name.

        Args:
            upstream: the gradients of the outputs, packed, by floating-point dtype.
            share: the gradient of the loss that the cell adds.
            wanted: whether the gradients of the inputs are asked for, and those of the weights.
        """
        by_path, specs = self._Weights(weights), self.cell.specs.Flatten()
        leaves = [by_path[spec.path] for spec in specs]
        args = self._Arguments(inputs)
        trained = [k for k, spec in enumerate(specs) if spec.trainable and wanted[1]]
        floating = [k for k, x in enumerate(args) if x.dtype.is_floating and wanted[0]]
        sources = [leaves[k] for k in trained] + [args[k] for k in floating]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(sources)
            outs, loss, _, _ = self._Run(leaves, args, seed)
        upstreams = zip(flatten(outs), flatten(self.outputs.Unpack(upstream)), strict=True)
        pairs = [(y, dy) for y, dy in upstreams if y is not None and dy is not None]
        targets = [y for y, _ in pairs] + [loss]
        of_loss = tf.constant(share, loss.dtype)
        grads = tape.gradient(targets, sources, [dy for _, dy in pairs] + [of_loss])
        dense = [or_zeros(g, x) for g, x in zip(grads, sources, strict=True)]
        gradients = {specs[k].path: g for k, g in zip(trained, dense, strict=False)}
        of_inputs = dict(zip(floating, dense[len(trained) :], strict=True))
        rows = {
            name: packed_row(spec, self.number, gradients)
            for name, spec in self._Groups().items()
            if spec.trainable and wanted[1]
        }
        return self._InTree(of_inputs), {
            name: tf.cast(x, sum_type(x.dtype)) for name, x in rows.items()
        }

    def CutExtras(self, row: tf.Tensor) -> NestedMap:
        """The cell's extras from packed ones [X]."""
        begin, leaves = 0, []
        for spec in self.extras.Flatten():
            end = begin + spec.shape.num_elements()
            leaves.append(tf.reshape(row[begin:end], spec.shape))
            begin = end
        return self.extras.Pack(leaves)

    def _Groups(self) -> dict[str, VariableSpec]:
        """The packed variables of which this cell has a part."""
        return {name: spec for name, spec in self.packed.items() if spec.packs[self.number]}

    def _Weights(self, rows: Vectors) -> dict[str, tf.Tensor]:
        """The cell's weights by path."""
        return weights_of(self.packed, self.number, rows)

    def _Arguments(self, inputs: Vectors) -> list[tf.Tensor]:
        return [x for x in flatten(self.inputs.Unpack(inputs)) if x is not None]

    def _Run(
        self, leaves: Sequence[tf.Tensor], args: Sequence[tf.Tensor], seed: tf.Tensor
    ) -> tuple[Args, tf.Tensor, dict[str, tf.Tensor], NestedMap]:
        """The cell's outputs, the loss that it adds, updates by path, and extras without updates."""
        with self.context():
            theta = self.cell.specs.Pack(list(leaves))
            outs, extras = self.cell.run(theta, self._InTree(dict(enumerate(args))), seed)
            adds = self.added_loss if extras else None
            loss = tf.constant(0.0) if adds is None else adds(extras)
        updates = dict(extras.get("updates", NestedMap()).FlattenItems())
        rest = NestedMap({name: value for name, value in extras.items() if name != "updates"})
        self._CheckExtras(updates, rest)
        return outs, loss, updates, rest

    def _CheckExtras(self, updates: Mapping[str, tf.Tensor], rest: NestedMap) -> None:
        untrained = {spec.path for spec in self.cell.specs.Flatten() if not spec.trainable}
        if unknown := [path for path in updates if path not in untrained]:
            raise ValueError(
                f"cell {self.number}: {unknown[0]}: an update of what is no variable of this cell with trainable=False"
            )
        for path, x in flatten_items(rest):
            if not x.dtype.is_floating:
                raise TypeError(
                    f"cell {self.number}: extra {path} is {x.dtype.name}; extras are floating point"
                )

    def _InTree(self, args: Mapping[int, tf.Tensor]) -> Any:
        """Arguments by their number, None not counted, in the structure of the inputs."""
        numbers = iter(range(len(self.inputs.Specs())))
        leaves = [
            None if spec is None else args.get(next(numbers)) for spec in flatten(self.inputs.tree)
        ]
        return pack_as(self.inputs.tree, leaves)

    def _Outputs(self, outs: Args) -> Boundary:
        tree = map_structure(
            lambda x: None if x is None else tf.TensorSpec(x.shape, x.dtype), tuple(outs)
        )
        return Boundary(tree, self.inputs.batch_dim)


def weights_of(
    packed: NestedMap, number: int, rows: Mapping[str, tf.Tensor]
) -> dict[str, tf.Tensor]:
    """The weights of a cell by path, from its rows [P] of the packed variables by name."""
    weights: dict[str, tf.Tensor] = {}
    for name, spec in packed.items():
        if spec.packs[number]:
            weights.update(unpacked_row(spec, number, rows[name]))
    return weights
