"""Weights as a module holds them that is saved: variables, but for those of 8 bits."""

import re

import tensorflow as tf

from lingvo_moe.core.layers.eight_bit import EightBit
from lingvo_moe.core.nested_map import NestedMap

# A graph is one protocol buffer, of at most 2 GiB.
_MOST_BYTES = 2**31 - 2**27


class HeldWeights(tf.Module):
    """Variables for the tensors of theta; an `EightBit` stays what it is, to become constants where it is used.

    Raises:
        ValueError: more bytes of constants than a graph can have.
    """

    def __init__(self, theta: NestedMap):
        super().__init__(name="weights")
        constants = sum(x.nbytes for x in theta.Flatten() if isinstance(x, EightBit))
        if constants > _MOST_BYTES:
            raise ValueError(
                f"weights of 8 bits are constants of the graph, which has room for {_MOST_BYTES:,} bytes, but these"
                f" are {constants:,}; leave the weights float32"
            )
        self._variables = [
            tf.Variable(value, trainable=False, name=re.sub(r"[\[\]]+", "_", path))
            for path, value in theta.FlattenItems()
            if not isinstance(value, EightBit)
        ]
        # tf.Module would track, and wrap, a NestedMap; closures it lets be.
        structure = theta.Transform(lambda x: x if isinstance(x, EightBit) else None)
        self._structure = lambda: structure

    def Theta(self) -> NestedMap:
        """The weights as tensors of what is being traced, in the structure of theta."""
        values = map(tf.convert_to_tensor, self._variables)
        return self._structure().Transform(lambda x: x if isinstance(x, EightBit) else next(values))

    def Assign(self, theta: NestedMap) -> None:
        """Other values for all; of the same structure and shapes.

        Raises:
            ValueError: some are constants.
        """
        values = theta.Flatten()
        if any(isinstance(x, EightBit) for x in values):
            raise ValueError(
                "weights of 8 bits are constants of what was traced, and cannot be assigned"
            )
        for variable, value in zip(self._variables, values, strict=True):
            variable.assign(value)
