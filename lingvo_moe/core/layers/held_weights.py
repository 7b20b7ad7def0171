"""Weights as a module holds them that is saved."""

import re

import tensorflow as tf

from lingvo_moe.core.layers.eight_bit import EightBit
from lingvo_moe.core.nested_map import NestedMap


class HeldWeights(tf.Module):
    """Variables for the tensors of theta, those of an `EightBit` included."""

    def __init__(self, theta: NestedMap):
        super().__init__(name="weights")
        self._variables = [
            tf.Variable(value, trainable=False, name=re.sub(r"[\[\]]+", "_", path))
            for path, leaf in theta.FlattenItems()
            for value in (leaf.tensors if isinstance(leaf, EightBit) else (leaf,))
        ]
        # tf.Module would track, and wrap, a NestedMap; closures it lets be.
        structure = theta.Transform(lambda x: x if isinstance(x, EightBit) else None)
        self._structure = lambda: structure

    def Theta(self) -> NestedMap:
        """The weights as tensors of what is being traced, in the structure of theta."""
        values = map(tf.convert_to_tensor, self._variables)

        def held(leaf: EightBit | None) -> EightBit | tf.Tensor:
            return leaf.With(next(values), next(values), next(values)) if leaf else next(values)

        return self._structure().Transform(held)

    def Assign(self, theta: NestedMap) -> None:
        """Other values for all; of the same structure and shapes.

        Raises:
            ValueError: some are of 8 bits.
        """
        leaves = theta.Flatten()
        if any(isinstance(leaf, EightBit) for leaf in leaves):
            raise ValueError(
                "weights of 8 bits may be packed already, as they are when first used, and cannot be assigned"
            )
        for variable, value in zip(self._variables, leaves, strict=True):
            variable.assign(value)
