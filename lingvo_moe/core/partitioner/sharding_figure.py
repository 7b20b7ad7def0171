"""Draws the sharding of one tensor: a grid of its parts, labelled with the devices that hold them."""

from collections.abc import Sequence
from html import escape

import numpy as np

from lingvo_moe.core.hlo.sharding import TensorSharding

_WIDTH, _HEIGHT, _GAP = 34, 18, 12
_MOST = 12  # Up to so many rows or columns are all drawn; of more only the first few and the last.
_FIRST = 8
_MOST_DEVICES = 3


def figure(sharding: TensorSharding, shape: Sequence[int], num_devices: int) -> str:
    """Returns an SVG element with one cell for each part, coloured by device, with padding hatched.

    The sharded dimensions are rows and columns of the grid. With more than two of them, the last is the
    columns and all others together are the rows. Of more than 12 rows or columns only the first 8 and
    the last are drawn.

    Args:
        sharding: the tensor's sharding.
        shape: its global shape.
        num_devices: devices of the program.
    """
    sharded = [d for d, n in enumerate(sharding.tiles) if n > 1] if sharding.is_sharded else []
    columns = [sharded[-1]] if len(sharded) > 1 or (sharded and sharded[0] > 0) else []
    rows = [d for d in sharded if d not in columns]
    drawn, width, height = _cells(sharding, shape, rows, columns, num_devices)
    label = f"{sharding}, shape {'x'.join(map(str, shape)) or 'scalar'}"
    return (
        f"<svg class='shards' role='img' aria-label='{escape(label, quote=True)}' "
        f"viewBox='0 0 {width} {height}' style='width:{width}px;height:{height}px'>{drawn}</svg>"
    )


def _cells(
    sharding: TensorSharding,
    shape: Sequence[int],
    rows: list[int],
    columns: list[int],
    num_devices: int,
) -> tuple[str, int, int]:
    """Returns (SVG of all cells, width, height)."""
    counts = [int(np.prod([sharding.tiles[d] for d in dims])) for dims in (rows, columns)]
    across, down = _shown(counts[1]), _shown(counts[0])
    width = _WIDTH * (3 if counts[1] == 1 and counts[0] > 1 else 1) if counts != [1, 1] else 160
    drawn, y = [], 0
    for row in down:
        if row is None:
            drawn.append(_dots(len(across) * width / 2, y + _GAP / 2))
            y += _GAP
            continue
        x = 0
        for column in across:
            if column is None:
                drawn.append(_dots(x + _GAP / 2, y + _HEIGHT / 2))
                x += _GAP
                continue
            part = _part(sharding, rows, columns, row, column)
            drawn.append(_cell(sharding, shape, part, (x, y, width), rows, columns, num_devices))
            x += width
        y += _HEIGHT
    total = sum(_GAP if column is None else width for column in across)
    return "".join(drawn), total, y


def _shown(count: int) -> list[int | None]:
    """The indices of the rows or columns to draw; None stands for a gap."""
    if count <= _MOST:
        return list(range(count))
    return [*range(_FIRST), None, count - 1]


def _part(
    sharding: TensorSharding, rows: list[int], columns: list[int], row: int, column: int
) -> tuple[int, ...]:
    part = [0] * len(sharding.tiles)
    for dims, number in ((rows, row), (columns, column)):
        if dims:
            places = np.unravel_index(number, [sharding.tiles[d] for d in dims])
            for d, place in zip(dims, places, strict=True):
                part[d] = int(place)
    return tuple(part)


def _cell(
    sharding: TensorSharding,
    shape: Sequence[int],
    part: tuple[int, ...],
    place: tuple[float, float, float],
    rows: list[int],
    columns: list[int],
    num_devices: int,
) -> str:
    x, y, width = place
    devices = sharding.DeviceOf(part)
    extent, padded = sharding.Extent(shape, part), sharding.PartShape(shape)

    def filled(dims: list[int]) -> float:
        return float(np.prod([(extent[d][1] - extent[d][0]) / max(1, padded[d]) for d in dims]))

    w, h = width * filled(columns), _HEIGHT * filled(rows)
    where = ", ".join(f"{begin}:{end}" for begin, end in extent) or "scalar"
    tip = f"[{where}] on {'every device' if not sharding.is_sharded else f'device {names(devices, 64)}'}"
    if w < width or h < _HEIGHT:
        tip += "; the rest of the part is padding"
    label = f"all {num_devices}" if len(devices) >= num_devices else names(devices)
    fill = "var(--track)" if len(devices) >= num_devices else _colour(devices[0], num_devices)
    return (
        f"<g><title>{escape(tip)}</title>"
        f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{_HEIGHT}' class='pad'/>"
        f"<rect x='{x:g}' y='{y:g}' width='{w:g}' height='{h:g}' fill='{fill}'/>"
        f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{_HEIGHT}' class='edge'/>"
        f"<text x='{x + width / 2:g}' y='{y + _HEIGHT / 2:g}'>{escape(label)}</text></g>"
    )


def _colour(device: int, num_devices: int) -> str:
    return f"hsl({360 * device / max(1, num_devices):.0f} 58% 72%)"


def _dots(x: float, y: float) -> str:
    return f"<text x='{x:g}' y='{y:g}' class='dots'>…</text>"


def names(devices: Sequence[int], most: int = _MOST_DEVICES) -> str:
    """Formats device numbers, a consecutive run as a range: '0-3', '0,4', '0,2,4,…'."""
    if len(devices) > 2 and list(devices) == list(range(devices[0], devices[0] + len(devices))):
        return f"{devices[0]}-{devices[-1]}"
    return ",".join(map(str, devices[:most])) + (",…" if len(devices) > most else "")
