"""Derives the sharding of an operation's result or operand that needs no communication."""

import math

import numpy as np

from lingvo_moe.core.hlo.attributes import dims_list
from lingvo_moe.core.hlo.instructions import Instruction
from lingvo_moe.core.hlo.sharding import TensorSharding

_DOT_DIMS = ("lhs_batch_dims", "lhs_contracting_dims", "rhs_batch_dims", "rhs_contracting_dims")


def transposed_back(
    sharding: TensorSharding | None, transpose: Instruction
) -> TensorSharding | None:
    """Returns the sharding of a transpose's operand, given the sharding of its result."""
    order = dims_list(transpose, "dimensions")
    if sharding is None or sharding.kind != "tiled" or len(order) != len(sharding.tiles):
        return None
    back = [int(d) for d in np.argsort(order)]
    devices = np.array(sharding.devices).reshape(*sharding.tiles, -1)
    devices = devices.transpose(*back, len(back)).flatten()
    tiles = tuple(sharding.tiles[d] for d in back)
    return TensorSharding("tiled", tiles, tuple(devices.tolist()), sharding.subgroups)


def product_sharding(
    dot: Instruction, lhs: TensorSharding | None, rhs: TensorSharding | None
) -> TensorSharding | None:
    """Returns the sharding of a dot's result if each device multiplies its own parts of the operands.

    Returns:
        None if the local products are partial sums (a contracted dimension is sharded), or if both
        operands are sharded along free dimensions.
    """
    dims = {key: dims_list(dot, key) for key in _DOT_DIMS}
    rank = len(dot.arrays[0].dims)
    batch = len(dims["lhs_batch_dims"])
    for side, own, other in (("lhs", lhs, rhs), ("rhs", rhs, lhs)):
        if own is None or not own.is_sharded or own.manual > 1:
            continue
        batch_dims, summed = dims[f"{side}_batch_dims"], dims[f"{side}_contracting_dims"]
        free = [d for d in range(len(own.tiles)) if d not in (*batch_dims, *summed)]
        first = batch if side == "lhs" else rank - len(free)
        if math.prod(own.tiles[d] for d in summed) > 1 or _other_is_sharded(dims, side, other):
            return None
        order = [*batch_dims, *free, *summed]
        devices = np.array(own.devices).reshape(*own.tiles, -1)
        devices = devices.transpose(*order, len(order)).flatten()
        tiles = [1] * rank
        tiles[:batch] = [own.tiles[d] for d in batch_dims]
        tiles[first : first + len(free)] = [own.tiles[d] for d in free]
        return TensorSharding("tiled", tuple(tiles), tuple(devices.tolist()), own.subgroups)
    return None


def _other_is_sharded(
    dims: dict[str, tuple[int, ...]], side: str, other: TensorSharding | None
) -> bool:
    """Whether the other operand is sharded along a dimension that is not a batch dimension."""
    if other is None or not other.is_sharded:
        return False
    across = "rhs" if side == "lhs" else "lhs"
    batch_dims = dims[f"{across}_batch_dims"]
    return any(n > 1 for d, n in enumerate(other.tiles) if d not in batch_dims)
