"""Lays out a picture of one tensor's sharding: a grid of its parts, labelled with the devices that hold them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lingvo_moe.analysis.programs.hlo.sharding import TensorSharding

_WIDTH, _HEIGHT, _GAP = 34, 18, 12
_MOST = 12  # Up to so many rows or columns are all drawn; of more only the first few and the last.
_FIRST = 8
_MOST_DEVICES = 3


@dataclass(frozen=True)
class Tile:
    """A part, a rectangle at (x, y) in pixels, of which `filled_width` by `filled_height` are no padding."""

    x: int
    y: int
    width: int
    filled_width: float
    filled_height: float
    colour: str
    label: str
    tip: str


@dataclass(frozen=True)
class Figure:
    """A grid of cells, with dots where rows or columns are left out; `label` says it to those who do not see it."""

    label: str
    width: int
    height: int
    cells: list[Tile]
    dots: list[tuple[float, float]]


def figure(sharding: TensorSharding, shape: Sequence[int], num_devices: int) -> Figure:
    """Returns one cell for each part, coloured by device, with padding hatched.

    The sharded dimensions are rows and columns of the grid. With more than two of them, the last is the
    columns and all others together are the rows. Of more than 12 rows or columns only the first 8 and
    the last are drawn.
    """
    return _Grid(sharding, shape, num_devices).Figure()


class _Grid:
    """The sharded dimensions of a tensor as rows and columns."""

    def __init__(self, sharding: TensorSharding, shape: Sequence[int], num_devices: int):
        self._sharding, self._shape, self._num_devices = sharding, shape, num_devices
        tiles = sharding.tiles if sharding.is_sharded else ()
        sharded = [d for d, n in enumerate(tiles) if n > 1]
        self._columns = sharded[-1:] if len(sharded) > 1 or sharded[:1] > [0] else []
        self._rows = [d for d in sharded if d not in self._columns]
        self._width = _WIDTH if self._columns else 3 * _WIDTH if sharded else 160

    def Figure(self) -> Figure:
        across, width = _places(self._count(self._columns), self._width)
        down, height = _places(self._count(self._rows), _HEIGHT)
        drawn = [(row, y) for row, y in down if row is not None]
        dots = [(width / 2, y + _GAP / 2) for row, y in down if row is None]
        dots += [(x + _GAP / 2, y + _HEIGHT / 2) for _, y in drawn for c, x in across if c is None]
        cells = [
            self._cell(row, column, x, y)
            for row, y in drawn
            for column, x in across
            if column is not None
        ]
        label = f"{self._sharding}, shape {'x'.join(map(str, self._shape)) or 'scalar'}"
        return Figure(label, width, height, cells, dots)

    def _count(self, dims: list[int]) -> int:
        return int(np.prod([self._sharding.tiles[d] for d in dims]))

    def _part(self, row: int, column: int) -> tuple[int, ...]:
        part = [0] * len(self._sharding.tiles)
        for dims, number in ((self._rows, row), (self._columns, column)):
            places = (
                np.unravel_index(number, [self._sharding.tiles[d] for d in dims]) if dims else ()
            )
            for d, place in zip(dims, places, strict=True):
                part[d] = int(place)
        return tuple(part)

    def _cell(self, row: int, column: int, x: int, y: int) -> Tile:
        part = self._part(row, column)
        devices, extent = self._sharding.DeviceOf(part), self._sharding.Extent(self._shape, part)
        padded = self._sharding.PartShape(self._shape)

        def filled(dims: list[int]) -> float:
            return float(np.prod([(extent[d][1] - extent[d][0]) / max(1, padded[d]) for d in dims]))

        width, height = self._width * filled(self._columns), _HEIGHT * filled(self._rows)
        where = ", ".join(f"{begin}:{end}" for begin, end in extent) or "scalar"
        holders = f"device {names(devices, 64)}" if self._sharding.is_sharded else "every device"
        rest = "; the rest of the part is padding"
        everywhere = len(devices) >= self._num_devices
        hue = 360 * devices[0] / max(1, self._num_devices)
        return Tile(
            x,
            y,
            self._width,
            filled_width=width,
            filled_height=height,
            colour="var(--track)" if everywhere else f"hsl({hue:.0f} 58% 72%)",
            label=f"all {self._num_devices}" if everywhere else names(devices),
            tip=f"[{where}] on {holders}" + rest * (width < self._width or height < _HEIGHT),
        )


def _places(count: int, size: int) -> tuple[list[tuple[int | None, int]], int]:
    """The rows or columns to draw, each with its place, and the size of all; None stands for a gap."""
    many = count > _MOST
    places: list[tuple[int | None, int]] = []
    at = 0
    for index in [*range(_FIRST), None, count - 1] if many else range(count):
        places.append((index, at))
        at += _GAP if index is None else size
    return places, at


def names(devices: Sequence[int], most: int = _MOST_DEVICES) -> str:
    """Formats device numbers, a consecutive run as a range: '0-3', '0,4', '0,2,4,…'."""
    if len(devices) > 2 and list(devices) == list(range(devices[0], devices[0] + len(devices))):
        return f"{devices[0]}-{devices[-1]}"
    return ",".join(map(str, devices[:most])) + (",…" if len(devices) > most else "")
