"""Finds in a checkpoint the variables that a run packs, e.g. those of a pipeline's stages (VariableSpec.packs).

A checkpoint shows the variables as they are without packing, by the same names whatever the packing was. Its files have
the packed tensors [K, P] as the run had them, so that each device writes what it holds. Letters: K rows, P elements.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lingvo_moe.core.engine.lowering.specs import TensorSpec, dtype_name, numpy_dtype
from lingvo_moe.core.nested_map import flatten_items, skeleton


@dataclass(frozen=True)
class PackedLayout:
    """The variables in each packed tensor of a tree."""

    unpacked: Any  # the tree without packing; its leaves have shape and dtype
    # For each packed tensor, by its path in the tree, the paths in `unpacked` of the variables in each row.
    rows: Mapping[str, Sequence[Sequence[str]]]

    @classmethod
    def Of(cls, specs: Mapping[str, Any], unpacked: Mapping[str, Any]) -> "PackedLayout":
        """The packing of VariableSpecs.

        Args:
            specs: e.g. a task's StateSpecs. The variables of each of its parts, such as theta, differ in `path`.
            unpacked: those of BaseTask.Unpacked.
        """
        rows = {}
        for part, tree in specs.items():
            paths = {spec.path: path for path, spec in flatten_items(unpacked[part], part)}
            for path, spec in flatten_items(tree, part):
                if spec.packs:
                    rows[path] = [[paths[one.path] for one in row] for row in spec.packs]
        return cls(unpacked, rows)

    def Variables(self, name: str) -> list[str]:
        """The variables in a tensor of the tree: itself, if it is not packed."""
        return [one for row in self.rows[name] for one in row] if name in self.rows else [name]

    def Unpacked(self, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
        """The specs of the variables in tensors of the tree."""
        tree = dict(flatten_items(self.unpacked)) if self.rows else {}
        unpacked = []
        for spec in specs:
            if spec.name in self.rows:
                unpacked += [TensorSpec.Of(tree[name], name) for name in self.Variables(spec.name)]
            else:
                unpacked.append(spec)
        return unpacked

    def Packed(self, spec: TensorSpec, values: Mapping[str, np.ndarray]) -> np.ndarray:
        """A tensor of the tree from its variables, by their paths."""
        if spec.name not in self.rows:
            return values[spec.name]
        packed = np.zeros(spec.shape, numpy_dtype(spec.dtype))
        for k, row in enumerate(self.rows[spec.name]):
            joined = np.concatenate([values[one].reshape(-1) for one in row]) if row else packed[k]
            packed[k, : len(joined)] = joined
        return packed

    def About(
        self, tensors: Mapping[str, Any], written_as: int, extra: Mapping[str, Any]
    ) -> dict[str, Any]:
        """A checkpoint's JSON, for tensors by their paths, of the format `written_as`; see Stored."""
        return {
            "format": written_as,
            "variables": [
                {"name": path, "shape": list(x.shape), "dtype": dtype_name(x.dtype)}
                for path, x in flatten_items(self.unpacked)
            ],
            "packed": {
                name: {"shape": list(tensors[name].shape), "rows": [list(row) for row in rows]}
                for name, rows in self.rows.items()
            },
            "structure": skeleton(self.unpacked),
            "extra": dict(extra),
        }


class Stored:
    """Finds the place of each variable in the tensors of a checkpoint.

    Args:
        about: the checkpoint's JSON. `variables` has name, shape and dtype of each; `packed`, which it may lack, the
            shape and the rows of each tensor that packs some of them.

    Attributes:
        types: the shape and dtype of each variable.
        written_as: the format of the checkpoint, see arrays.py.
    """

    def __init__(self, about: Mapping[str, Any]):
        self.types = {v["name"]: (tuple(v["shape"]), v["dtype"]) for v in about["variables"]}
        self.written_as: int = about["format"]
        self._packed = about.get("packed", {})
        self._places: dict[str, tuple[str, int, int]] = {}
        for name, tensor in self._packed.items():
            for k, row in enumerate(tensor["rows"]):
                begin = 0
                for variable in row:
                    self._places[variable] = name, k, begin
                    begin += math.prod(self.types[variable][0])

    def Has(self, spec: TensorSpec, packing: PackedLayout) -> bool:
        """Whether a tensor of a run is there as the run has it."""
        if spec.name not in packing.rows:
            return spec.name not in self._places
        rows = [list(row) for row in packing.rows[spec.name]]
        return self._packed.get(spec.name) == {"shape": list(spec.shape), "rows": rows}

    def Tensors(self, variables: Iterable[str]) -> list[str]:
        """The names of the tensors that have these variables, sorted."""
        return sorted({self._places[v][0] if v in self._places else v for v in variables})

    def Variable(self, name: str, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
        """A variable, from the tensors by their names."""
        if name not in self._places:
            return tensors[name]
        tensor, k, begin = self._places[name]
        shape = self.types[name][0]
        return tensors[tensor][k, begin : begin + math.prod(shape)].reshape(shape)
