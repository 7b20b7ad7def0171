"""Derives the sharding of an operation's result or operand that needs no communication."""

from collections.abc import Sequence

import numpy as np

from lingvo_moe.analysis.programs.hlo.attributes import dims_list
from lingvo_moe.analysis.programs.hlo.instructions import Instruction
from lingvo_moe.analysis.programs.hlo.sharding import TensorSharding


def transposed_back(
    sharding: TensorSharding | None, transpose: Instruction
) -> TensorSharding | None:
    """Returns the sharding of a transpose's operand, given the sharding of its result."""
    order = dims_list(transpose, "dimensions")
    if sharding is None or sharding.kind != "tiled" or len(order) != len(sharding.tiles):
        return None
    back = [int(d) for d in np.argsort(order)]
    tiles = tuple(sharding.tiles[d] for d in back)
    return TensorSharding("tiled", tiles, _devices(sharding, back), sharding.subgroups)


def _devices(sharding: TensorSharding, order: Sequence[int]) -> tuple[int, ...]:
    """The devices of a tiled tensor whose dimensions come in another order."""
    devices = np.array(sharding.devices).reshape(*sharding.tiles, -1)
    return tuple(devices.transpose(*order, len(order)).flatten().tolist())


def kept_dims(dot: Instruction, side: str, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The dimensions of an operand that a dot does not sum, and those of the result that correspond to them.

    Batch dimensions come first, then those that the other operand lacks.

    Args:
        side: of the operand, 'lhs' or 'rhs'.
        rank: of the operand.
    """
    batch, summed = dims_list(dot, f"{side}_batch_dims"), dims_list(dot, f"{side}_contracting_dims")
    free = [d for d in range(rank) if d not in (*batch, *summed)]
    first = len(batch) if side == "lhs" else len(dot.arrays[0].dims) - len(free)
    return (*batch, *free), (*range(len(batch)), *range(first, first + len(free)))


def product_sharding(
    dot: Instruction, lhs: TensorSharding | None, rhs: TensorSharding | None
) -> TensorSharding | None:
    """Returns the sharding of a dot's result if each device multiplies its own parts of the operands.

    Returns:
        None if the local products are partial sums (a contracted dimension is sharded), or if both
        operands are sharded along free dimensions.
    """
    for side, side_sharding, across, other in (("lhs", lhs, "rhs", rhs), ("rhs", rhs, "lhs", lhs)):
        if side_sharding is None or not side_sharding.is_sharded or side_sharding.manual > 1:
            continue
        summed = dims_list(dot, f"{side}_contracting_dims")
        shared = dims_list(dot, f"{across}_batch_dims")
        beside = other.tiles if other is not None and other.is_sharded else ()
        if any(side_sharding.tiles[d] > 1 for d in summed) or any(
            count > 1 for d, count in enumerate(beside) if d not in shared
        ):
            return None
        dims, of_result = kept_dims(dot, side, len(side_sharding.tiles))
        tiles = [1] * len(dot.arrays[0].dims)
        for d, to in zip(dims, of_result, strict=True):
            tiles[to] = side_sharding.tiles[d]
        devices = _devices(side_sharding, (*dims, *summed))
        return TensorSharding("tiled", tuple(tiles), devices, side_sharding.subgroups)
    return None
