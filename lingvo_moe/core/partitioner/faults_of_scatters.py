"""Which scatters XLA's SPMD partitioner (that of jaxlib 0.10.2) gets wrong: unevenly cut updates.

The last part of such updates has padding. Where the indices are not cut over all devices, they are
padded with zeros, and the updates' padding is not masked: it lands in row 0. That does no harm where it
is added and is zero, as it is in what has just been cut.
"""

import math
from collections.abc import Callable, Sequence

from lingvo_moe.core.hlo.attributes import dims_list
from lingvo_moe.core.hlo.module import Computation, Instruction
from lingvo_moe.core.hlo.sharding import TensorSharding
from lingvo_moe.core.partitioner.faults_of_products import parts

_FAR = 64
_KEEPING = (
    "copy",
    "convert",
    "negate",
    "abs",
    "sqrt",
    "sign",
    "tanh",
    "sine",
    "transpose",
    "floor",
)
_OF_ALL = ("add", "subtract", "maximum", "minimum")


def padded_dim(
    scatter: Instruction, operands: Sequence[Instruction], shardings: Sequence[TensorSharding]
) -> int | None:
    """The dimension of the updates whose padding is written, None if there is none.

    Updates that are cut otherwise than the target is within a window are left out: they are sent first,
    and some come out right.
    """
    target, of_indices, of_updates = shardings
    shape = operands[2].arrays[0].dims
    inner = dims_list(scatter, "update_window_dims")
    outer = [d for d in range(len(shape)) if d not in inner]
    (vector,) = dims_list(scatter, "index_vector_dim")
    rank = len(operands[1].arrays[0].dims)
    index_dims = [d for d in range(rank) if d != vector]
    cut = [d for d, n in zip(outer, parts(of_updates, outer)) if shape[d] % n]
    if not cut or (target.is_cut and _is_sent(target, of_updates, scatter)):
        return None
    if of_indices.copies == 1 and math.prod(parts(of_indices, index_dims)) > 1:
        return None
    return cut[0]


def _is_sent(target: TensorSharding, updates: TensorSharding, scatter: Instruction) -> bool:
    """Whether the target is cut along what a window holds, and the updates are not so."""
    inserted = dims_list(scatter, "inserted_window_dims")
    window = [d for d in range(len(target.tiles)) if d not in inserted]
    inner = dims_list(scatter, "update_window_dims")
    return math.prod(parts(target, window)) > 1 and parts(target, window) != parts(updates, inner)


def padding_is_zero(
    instruction: Instruction,
    inside: Computation,
    is_uneven: Callable[[Instruction], bool],
    far: int = _FAR,
) -> bool:
    """Whether the padding of an unevenly cut tensor is zeros, or might be: it is where something whole
    was cut, and where operations make nothing else of that.

    Args:
        instruction: that makes the tensor.
        inside: where it is.
        is_uneven: whether the parts of a tensor are padded.
        far: so many operations are looked at, deep; beyond them it might be.
    """
    if not is_uneven(instruction):
        return True
    if instruction.opcode not in (*_KEEPING, *_OF_ALL, "multiply", "select") or not far:
        return not far
    operands = inside.operands(instruction)
    if instruction.opcode == "select":
        operands = operands[1:]
    zeros = (padding_is_zero(i, inside, is_uneven, far - 1) for i in operands)
    return any(zeros) if instruction.opcode == "multiply" else all(zeros)
