"""Pairs the variables of a model with the tensors of a source by a family's rules, and moves values both ways.

A rule names one tensor and the variables that have its values, with the layout of each (layout.py). Names have
`{layer}` and `{expert}` where there is a tensor for each. A rule whose variables the model lacks says nothing of it, so
that one table serves all models of a family. Each variable comes from one tensor, and each tensor goes into variables,
or is one that the family leaves out by name: what is missing, left over or of another shape is an error before a value
is read.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lingvo_moe.core.weights.layout import Layout, Parts
from lingvo_moe.core.weights.source import WeightsError, WeightSource, count

_SHOWN = 3  # names in a message


@dataclass(frozen=True)
class WeightRule:
    """One tensor of a source, and the variables that it has the values of."""

    tensor: str  # its name, e.g. "model.layers.{layer}.self_attn.q_proj.weight"
    layout: str  # its layout, e.g. "(n k) m"
    variables: Mapping[
        str, str
    ]  # the layout of each variable by its path, e.g. {"self_atten.q": "m n k"}


@dataclass(frozen=True)
class Slot:
    """The place of a tensor's values: a variable, or a layer or an expert of one that has those of all."""

    path: str  # the variable's, e.g. "decoder.blocks.body.layers[0].self_atten.q"
    index: tuple[int, ...]  # (), or the number of the block of layers, and of the expert


@dataclass(frozen=True)
class WeightPair:
    """A tensor, and the slots for its values."""

    tensor: str
    layout: Layout
    slots: Mapping[Slot, Layout]

    def ToSlots(self, tensor: np.ndarray, sizes: Mapping[str, int]) -> dict[Slot, np.ndarray]:
        """The values of each slot."""
        parts = self.layout.Split(tensor, sizes)
        return {slot: layout.Join(parts, sizes) for slot, layout in self.slots.items()}

    def ToTensor(self, values: Mapping[Slot, np.ndarray], sizes: Mapping[str, int]) -> np.ndarray:
        """The tensor of the values of its slots."""
        parts: Parts = {}
        for slot, layout in self.slots.items():
            parts |= layout.Split(values[slot], sizes)
        return self.layout.Join(parts, sizes)


class WeightMapping:
    """The pairs of a model, by a family's rules.

    Args:
        rules: paths are below a layer's where the tensor's name has `{layer}`.
        shapes: the shape of each variable, by path.
        places: for each layer by its number, the path of what has it, and its index in the variables there, e.g.
            ("decoder.blocks.body.layers[0]", 3).
        sizes: of the axes of layouts; "e" is the number of experts.

    Raises WeightsError: the rules leave out a part of a variable, or give it twice.
    """

    def __init__(
        self,
        rules: Iterable[WeightRule],
        shapes: Mapping[str, tuple[int, ...]],
        places: Sequence[tuple[str, int]],
        sizes: Mapping[str, int],
    ):
        self._shapes, self._places, self.sizes = shapes, places, sizes
        self.pairs = [pair for rule in rules for pair in self._Pairs(rule)]
        slots = Counter(slot for pair in self.pairs for slot in pair.slots)
        values = Counter[str]()
        for slot, number in slots.items():
            values[slot.path] += number * count(shapes[slot.path][len(slot.index) :])
        for path, shape in shapes.items():
            if values[path] != count(shape):
                raise WeightsError(
                    f"{path} has {count(shape):,} values, of which this family's tensors give {values[path]:,}"
                )

    def _Pairs(self, rule: WeightRule) -> Iterator[WeightPair]:
        layout = Layout(rule.layout)
        inner = {path: Layout(text) for path, text in rule.variables.items()}
        places = enumerate(self._places) if "{layer}" in rule.tensor else [(0, None)]
        for layer, place in places:
            start, blocks = (f"{place[0]}.", (place[1],)) if place else ("", ())
            if not all(start + path in self._shapes for path in inner):
                continue
            per_expert = "{expert}" in rule.tensor
            for expert in range(self.sizes["e"] if per_expert else 1):
                index = (*blocks, expert) if per_expert else blocks
                slots = {Slot(start + path, index): form for path, form in inner.items()}
                for slot, form in slots.items():
                    assert self._shapes[slot.path][len(index) :] == form.Shape(self.sizes), slot
                yield WeightPair(rule.tensor.format(layer=layer, expert=expert), layout, slots)

    def Check(self, source: WeightSource, left_out: Sequence[str] = ()) -> list[str]:
        """Compares the tensors of a source with those that the model needs.

        Args:
            left_out: regular expressions of the names of tensors that are no weights, or copies.

        Returns the names of the tensors that are left out.

        Raises WeightsError: tensors are missing, or of another shape, or none of the model's.
        """
        needed = {pair.tensor: pair.layout.Shape(self.sizes) for pair in self.pairs}
        missing = [name for name in needed if name not in source.entries]
        if missing:
            raise WeightsError(f"{source.where}: lacks {_list(missing)}")
        others = [name for name in source.entries if name not in needed]
        unknown = [n for n in others if not any(re.fullmatch(form, n) for form in left_out)]
        if unknown:
            raise WeightsError(f"{source.where}: the model has no place for {_list(unknown)}")
        for name, shape in needed.items():
            if source.entries[name].shape != shape:
                raise WeightsError(
                    f"{source.where}: {name} has the shape {list(source.entries[name].shape)}; the model needs "
                    f"{list(shape)}"
                )
        return others


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more tensors" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
