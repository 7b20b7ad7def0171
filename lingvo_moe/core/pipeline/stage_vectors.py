"""Packs tensors of different shapes into vectors of one length, so that all stages of a pipeline look alike.

Letters: Z stages, F elements of a packed vector.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_moe.core.base_layer import VariableSpec
from lingvo_moe.core.initializers import InitOfVariable, WeightInit
from lingvo_moe.core.nested_map import NestedMap, flatten, pack_as
from lingvo_moe.core.optimizers.weight_decay import is_table, own_dims
from lingvo_moe.core.sharding import SplitMap, dims_mapping
from lingvo_moe.core.sharding.branches import stacked_rows

PACKED_LETTERS = "ZF"


# --- weights


class PackedInit(InitOfVariable):
    """Each part of a packed variable starts as it would on its own, then come zeros."""

    def __init__(self) -> None:
        super().__init__("constant", 0.0)

    def OfVariable(self, spec: VariableSpec, seed: tf.Tensor) -> tf.Tensor:
        def row(parts: Sequence[VariableSpec], seed: tf.Tensor) -> tf.Tensor:
            zeros = WeightInit.Constant()
            padding = zeros(seed, (spec.shape[1] - _length(parts),), tf.as_dtype(spec.dtype))
            return tf.concat([*(tf.reshape(part.Init(seed), [-1]) for part in parts), padding], 0)

        rows = [functools.partial(row, parts) for parts in spec.packs]
        return stacked_rows(rows, seed, spec.split[0])


def packed_specs(path: str, cells: Sequence[NestedMap], weight_split: SplitMap) -> NestedMap:
    """Specs of variables [K, P] that hold the variables of K cells, one row for each cell.

    Variables of one dtype that an optimizer treats alike share a packed variable: those of as many dimensions, those
    that are not trainable.

    Args:
        path: what the names of the packed variables begin with.
        weight_split: letter -> mesh axis; 'Z' shards the stages.

    Raises:
        ValueError: no cell has a variable.
    """
    rows: dict[str, list[list[VariableSpec]]] = {}
    for k, cell in enumerate(cells):
        for spec in cell.Flatten():
            group = rows.setdefault(_group(spec), [[] for _ in cells])
            group[k].append(spec)
    if not rows:
        raise ValueError(f"{path}: no cell of the pipeline has a variable")
    specs = NestedMap()
    for name, packs in rows.items():
        first = next(spec for row in packs for spec in row)
        specs[name] = VariableSpec(
            path=f"{path}.{name}",
            shape=(len(cells), max(_length(row) for row in packs)),
            dtype=first.dtype,
            letters=PACKED_LETTERS,
            init=PackedInit(),
            split=dims_mapping(PACKED_LETTERS, weight_split),
            trainable=first.trainable,
            packs=tuple(map(tuple, packs)),
        )
    return specs


def _group(spec: VariableSpec) -> str:
    if not spec.trainable:
        return f"{spec.dtype}_state"
    return f"{spec.dtype}_tables" if is_table(spec) else f"{spec.dtype}_{own_dims(spec)}d"


def _length(specs: Sequence[VariableSpec]) -> int:
    return sum(math.prod(spec.shape) for spec in specs)


def unpacked_row(spec: VariableSpec, k: int, row: tf.Tensor) -> dict[str, tf.Tensor]:
    """The variables in row k of a packed variable, by their paths."""
    reshape = tf.reshape if isinstance(row, tf.Tensor) else np.reshape
    begin, variables = 0, {}
    for part in spec.packs[k]:
        end = begin + math.prod(part.shape)
        variables[part.path] = reshape(row[begin:end], part.shape)
        begin = end
    return variables


def packed_row(spec: VariableSpec, k: int, values: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Row k [P] of a packed variable, from its variables by their paths; it has at least one."""
    joined = tf.concat([tf.reshape(values[part.path], [-1]) for part in spec.packs[k]], 0)
    return tf.pad(joined, [[0, spec.shape[1] - joined.shape[0]]])


def by_path(specs: NestedMap, values: NestedMap) -> dict[str, Any]:
    """Values of a tree of variables by path, with packed variables opened.

    Args:
        specs: VariableSpecs, e.g. a task's, some of which may pack others. Each has a path of its own, so the weights
            of a state and their moving averages have to be opened apart.
        values: NumPy arrays or tensors, in the structure of `specs`.

    Raises:
        ValueError: two variables have the same path.
    """
    opened_values: dict[str, Any] = {}
    for spec, value in specs.Zip(values):
        opened = [unpacked_row(spec, k, value[k]) for k in range(len(spec.packs))]
        for values_of in opened or [{spec.path: value}]:
            if twice := sorted(opened_values.keys() & values_of.keys()):
                raise ValueError(
                    f"{twice[0]}: two variables have this path; open their trees apart"
                )
            opened_values.update(values_of)
    return opened_values


def from_paths(specs: NestedMap, values: Mapping[str, Any]) -> NestedMap:
    """The inverse of `by_path`, also for specs that pack the variables differently, or not at all.

    `from_paths(to, by_path(of, values))` turns the state of one pipeline into that of another, or of none.

    Raises:
        KeyError: a variable of `specs` is not among the values.
    """
    # Both have reshape, concat, pad and stack.
    library: Any = tf if any(isinstance(value, tf.Tensor) for value in values.values()) else np

    def flat(spec: VariableSpec) -> Any:
        return library.reshape(values[spec.path], [-1])

    def build(spec: VariableSpec) -> Any:
        parts = spec.parts
        if missing := [part.path for part in parts if part.path not in values]:
            raise KeyError(f"{missing[0]}: there is no value for this variable")
        if not spec.packs:
            return values[spec.path]
        nothing = flat(parts[0])[:0]
        rows = [library.concat([nothing, *map(flat, row)], 0) for row in spec.packs]
        return library.stack([library.pad(x, [[0, spec.shape[1] - x.shape[0]]]) for x in rows])

    return specs.Transform(build)


# --- activations


@dataclass(frozen=True)
class Boundary:
    """The tensors between two cells, for the rows of a micro-batch that a device has."""

    tree: Any  # their structure: tf.TensorSpecs, and None where an argument is None
    batch_dim: int  # the dimension of every tensor that counts rows

    def Specs(self) -> list[tf.TensorSpec]:
        """The tensors, without None."""
        return [spec for spec in flatten(self.tree) if spec is not None]

    def Lengths(self) -> dict[str, int]:
        """The number of elements, by dtype's name."""
        lengths: dict[str, int] = {}
        for spec in self.Specs():
            count = spec.shape.num_elements()
            lengths[spec.dtype.name] = lengths.get(spec.dtype.name, 0) + count
        return lengths

    def Pack(self, tree: Any, like: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Vectors [length] for each dtype in `like`.

        Args:
            tree: tensors in this structure; those of other dtypes may be None.
            like: vectors of the wanted lengths. Where this boundary has no tensor of a dtype, the result is that
                vector itself.
        """
        parts: dict[str, list[tf.Tensor]] = {}
        for spec, x in zip(flatten(self.tree), flatten(tree), strict=True):
            if spec is not None and spec.dtype.name in like:
                parts.setdefault(spec.dtype.name, []).append(tf.reshape(x, [-1]))
        packed = dict(like)
        for name, vectors in parts.items():
            joined = tf.concat(vectors, 0)
            packed[name] = tf.pad(joined, [[0, like[name].shape[0] - joined.shape[0]]])
        return packed

    def Unpack(self, packed: Mapping[str, tf.Tensor]) -> Any:
        """The inverse of Pack. Tensors of dtypes that are not in `packed` become None."""
        begins = dict.fromkeys(packed, 0)
        leaves: list[tf.Tensor | None] = []
        for spec in flatten(self.tree):
            if spec is None or spec.dtype.name not in packed:
                leaves.append(None)
                continue
            name, begin = spec.dtype.name, begins[spec.dtype.name]
            begins[name] = end = begin + spec.shape.num_elements()
            leaves.append(tf.reshape(packed[name][begin:end], spec.shape))
        return pack_as(self.tree, leaves)


def largest(boundaries: Sequence[Boundary]) -> dict[str, int]:
    """The most elements that any of the boundaries has, by dtype."""
    lengths: dict[str, int] = {}
    for boundary in boundaries:
        for name, count in boundary.Lengths().items():
            lengths[name] = max(count, lengths.get(name, 0))
    return dict(sorted(lengths.items()))
