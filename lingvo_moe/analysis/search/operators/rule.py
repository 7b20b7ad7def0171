"""The rules by which operations map the dimensions of their operands to those of their results, in letters.

An operation runs over an iteration space whose dimensions have letters, as an einsum's do. Each dimension of an
operand or a result is one letter, or None where it cannot be sharded. A letter that the results lack is summed (or
reduced otherwise): where it is sharded, each device has a part of every sum.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

Letter = str
Dims = tuple[Letter | None, ...]


@dataclass(frozen=True)
class Rule:
    """One operation in letters."""

    # Of each operand; None for one that is a number of the operation, such as a permutation.
    inputs: tuple[Dims | None, ...]
    outputs: tuple[Dims, ...]  # the letters of each result
    sizes: Mapping[Letter, int] = field(default_factory=dict)  # the size of each letter
    flops: int = 0  # the FLOPs of products, over all devices
    # Whether it is an operator of its own. One that is not takes the sharding of what it reads.
    heavy: bool = False

    @property
    def reduced(self) -> frozenset[Letter]:
        """The letters over which results are reduced."""
        letters = {letter for dims in self.outputs for letter in dims}
        return frozenset(letter for letter in self.sizes if letter not in letters)


RuleOf = Callable[[Any], Rule | None]


def rule(
    op: Any,
    inputs: Sequence[Dims | None],
    outputs: Sequence[Dims],
    flops: int = 0,
    heavy: bool = False,
) -> Rule:
    """The rule of an operation, with the sizes of its letters.

    A dimension of one element has no letter. A letter has the greatest common divisor of the sizes of its dimensions.

    Args:
        inputs: of its first operands; the others are numbers of the operation.
        outputs: of its first results; the last one stands for all others.
    """
    inputs = (*inputs, *[None] * (len(op.inputs) - len(inputs)))
    outputs = (*outputs, *[outputs[-1]] * (len(op.outputs) - len(outputs)))
    sizes: dict[Letter, int] = {}

    def kept(tensor: Any, dims: Dims) -> Dims:
        shape = known_shape(tensor)
        wide = tuple(d if n > 1 else None for d, n in zip(dims, shape, strict=True))
        sizes.update(
            {d: math.gcd(sizes.get(d, 0), n) for d, n in zip(wide, shape) if d is not None}
        )
        return wide

    read = tuple(None if d is None else kept(x, d) for x, d in zip(op.inputs, inputs, strict=True))
    made = tuple(kept(y, d) for y, d in zip(op.outputs, outputs, strict=True))
    return Rule(read, made, sizes, flops, heavy)


def known_shape(tensor: Any) -> list[int]:
    """The static shape of a tensor.

    Raises:
        ValueError: it has none.
    """
    return [int(n) for n in tensor.shape.as_list()]


def number_of(tensor: Any) -> Any:
    """The value of an operand that is known while tracing; None if it is not."""
    return tf.get_static_value(tensor)


def dimension_of(operand: Any, tensor: Any) -> int | None:
    """The dimension of a tensor that an operand names; None if it is not known while tracing."""
    axis = number_of(operand)
    return None if axis is None else int(axis) % len(known_shape(tensor))


def numbered(tensor: Any) -> Dims:
    """A letter for each dimension."""
    return tuple(map(str, range(len(known_shape(tensor)))))


def whole(dims: Dims, *at: int) -> Dims:
    """The dimensions with these whole."""
    return tuple(None if i in at else d for i, d in enumerate(dims))


def without(dims: Dims, *at: int) -> Dims:
    """The dimensions without these."""
    return tuple(d for i, d in enumerate(dims) if i not in at)
