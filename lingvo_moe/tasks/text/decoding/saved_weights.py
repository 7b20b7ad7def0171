"""A tree of weights as variables of a function that is exported."""

import re
from typing import Any

import tensorflow as tf

from lingvo_moe.core.kernels import eight_bit
from lingvo_moe.core.kernels.packed_weights import PackAs
from lingvo_moe.core.kernels.weights import FEWEST_ROWS, Heads, Packed
from lingvo_moe.core.nested_map import NestedMap


class SavedWeights(tf.Module):
    """One variable for each tensor of a tree of weights, plain (tensors, arrays) or packed."""

    def __init__(self, theta: NestedMap):
        super().__init__(name="weights")
        self._variables = [
            tf.Variable(value, trainable=False, name=re.sub(r"[\[\]]+", "_", path))
            for path, leaf in theta.FlattenItems()
            for value in _tensors(leaf)
        ]
        # Packed leaves without their tensors. tf.Module would track, and wrap, a NestedMap, but no closure.
        structure = theta.Transform(_empty)
        self._structure = lambda: structure

    def Theta(self) -> NestedMap:
        """The weights in the structure of the tree, as variables: a loop carries those as one operation each, where a
        tensor takes six, and reads them in its body."""
        values = iter(self._variables)

        def read(leaf: Packed | None) -> Packed | tf.Tensor:
            if leaf is None:
                return next(values)
            return leaf.With(*(next(values) for _ in leaf.tensors))

        return self._structure().Transform(read)

    def Assign(self, theta: NestedMap) -> None:
        """Assigns other values to all variables, from a tree of the same structure and shapes.

        Raises:
            ValueError: some weights are of 8 bits.
        """
        leaves = theta.Flatten()
        if any(_has_8_bits(leaf) for leaf in leaves):
            raise ValueError(
                "weights of 8 bits cannot be assigned: TensorFlow packs them when they are first used and does not"
                " read them again"
            )
        values = [value for leaf in leaves for value in _tensors(leaf)]
        for variable, value in zip(self._variables, values, strict=True):
            variable.assign(value)


class PackedWeights(SavedWeights):
    """The weights of a model, packed (`BaseLayer.PackWeights`) and read by the layers' own code.

    The model's methods take `Theta`, and must be traced while TensorFlow's kernels are in use.

    Attributes:
        fewest_rows: of a batch, so that a row's results are those of any batch: 1 where all products with weights are
            those of packed ones that add up alike, as of 8 bits.

    Args:
        model: whose weights they are; one that packs none runs as it is.
        theta: its weights, arrays or tensors.
        kind, beam_size: see `PackAs`.

    Raises:
        ValueError: int8 for a model that packs none, or where there are no products of 8 bits.
    """

    def __init__(self, model: Any, theta: NestedMap, kind: str = "float32", beam_size: int = 4):
        if kind == "int8":
            eight_bit.check_supported()
        # tf.Module would track a model, but no closure.
        self._model, self._packing = lambda: model, PackAs(kind, beam_size)
        weights = self._Packed(theta)
        self.are_packed = any(isinstance(leaf, Packed) for leaf in weights.Flatten())
        self.fewest_rows = 1 if _rows_alike(model, weights) else FEWEST_ROWS
        if kind == "int8" and not self.are_packed:
            raise ValueError(
                f"weights=int8: {type(model).__name__} packs none of its weights (BaseLayer.PackWeights); take float32"
            )
        super().__init__(weights)

    @property
    def model(self) -> Any:
        """The model, as it was given."""
        return self._model()

    def Assign(self, theta: NestedMap) -> None:
        """Packs `theta` and assigns it."""
        super().Assign(self._Packed(theta))

    def _Packed(self, theta: NestedMap) -> NestedMap:
        pack = getattr(self.model, "PackWeights", None)
        return pack(theta, self._packing) if pack else theta


def _has_8_bits(leaf: Any) -> bool:
    return isinstance(leaf.packed if isinstance(leaf, Heads) else leaf, eight_bit.EightBit)


def _rows_alike(model: Any, weights: NestedMap) -> bool:
    """Whether a row's results are the same in every batch, of a single row, too.

    A table is looked up, biases and vectors are added; other plain weights, e.g. of some routers, are multiplied. One
    row by one head of keys is a single product, which rounds differently.
    """
    heads = [getattr(model.p, name, None) for name in ("num_kv_heads", "num_heads")]
    if (heads[0] or heads[1] or 1) == 1:
        return False
    return all(
        leaf.rows_alike
        if isinstance(leaf, Packed)
        else path.endswith((".table", "_bias")) or len(leaf.shape) < 2
        for path, leaf in weights.FlattenItems()
    )


def _tensors(leaf: Any) -> tuple:
    return leaf.tensors if isinstance(leaf, Packed) else (leaf,)


def _empty(leaf: Any) -> Packed | None:
    return leaf.With(*(None for _ in leaf.tensors)) if isinstance(leaf, Packed) else None
