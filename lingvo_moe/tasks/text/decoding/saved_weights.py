"""A tree of weights as variables of a function that is exported."""

import re
from typing import Any

import tensorflow as tf

from lingvo_moe.core.kernels.eight_bit import EightBit
from lingvo_moe.core.kernels.weights import Heads, Packed
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

    def Tensors(self) -> NestedMap:
        """The weights as tensors of the graph that is being traced, in the structure of the tree."""
        values = map(tf.convert_to_tensor, self._variables)

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


def _has_8_bits(leaf: Any) -> bool:
    return isinstance(leaf.packed if isinstance(leaf, Heads) else leaf, EightBit)


def _tensors(leaf: Any) -> tuple:
    return leaf.tensors if isinstance(leaf, Packed) else (leaf,)


def _empty(leaf: Any) -> Packed | None:
    return leaf.With(*(None for _ in leaf.tensors)) if isinstance(leaf, Packed) else None
