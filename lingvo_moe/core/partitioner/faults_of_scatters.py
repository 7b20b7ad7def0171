"""Detects scatters of unevenly sharded updates, which XLA's SPMD partitioner (of jaxlib 0.10.2) gets wrong.

The last part of such updates has padding. If the indices are not sharded over all devices, they are
padded with zeros, and the updates' padding is not masked, so it lands in row 0. That does no harm if it
is zero and is added; it is zero right after an unsharded tensor was split.
"""

import math
from collections.abc import Callable, Sequence

from lingvo_moe.core.hlo.attributes import dims_list
from lingvo_moe.core.hlo.module import Computation, Instruction
from lingvo_moe.core.hlo.sharding import TensorSharding
from lingvo_moe.core.partitioner.faults_of_products import parts

_SEARCH_LIMIT = 64  # How many operations `padding_is_zero` follows.
_KEEPING = (  # Opcodes that map zero to zero.
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
_OF_ALL = ("add", "subtract", "maximum", "minimum")  # Zero if all operands are zero.


def padded_dim(
    scatter: Instruction, operands: Sequence[Instruction], shardings: Sequence[TensorSharding]
) -> int | None:
    """Returns the dimension of the updates whose padding lands in row 0 of the target; None if there is none.

    It is the first dimension outside the update window that is sharded unevenly. None if the indices are sharded over
    all devices. None also if the target is sharded along window dimensions and the updates differently: XLA reshards
    those updates first, and some results are right.

    Args:
        scatter: the instruction.
        operands: target, indices and updates.
        shardings: those of the three operands.
    """
    target, of_indices, of_updates = shardings
    shape = operands[2].arrays[0].dims
    inner = dims_list(scatter, "update_window_dims")
    outer = [d for d in range(len(shape)) if d not in inner]
    (vector,) = dims_list(scatter, "index_vector_dim")
    rank = len(operands[1].arrays[0].dims)
    index_dims = [d for d in range(rank) if d != vector]
    uneven = [d for d, n in zip(outer, parts(of_updates, outer)) if shape[d] % n]
    if not uneven or (target.is_sharded and _is_sent(target, of_updates, scatter)):
        return None
    if of_indices.copies == 1 and math.prod(parts(of_indices, index_dims)) > 1:
        return None
    return uneven[0]


def _is_sent(target: TensorSharding, updates: TensorSharding, scatter: Instruction) -> bool:
    """Whether the target is sharded along window dimensions, and the updates differently along them."""
    inserted = dims_list(scatter, "inserted_window_dims")
    window = [d for d in range(len(target.tiles)) if d not in inserted]
    inner = dims_list(scatter, "update_window_dims")
    return math.prod(parts(target, window)) > 1 and parts(target, window) != parts(updates, inner)


def padding_is_zero(
    instruction: Instruction,
    inside: Computation,
    is_uneven: Callable[[Instruction], bool],
    far: int = _SEARCH_LIMIT,
) -> bool:
    """Whether the padding of an unevenly sharded tensor is zero.

    It is zero after an unsharded tensor was split, and stays zero through operations that keep zeros. After any other
    operation it counts as not zero.

    Args:
        instruction: the instruction that produces the tensor.
        inside: its computation.
        is_uneven: whether an instruction's result has padded parts.
        far: how many operations to follow; True if the producers lie farther away.
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
