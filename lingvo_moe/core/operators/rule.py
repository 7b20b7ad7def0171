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
    outputs: tuple[Dims, ...]  # of each result
    sizes: Mapping[Letter, int] = field(default_factory=dict)  # of each letter
    flops: int = 0  # of products, over all devices
    # Whether it is an operator of its own. One that is not takes the sharding of what it reads.
    heavy: bool = False

    @property
    def reduced(self) -> frozenset[Letter]:
        """The letters over which results are reduced."""
        kept = {letter for dims in self.outputs for letter in dims}
        return frozenset(letter for letter in self.sizes if letter not in kept)


RuleOf = Callable[[Any], Rule | None]


def shape_of(tensor: Any) -> list[int]:
    """The static shape of a tensor.

    Raises:
        ValueError: it has none.
    """
    return [int(n) for n in tensor.shape.as_list()]


def number_of(tensor: Any) -> Any:
    """The value of an operand that is known while tracing; None if it is not."""
    return tf.get_static_value(tensor)


def numbered(shape: Sequence[int]) -> Dims:
    """A letter for each dimension that has more than one element."""
    return tuple(str(i) if n > 1 else None for i, n in enumerate(shape))


def sizes_of(*pairs: tuple[Dims, Sequence[int]]) -> dict[Letter, int]:
    """The size of each letter, the greatest common divisor where tensors differ."""
    sizes: dict[Letter, int] = {}
    for dims, shape in pairs:
        for letter, size in zip(dims, shape, strict=True):
            if letter is not None:
                sizes[letter] = math.gcd(sizes.get(letter, 0), size)
    return sizes


def whole(dims: Dims, *at: int) -> Dims:
    """The dimensions with these whole."""
    return tuple(None if i in at else d for i, d in enumerate(dims))


def without(dims: Dims, *at: int) -> Dims:
    """The dimensions without these."""
    return tuple(d for i, d in enumerate(dims) if i not in at)
