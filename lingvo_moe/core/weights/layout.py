"""Layouts of a tensor in letters: "(n k) m" is a matrix whose rows are the keys of heads, head by head.

A dimension is an axis, or axes in brackets, whose product it is, the first varying slowest.
"""

import math
import re
from collections.abc import Mapping

import numpy as np

_DIM = re.compile(r"\(([^)]*)\)|(\w+)")


def shape_of(layout: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a layout, by the sizes of axes."""
    return tuple(math.prod(sizes[axis] for axis in dim) for dim in _dims(layout))


def rearranged(tensor: np.ndarray, before: str, after: str, sizes: Mapping[str, int]) -> np.ndarray:
    """A tensor of one layout in another one of the same axes: "(n k) m" to "m n k"."""
    axes = _axes(before)
    order = [axes.index(axis) for axis in _axes(after)]
    split = tensor.reshape([sizes[axis] for axis in axes])
    return split.transpose(order).reshape(shape_of(after, sizes))


def _axes(layout: str) -> list[str]:
    """All axes in order."""
    return [axis for dim in _dims(layout) for axis in dim]


def _dims(layout: str) -> list[list[str]]:
    """The axes of each dimension."""
    return [(inside or axis).split() for inside, axis in _DIM.findall(layout)]
