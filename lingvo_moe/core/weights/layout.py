"""Layouts of a tensor in letters, to rearrange it both ways: "(n k) m" is a matrix whose rows are keys of heads.

A dimension is an axis; or axes in brackets, whose product it is, the first varying slowest; or a sum of such terms, one
after another. In "(n k+v) r" every head has keys, then values. A tensor splits by terms into parts, one for each set of
axes, and parts make a tensor again.
"""

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

_TOKEN = re.compile(r"[()+]|[a-z_]+")
Parts = dict[frozenset[str], "Part"]


@dataclass(frozen=True)
class Part:
    """A tensor with a dimension for each axis."""

    axes: tuple[str, ...]
    values: np.ndarray

    def As(self, axes: tuple[str, ...]) -> np.ndarray:
        """Its values with the dimensions in another order."""
        return self.values.transpose([self.axes.index(axis) for axis in axes])


# A factor of a dimension: the terms of a sum, each a tuple of axes. A plain axis is a sum of one term.
_Factor = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Layout:
    """Dimensions in letters, see above; at most one factor is a sum."""

    text: str

    @cached_property
    def _dims(self) -> list[list[_Factor]]:
        """The factors of each dimension."""
        tokens = [*_TOKEN.findall(self.text), ""][::-1]
        dims = []
        while tokens[-1]:
            dims.append(_factors(tokens))
        return dims

    @property
    def parts(self) -> list[frozenset[str]]:
        """The axes of each of its parts."""
        return [frozenset(axes) for axes in self._Axes()]

    def _Axes(self) -> list[tuple[str, ...]]:
        """The axes of each part, in order."""
        factors = [factor for dim in self._dims for factor in dim]
        return [tuple(itertools.chain(*terms)) for terms in itertools.product(*factors)]

    def Shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Its shape for sizes of axes."""
        return tuple(_product(_size(f, sizes) for f in dim) for dim in self._dims)

    def Split(self, tensor: np.ndarray, sizes: Mapping[str, int]) -> Parts:
        """Its parts. The tensor has the `Shape` of these sizes."""
        factors = [factor for dim in self._dims for factor in dim]
        tensor = tensor.reshape([_size(factor, sizes) for factor in factors])
        pieces = [tensor]
        at = self._sum
        if at is not None:
            ends = np.cumsum([_product(sizes[a] for a in term) for term in factors[at]])[:-1]
            pieces = np.split(tensor, ends, axis=at)
        parts = (
            Part(axes, piece.reshape([sizes[a] for a in axes]))
            for axes, piece in zip(self._Axes(), pieces, strict=True)
        )
        return {frozenset(part.axes): part for part in parts}

    def Join(self, parts: Parts, sizes: Mapping[str, int]) -> np.ndarray:
        """The tensor of its parts: what Split takes apart."""
        factors = [factor for dim in self._dims for factor in dim]
        at, pieces = self._sum, []
        for number, axes in enumerate(self._Axes()):
            shape = [_size(factor, sizes) for factor in factors]
            if at is not None:
                shape[at] = _product(sizes[a] for a in factors[at][number])
            pieces.append(parts[frozenset(axes)].As(axes).reshape(shape))
        whole = pieces[0] if at is None else np.concatenate(pieces, axis=at)
        return whole.reshape(self.Shape(sizes))

    @property
    def _sum(self) -> int | None:
        """The number of the factor that is a sum."""
        factors = [factor for dim in self._dims for factor in dim]
        sums = [i for i, factor in enumerate(factors) if len(factor) > 1]
        assert len(sums) < 2, self.text
        return sums[0] if sums else None


def _factors(tokens: list[str]) -> list[_Factor]:
    """Takes a dimension from the end of the tokens."""
    terms = [_term(tokens)]
    while tokens[-1] == "+":
        tokens.pop()
        terms.append(_term(tokens))
    if len(terms) > 1:
        return [tuple(tuple(axes) for term in terms for axes in [_plain(term)])]
    return terms[0]


def _term(tokens: list[str]) -> list[_Factor]:
    """Takes an axis, or what is in brackets."""
    token = tokens.pop()
    if token != "(":
        return [((token,),)]
    factors: list[_Factor] = []
    while tokens[-1] != ")":
        factors += _factors(tokens)
    tokens.pop()
    return factors


def _plain(factors: list[_Factor]) -> list[str]:
    """The axes of a term of a sum, which has no sum itself."""
    assert all(len(factor) == 1 for factor in factors)
    return [axis for ((*axes,),) in factors for axis in axes]


def _size(factor: _Factor, sizes: Mapping[str, int]) -> int:
    return sum(_product(sizes[axis] for axis in term) for term in factor)


def _product(sizes: Iterable[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total
