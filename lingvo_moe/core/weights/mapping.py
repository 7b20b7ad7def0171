"""Pairs the variables of a model with the tensors of a source by a family's rules.

A rule names one tensor and a variable that has its values, with the layout of each (layout.py). Names have `{layer}`
(in a model of several stacks that of one) and `{expert}` where there is a tensor for each. Of a tensor that has parts,
each part has a rule of its own. A rule whose variable the model lacks says nothing of it, so that one table serves all
models of a family. Tensors give all of each variable, once; and each tensor goes into one, or the family leaves it out
by name. What is missing, left over or of another shape is an error before a value is read. Both directions follow from
the rules, `Values` and `Tensor`.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lingvo_moe.core.weights.layout import (
    Parts,
    dim_of,
    joined,
    outermost,
    parts_of,
    rearranged,
    shape_of,
    split,
)
from lingvo_moe.core.weights.source import WeightsError, WeightSource

_SHOWN = 3  # names in a message


@dataclass(frozen=True)
class WeightRule:
    """One tensor of a source, and the variable that has its values, or a part of them."""

    tensor: str  # its name, e.g. "model.layers.{layer}.self_attn.q_proj.weight"
    layout: str  # its layout, e.g. "(n k) m"
    variable: str  # the variable's path, below that of the layer where the tensor is of one, e.g. "self_atten.q"
    variable_layout: str  # the layout of the variable, of a layer or an expert alone, e.g. "m n k"


@dataclass(frozen=True)
class WeightPair:
    """A tensor, and a place of its values: a variable, or a layer or an expert of one that has those of all."""

    tensor: str
    rule: WeightRule
    path: str  # the variable's, e.g. "decoder.blocks.body.layers[0].self_atten.q"
    index: tuple[int, ...]  # (), or the number of the block of layers, and of the expert


@dataclass(frozen=True)
class WeightSlice:
    """A range of a tensor's first dimension, whose values are a range of an axis of each of its variables."""

    rows: slice  # the range in the tensor
    axis: str
    begin: int  # the first number in the axis
    step: int  # the length of all ranges of the axis but the last


class WeightMapping:
    """The pairs of a model, by a family's rules.

    Args:
        rules: the family's.
        shapes: the shape of each variable, by path.
        places: by what stands for the number of a layer in names, "layer" or a stack: for each layer by its number, the
            path of what has it, and its index in the variables there, e.g. ("decoder.blocks.body.layers[0]", 3); None:
            variables there have this layer alone.
        sizes: of the axes of layouts; "e" is the number of experts.

    Attributes:
        tensors: the pairs of each tensor, by name: one, or one for each of its parts.

    Raises WeightsError: the rules leave out a part of a variable, or give it twice.
    """

    def __init__(
        self,
        rules: Iterable[WeightRule],
        shapes: Mapping[str, tuple[int, ...]],
        places: Mapping[str, Sequence[tuple[str, int | None]]],
        sizes: Mapping[str, int],
    ):
        self._shapes, self._places, self._sizes = shapes, places, sizes
        self.tensors: dict[str, list[WeightPair]] = {}
        values = Counter[str]()
        for pair in (pair for rule in rules for pair in self._Pairs(rule)):
            self.tensors.setdefault(pair.tensor, []).append(pair)
            values[pair.path] += math.prod(shapes[pair.path][len(pair.index) :])
        for name, pairs in self.tensors.items():
            parts = [part for pair in pairs for part in parts_of(pair.rule.variable_layout)]
            assert sorted(map(sorted, parts)) == sorted(
                map(sorted, parts_of(pairs[0].rule.layout))
            ), name
        for path, shape in shapes.items():
            if values[path] != math.prod(shape):
                raise WeightsError(
                    f"{path} has {math.prod(shape):,} values, of which this family's tensors give {values[path]:,}"
                )

    def _Pairs(self, rule: WeightRule) -> Iterator[WeightPair]:
        stack = next((name for name in self._places if f"{{{name}}}" in rule.tensor), "")
        for layer, place in enumerate(self._places[stack] if stack else [None]):
            path = f"{place[0]}.{rule.variable}" if place else rule.variable
            if path not in self._shapes:
                continue
            blocks = () if place is None or place[1] is None else (place[1],)
            experts = range(self._sizes["e"]) if "{expert}" in rule.tensor else [None]
            for expert in experts:
                index = blocks if expert is None else (*blocks, expert)
                part = self._shapes[path][len(index) :]
                assert part == shape_of(rule.variable_layout, self._sizes), path
                name = rule.tensor.format(**{stack: layer}, expert=expert)
                yield WeightPair(name, rule, path, index)

    def Slices(self, name: str, most: int) -> list[WeightSlice]:
        """Cuts a tensor into slices of about `most` values; into one, where it has no axis that varies slowest and is a
        dimension of its variables."""
        shape, pairs = self.Shape(name), self.tensors[name]
        axis = outermost(pairs[0].rule.layout)
        whole = any(dim_of(pair.rule.variable_layout, axis) is None for pair in pairs)
        length = 1 if whole else self._sizes[axis]
        step = max(1, length * most // max(1, math.prod(shape)))
        rows = shape[0] // length if shape else 1  # for one of the axis
        return [
            WeightSlice(slice(i * rows, (i + step) * rows), axis, i, min(step, length))
            for i in range(0, length, step)
        ]

    def Values(self, pair: WeightPair, tensor: np.ndarray) -> np.ndarray:
        """The values of `variable[index]`, from those of the pair's tensor, or of a slice of it."""
        rule, sizes = pair.rule, self._sizes
        if (axis := outermost(rule.layout)) in sizes:
            rows = self.Shape(pair.tensor)[0] // sizes[axis]
            sizes = {**sizes, axis: tensor.shape[0] // rows}
        return rearranged(tensor, rule.layout, rule.variable_layout, sizes)

    def Box(self, pair: WeightPair, part: WeightSlice) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The place of a slice's values in the variable, and the shape of the boxes into which slices cut it."""
        rest = self._shapes[pair.path][len(pair.index) :]
        begin, box = [*pair.index, *(0 for _ in rest)], [*(1 for _ in pair.index), *rest]
        if (dim := dim_of(pair.rule.variable_layout, part.axis)) is not None:
            begin[len(pair.index) + dim], box[len(pair.index) + dim] = part.begin, part.step
        return tuple(begin), tuple(box)

    def Tensor(self, name: str, read: Callable[[WeightPair], np.ndarray]) -> np.ndarray:
        """The tensor of that name, the inverse of Values.

        Args:
            name: one of `tensors`.
            read: gives the values of `variable[index]` of a pair; it is called once for each of the tensor's pairs.
        """
        parts: Parts = {}
        for pair in self.tensors[name]:
            parts |= split(read(pair), pair.rule.variable_layout, self._sizes)
        return joined(parts, self.tensors[name][0].rule.layout, self._sizes)

    def Shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, one of `tensors`."""
        return shape_of(self.tensors[name][0].rule.layout, self._sizes)

    def Check(self, source: WeightSource, left_out: Sequence[str] = ()) -> list[str]:
        """Compares the tensors of a source with those that the model needs.

        Args:
            left_out: regular expressions of the names of tensors that are no weights, or copies.

        Returns the names of the tensors that are left out.

        Raises WeightsError: tensors are missing, of another shape, or of integers; or none of the model's.
        """
        needed = {name: self.Shape(name) for name in self.tensors}
        missing = [name for name in needed if name not in source.entries]
        if missing:
            raise WeightsError(f"{source.where}: lacks {_list(missing)}")
        others = [name for name in source.entries if name not in needed]
        unknown = [n for n in others if not any(re.fullmatch(form, n) for form in left_out)]
        if unknown:
            raise WeightsError(f"{source.where}: the model has no place for {_list(unknown)}")
        for name, shape in needed.items():
            if re.match("u?int|bool", dtype := source.entries[name].dtype):
                raise WeightsError(
                    f"{source.where}: {name} is of {dtype}: integers of a kind of quantization that is not read"
                )
            if source.entries[name].shape != shape:
                raise WeightsError(
                    f"{source.where}: {name} has the shape {list(source.entries[name].shape)}; the model needs "
                    f"{list(shape)}"
                )
        return others


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more tensors" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
