"""Detects scatters of unevenly sharded updates, and of one index, which XLA (of jaxlib 0.10.2) gets wrong.

The last part of uneven updates has padding. If the indices are not sharded over all devices, they are
padded with zeros, and the updates' padding is not masked, so it lands in row 0. That does no harm if it
is zero and is added; it is zero right after an unsharded tensor was split.
"""

import math
from collections.abc import Callable, Sequence

from lingvo_moe.core.hlo.attributes import dims_list
from lingvo_moe.core.hlo.module import Computation, Instruction
from lingvo_moe.core.hlo.sharding import TensorSharding
from lingvo_moe.core.partitioner.faults_of_products import parts, places

_SEARCH_LIMIT = 64  # How many operations `padding_is_zero` follows.
_KEEPING = (  # Opcodes that map zero to zero.
    "constant",  # XLA makes equal numbers a broadcast, and shards others as it does an unsharded tensor.
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
_SENDING = (  # XLA computes them unsharded or realigns their result: some results are then padded with zeros.
    "concatenate",
    "gather",
    "pad",
    "reduce-window",
    "reverse",
    "scatter",
    "slice",
    "sort",
)


def padded_dim(
    scatter: Instruction, operands: Sequence[Instruction], shardings: Sequence[TensorSharding]
) -> int | None:
    """Returns the dimension of the updates whose padding lands in row 0 of the target; None if there is none.

    It is the first dimension outside the update window that is sharded unevenly. None if the indices are sharded over
    all devices. None if target and updates are sharded differently along window dimensions: XLA reshards those updates
    first, and some results are right. None also if the target is larger than the updates, is sharded along scattered
    dimensions, and the updates' parts cannot be dealt out to its copies: XLA then gathers the updates.

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
    if not uneven or (target.is_sharded and _is_sent(scatter, operands, target, of_updates)):
        return None
    count = math.prod(parts(of_updates, outer))
    if _is_sliced(scatter, operands, target) and math.gcd(target.copies, count) == 1:
        return None
    if of_indices.copies == 1 and math.prod(parts(of_indices, index_dims)) > 1:
        return None
    return uneven[0]


def _is_sliced(
    scatter: Instruction, operands: Sequence[Instruction], target: TensorSharding
) -> bool:
    """Whether the target is larger than the updates, and sharded along the dimensions that the indices are of."""
    dims = dims_list(scatter, "scatter_dims_to_operand_dims")
    return operands[0].num_bytes > operands[2].num_bytes and math.prod(parts(target, dims)) > 1


def _is_sent(
    scatter: Instruction,
    operands: Sequence[Instruction],
    target: TensorSharding,
    updates: TensorSharding,
) -> bool:
    """Whether target and updates are sharded differently along the window's dimensions."""
    inserted = dims_list(scatter, "inserted_window_dims")
    window = [d for d in range(len(target.tiles)) if d not in inserted]
    inner = dims_list(scatter, "update_window_dims")
    if math.prod(parts(target, window)) == 1:
        return math.prod(parts(updates, inner)) > 1 and _is_sliced(scatter, operands, target)
    return places(target, window) != places(updates, inner)


def reads_another_row(
    scatter: Instruction,
    operands: Sequence[Instruction],
    inside: Computation,
    sharding: Callable[[Instruction], TensorSharding | None],
) -> bool:
    """Whether a scatter of one index reads a row that is not in the device's part of the target.

    A device whose part does not have the index reads the nearest row of its part and writes it back. If the part is a
    slice of an unsharded tensor, XLA reads that tensor at the index, so that another row is written.

    Args:
        scatter: the instruction.
        operands: target, indices and updates.
        inside: its computation.
        sharding: that of an instruction.
    """
    target, shape = operands[0], operands[2].arrays[0].dims
    inner, found = dims_list(scatter, "update_window_dims"), sharding(target)
    is_one = all(size == 1 for d, size in enumerate(shape) if d not in inner)
    scattered = dims_list(scatter, "scatter_dims_to_operand_dims")
    if not is_one or found is None or math.prod(parts(found, scattered)) == 1:
        return False
    while target.opcode in ("copy", "reshape", "transpose") and found and found.is_sharded:
        target = inside.operands(target)[0]
        found = sharding(target)
    return found is not None and not found.is_sharded and target.opcode != "broadcast"


def padding_is_zero(
    instruction: Instruction,
    inside: Computation,
    is_uneven: Callable[[Instruction], bool],
    far: int = _SEARCH_LIMIT,
) -> bool:
    """Whether the padding of an unevenly sharded tensor is zero.

    It is zero after an unsharded tensor was split, and stays zero through operations that keep zeros. It counts as zero
    after operations that XLA may compute unsharded, and as not zero after any other.

    Args:
        instruction: the instruction that produces the tensor.
        inside: its computation.
        is_uneven: whether an instruction's result has padded parts.
        far: how many operations to follow; True if the producers lie farther away.
    """
    if not is_uneven(instruction) or instruction.opcode in _SENDING:
        return True
    if instruction.opcode == "reshape":
        return _realigns(instruction, inside) or padding_is_zero(
            inside.operands(instruction)[0], inside, is_uneven, far - 1
        )
    if instruction.opcode not in (*_KEEPING, *_OF_ALL, "multiply", "select") or not far:
        return not far
    operands = inside.operands(instruction)
    if instruction.opcode == "select":
        operands = operands[1:]
    zeros = (padding_is_zero(i, inside, is_uneven, far - 1) for i in operands)
    return any(zeros) if instruction.opcode == "multiply" else all(zeros)


def _realigns(reshape: Instruction, inside: Computation) -> bool:
    """Whether a reshape does more than to add or remove dimensions of one element."""
    shapes = (i.arrays[0].dims for i in (reshape, *inside.operands(reshape)))
    return len({tuple(size for size in shape if size > 1) for shape in shapes}) > 1
