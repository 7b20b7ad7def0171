"""Runs one cell of a pipeline on packed tensors: forward, and the gradient of a recomputed forward."""

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
EXTRAS = "extras"  # the vector of a cell's extras, beside those of its updates


@dataclass(frozen=True)
class Cell:
    """A stage's layers."""

    specs: NestedMap  # the VariableSpecs of theta
    # (theta, args, seed or None) -> (outputs, extras), as HasExtras.FPropWithExtras.
    run: Callable[[NestedMap, Args, tf.Tensor | None], tuple[Args, NestedMap]]


@dataclass
class CellProgram:
    """A cell that was traced for arguments of known shapes."""

    number: int  # k, of the cell
    cell: Cell  # what it computes
    weights: NestedMap  # the specs of the packed variables, whose rows k have the cell's weights
    inputs: Boundary  # the boundary before the cell
    seeded: bool  # whether it gets a seed
    # Opens what is in force where the cell runs, e.g. a mesh of one device inside a manual region.
    context: Callable[[], contextlib.AbstractContextManager]
    outputs: Boundary = field(init=False)  # the boundary after it
    extras: NestedMap = field(init=False)  # the specs of its extras, without updates
    # The paths of the variables whose next values it returns.
    updated: list[str] = field(init=False)

    def __post_init__(self) -> None:
        leaves = [tf.TensorSpec(s.shape, s.dtype) for s in self.cell.specs.Flatten()]
        args = self.inputs.Specs()
        seeds = [tf.TensorSpec([2], tf.int32)] if self.seeded else []

        def run(*flat: tf.Tensor) -> list[tf.Tensor]:
            own, given = flat[: len(leaves)], flat[len(leaves) : len(leaves) + len(args)]
            seed = flat[-1] if self.seeded else None
            outs, updates, extras = self._Run(list(own), list(given), seed)
            self.outputs = self._Outputs(outs)
            self.updated = list(updates)
            self.extras = extras.Transform(lambda x: tf.TensorSpec(x.shape, x.dtype))
            tensors = [x for x in flatten(outs) if x is not None]
            return [*tensors, *updates.values(), *extras.Flatten()]

        traced = tf.function(run, autograph=False)
        self._traced = traced.get_concrete_function(*leaves, *args, *seeds)

    def Forward(
        self, weights: Vectors, given: Vectors, seed: tf.Tensor | None, sums: Vectors
    ) -> tuple[Any, Vectors]:
        """The outputs for a micro-batch, and the sums with its updates and extras added.

        Args:
            weights: row k [P] of each packed variable.
            given: the packed inputs, [D, A] by dtype.
            sums: [1, P] for each packed variable that has updates, by name, and [1, X] for EXTRAS.
        """
        theta = self._Weights(weights)
        args = [x for x in flatten(self.inputs.Unpack(given)) if x is not None]
        leaves = [theta[spec.path] for spec in self.cell.specs.Flatten()]
        found = self._traced(*leaves, *args, *([] if seed is None else [seed]))
        count = len(self.outputs.Specs())
        rest = iter(found[:count])
        outs = [None if spec is None else next(rest) for spec in flatten(self.outputs.tree)]
        updates = dict(zip(self.updated, found[count:]))
        extras = found[count + len(updates) :]
        added = dict(sums)
        for name in sums.keys() & self._Groups().keys():
            spec = self._Groups()[name]
            now = {part.path: theta[part.path] for part in spec.packs[self.number]} | updates
            row = packed_row(spec, self.number, now)
            added[name] = sums[name] + tf.cast(row, sums[name].dtype)
        if extras:
            flat = [tf.reshape(tf.cast(x, sums[EXTRAS].dtype), [-1]) for x in extras]
            joined = tf.concat(flat, 0)
            missing = sums[EXTRAS].shape[1] - joined.shape[0]
            added[EXTRAS] = sums[EXTRAS] + tf.pad(joined, [[0, missing]])
        return pack_as(self.outputs.tree, outs), added

    def Backward(
        self,
        weights: Vectors,
        given: Vectors,
        seed: tf.Tensor | None,
        upstream: Vectors,
        dextras: tf.Tensor | None,
    ) -> tuple[Any, Vectors]:
        """The gradients of the inputs (None for integers), and rows [1, P] of those of the packed variables that are
        trained and of which the cell has a part, by name.

        Args:
            upstream: the gradients of the outputs, packed, by floating-point dtype.
            dextras: [1, X], those of the extras; None if no cell has extras.
        """
        theta = self._Weights(weights)
        leaves = [theta[spec.path] for spec in self.cell.specs.Flatten()]
        args = [x for x in flatten(self.inputs.Unpack(given)) if x is not None]
        trained = [k for k, spec in enumerate(self.cell.specs.Flatten()) if spec.trainable]
        floating = [k for k, x in enumerate(args) if x.dtype.is_floating]
        sources = [leaves[k] for k in trained] + [args[k] for k in floating]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(sources)
            outs, _, extras = self._Run(leaves, args, seed)
        douts = flatten(self.outputs.Unpack(upstream))
        if dextras is not None:
            douts += self.CutExtras(dextras, 0)
        pairs = [
            (y, dy)
            for y, dy in zip(flatten(outs) + extras.Flatten(), douts, strict=True)
            if y is not None and dy is not None
        ]
        found = tape.gradient([y for y, _ in pairs], sources, [dy for _, dy in pairs])
        grads = [or_zeros(g, x) for g, x in zip(found, sources, strict=True)]
        specs = self.cell.specs.Flatten()
        by_path = {specs[k].path: g for k, g in zip(trained, grads)}
        dargs = dict(zip(floating, grads[len(trained) :]))
        rows = {
            name: packed_row(spec, self.number, by_path)[tf.newaxis]
            for name, spec in self._Groups().items()
            if spec.trainable
        }
        return self._InTree(dargs), {
            name: tf.cast(x, sum_type(x.dtype)) for name, x in rows.items()
        }

    def _Groups(self) -> dict[str, VariableSpec]:
        """The packed variables of which this cell has a part."""
        return {name: spec for name, spec in self.weights.items() if spec.packs[self.number]}

    def _Weights(self, rows: Vectors) -> dict[str, tf.Tensor]:
        """The cell's weights by path."""
        found: dict[str, tf.Tensor] = {}
        for name, spec in self._Groups().items():
            found.update(unpacked_row(spec, self.number, rows[name]))
        return found

    def _Run(
        self, leaves: Sequence[tf.Tensor], args: Sequence[tf.Tensor], seed: tf.Tensor | None
    ) -> tuple[Args, dict[str, tf.Tensor], NestedMap]:
        """The cell's outputs, updates by path, and extras without updates."""
        with self.context():
            theta = self.cell.specs.Pack(list(leaves))
            outs, extras = self.cell.run(theta, self._InTree(dict(enumerate(args))), seed)
        updates = dict(extras.get("updates", NestedMap()).FlattenItems())
        rest = NestedMap({name: value for name, value in extras.items() if name != "updates"})
        self._CheckExtras(updates, rest)
        return outs, updates, rest

    def _CheckExtras(self, updates: Mapping[str, tf.Tensor], rest: NestedMap) -> None:
        own = {spec.path for spec in self.cell.specs.Flatten() if not spec.trainable}
        if unknown := [path for path in updates if path not in own]:
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
        return Boundary(tree, self.inputs.batch_dim, self.inputs.blocks)

    def CutExtras(self, rows: tf.Tensor, k: int) -> list[tf.Tensor]:
        """The cell's extras, or their gradients, from row k of packed ones [.., X]."""
        begin, found = 0, []
        for spec in self.extras.Flatten():
            end = begin + spec.shape.num_elements()
            found.append(tf.cast(tf.reshape(rows[k, begin:end], spec.shape), spec.dtype))
            begin = end
        return found
