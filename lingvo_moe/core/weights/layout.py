"""Layouts of a tensor in letters: "(n k) m" is a matrix whose rows are the keys of heads, head by head.

A dimension is an axis, or axes in brackets, whose product it is, the first varying slowest. One of the brackets may be
a sum of terms that lie one after another: the rows of "(n (k + w)) r" are the keys of a head, then its values, then
those of the next head. Such a tensor has a part for each term; parts differ in their axes, which may be of size
one: the last dimension of "m (h (first + second))" has two matrices "m h", number by number in turn.
"""

import functools
import itertools
import math
import re
from collections.abc import Mapping

import numpy as np

_DIM = re.compile(r"\(([^)]*)\)|([\w+]+)")
_SUM = re.compile(r"\(([^()]*\+[^()]*)\)")
Sizes = Mapping[str, int]
# By its axes, each part's axes in the order of its dimensions, and its values.
Parts = dict[frozenset[str], tuple[list[str], np.ndarray]]


def shape_of(layout: str, sizes: Sizes) -> tuple[int, ...]:
    """The shape of a layout, by the sizes of axes."""
    outer, terms = _terms(layout)
    sizes = {**sizes, "+": sum(_size(term, sizes) for term in terms)}
    return tuple(_size(dim, sizes) for dim in _dims(outer))


def parts_of(layout: str) -> set[frozenset[str]]:
    """The axes of each part of a layout."""
    return {frozenset(axes) for axes in _axes(layout)}


def outermost(layout: str) -> str:
    """The axis that varies slowest; "" for a sum."""
    return _dims(_terms(layout)[0])[0][0].strip("+")


def dim_of(layout: str, axis: str) -> int | None:
    """The number of the dimension that is an axis; None: it is a part of one, or of none."""
    dims = _dims(_terms(layout)[0])
    return dims.index([axis]) if [axis] in dims else None


def split(tensor: np.ndarray, layout: str, sizes: Sizes) -> Parts:
    """The parts of a tensor of a layout; views of it."""
    outer, terms = _terms(layout)
    pieces, names = [tensor], _axes(layout)
    if len(terms) > 1:
        lengths = [_size(term, sizes) for term in terms]
        axes = list(itertools.chain(*_dims(outer)))
        whole = {**sizes, "+": sum(lengths)}
        ends = list(itertools.accumulate(lengths))[:-1]
        pieces = np.split(
            tensor.reshape([whole[axis] for axis in axes]), ends, axis=axes.index("+")
        )
    shaped = [p.reshape([sizes[a] for a in axes]) for p, axes in zip(pieces, names, strict=True)]
    return {frozenset(axes): (axes, p) for axes, p in zip(names, shaped, strict=True)}


def joined(parts: Parts, layout: str, sizes: Sizes) -> np.ndarray:
    """The tensor of a layout that has these parts, of which others are left aside."""
    outer, terms = _terms(layout)
    axes, pieces = list(itertools.chain(*_dims(outer))), []
    for term, names in zip(terms or [[]], _axes(layout), strict=True):
        before, values = parts[frozenset(names)]
        piece = values.transpose([before.index(axis) for axis in names])
        of_term = {**sizes, "+": _size(term, sizes)}
        pieces.append(piece.reshape([of_term[axis] for axis in axes]))
    whole = np.concatenate(pieces, axes.index("+")) if len(pieces) > 1 else pieces[0]
    return whole.reshape(shape_of(layout, sizes))


def rearranged(tensor: np.ndarray, before: str, after: str, sizes: Sizes) -> np.ndarray:
    """A tensor of one layout, or the parts of it that another layout has, in that one: "(n k) m" to "m n k"."""
    return joined(split(tensor, before, sizes), after, sizes)


@functools.cache
def _terms(layout: str) -> tuple[str, list[list[str]]]:
    """The layout with `+` as an axis in place of its sum, and the axes of each term; [] without a sum."""
    match = _SUM.search(layout)
    if not match:
        return layout, []
    return layout.replace(match[0], "+"), [term.split() for term in match[1].split("+")]


@functools.cache
def _axes(layout: str) -> list[list[str]]:
    """All axes of each part, in order."""
    outer, terms = _terms(layout)
    axes = list(itertools.chain(*_dims(outer)))
    at = axes.index("+") if terms else len(axes)
    return [[*axes[:at], *term, *axes[at + 1 :]] for term in terms or [[]]]


@functools.cache
def _dims(layout: str) -> list[list[str]]:
    """The axes of each dimension of a layout without a sum."""
    return [(inside or axis).split() for inside, axis in _DIM.findall(layout)]


def _size(axes: list[str], sizes: Sizes) -> int:
    return math.prod(sizes[axis] for axis in axes)
