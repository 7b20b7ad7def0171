"""Detects scatters of unevenly sharded updates, and of one index, which XLA (of jaxlib 0.10.2) gets wrong.

The last part of uneven updates has padding. If the indices are not sharded over all devices, they are
padded with zeros, and the updates' padding is not masked, so it lands in row 0. That does no harm if it
is zero and is added; it is zero right after an unsharded tensor was split.
"""

import math
from collections.abc import Callable, Sequence

from lingvo_moe.analysis.programs.hlo.attributes import dims_list
from lingvo_moe.analysis.programs.hlo.instructions import Computation, Instruction
from lingvo_moe.analysis.programs.hlo.sharding import TensorSharding
from lingvo_moe.analysis.programs.partitioner.faults_of_products import parts, places

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
    "reshape",  # An operand that is sharded otherwise is padded with zeros again.
    "floor",
)
_OF_ALL = ("add", "subtract", "maximum", "minimum")  # Zero if all operands are zero.
_DEALT_OUT = ("concatenate", "reverse", "sort")  # Along their dimensions XLA pads the result again.


def padded_dim(
    scatter: Instruction, operands: Sequence[Instruction], shardings: Sequence[TensorSharding]
) -> dict[str, object] | None:
    """Returns the dimension of the updates whose padding lands in row 0 of the target; None if there is none.

    It is the first dimension outside the update window that is sharded unevenly, in the updates, or in the indices if
    the updates are not sharded: XLA then shards the updates like the indices, and pads them with zeros.

    None if the indices are sharded over all devices. None if target and updates are sharded differently along window
    dimensions: XLA reshards those updates first, and some results are right. None also if the target is larger than the
    updates, is sharded along scattered dimensions, and the updates' parts cannot be dealt out to its copies: XLA then
    gathers the updates.

    Returns:
        `what` is sharded, 'updates' or 'indices', the `dim` and `size` of the updates, and the `count` of its parts.
    """
    target, of_indices, of_updates = shardings
    shape = operands[2].arrays[0].dims
    inner = dims_list(scatter, "update_window_dims")
    outer = [d for d in range(len(shape)) if d not in inner]
    (vector,) = dims_list(scatter, "index_vector_dim")
    rank = len(operands[1].arrays[0].dims)
    index_dims = [d for d in range(rank) if d != vector]
    what = "updates" if of_updates.is_sharded else "indices"
    counts = parts(of_updates, outer) if of_updates.is_sharded else parts(of_indices, index_dims)
    uneven = [(d, n) for d, n in zip(outer, counts) if shape[d] % n]
    if not uneven or (target.is_sharded and _is_sent(scatter, operands, target, of_updates)):
        return None
    if _is_sliced(scatter, operands, target) and math.gcd(target.copies, math.prod(counts)) == 1:
        return None
    if of_indices.copies == 1 and math.prod(parts(of_indices, index_dims)) > 1:
        return None
    dim, count = uneven[0]
    return {"what": what, "dim": dim, "size": shape[dim], "count": count}


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
    """Whether target and updates are sharded differently along the window's dimensions, so that updates are sent.

    Updates that only need to be sliced are not sent.
    """
    inserted = dims_list(scatter, "inserted_window_dims")
    window = [d for d in range(len(target.tiles)) if d not in inserted]
    inner = dims_list(scatter, "update_window_dims")
    if math.prod(parts(target, window)) == 1:
        return math.prod(parts(updates, inner)) > 1 and _is_sliced(scatter, operands, target)
    if not updates.is_sharded:  # Indices are sharded: some results are right.
        return True
    of_target = places(target, window)
    if math.prod(parts(updates, inner)) > 1:
        return of_target != places(updates, inner)
    of_updates = places(updates, range(len(updates.tiles)))
    slices = {(of_updates[device], part) for device, part in of_target.items()}
    return len(slices) < math.prod(updates.tiles) * math.prod(parts(target, window))


def reads_another_row(
    scatter: Instruction,
    operands: Sequence[Instruction],
    inside: Computation,
    sharding: Callable[[Instruction], TensorSharding | None],
) -> bool:
    """Whether a scatter of one index reads a row that is not in the device's part of the target.

    A device whose part does not have the index reads the nearest row of its part and writes it back. If the part is a
    slice of an unsharded tensor, XLA reads that tensor at the index, so that another row is written.
    """
    target, shape = operands[0], operands[2].arrays[0].dims
    inner, current = dims_list(scatter, "update_window_dims"), sharding(target)
    is_one = all(size == 1 for d, size in enumerate(shape) if d not in inner)
    scattered = dims_list(scatter, "scatter_dims_to_operand_dims")
    if not is_one or current is None or math.prod(parts(current, scattered)) == 1:
        return False
    while target.opcode in ("copy", "reshape", "transpose") and current and current.is_sharded:
        target = inside.operands(target)[0]
        current = sharding(target)
    return current is not None and not current.is_sharded and target.opcode != "broadcast"


def count_on(indices: Instruction, inside: Computation) -> bool:
    """Whether indices are counted, so that their padding may lie past the target. None of those tried were wrong."""
    while indices.opcode in ("copy", "reshape"):
        indices = inside.operands(indices)[0]
    return indices.opcode in ("add", "concatenate", "iota")


def padding_is_zero(
    instruction: Instruction,
    inside: Computation,
    uneven_dims: Callable[[Instruction], Sequence[int]],
    far: int = _SEARCH_LIMIT,
) -> bool:
    """Whether the padding of an unevenly sharded tensor is zero.

    It is zero after an unsharded tensor was split, and stays zero through operations that keep zeros. After any other
    operation it counts as not zero.

    Args:
        uneven_dims: the dimensions along which an instruction's result has padded parts.
        far: how many operations to follow; True if the producers lie farther away.
    """
    uneven = uneven_dims(instruction)
    if not uneven:
        return True
    if instruction.opcode in _DEALT_OUT:
        return set(uneven) <= set(dims_list(instruction, "dimensions"))
    if instruction.opcode not in (*_KEEPING, *_OF_ALL, "multiply", "select") or not far:
        return not far
    operands = inside.operands(instruction)
    if instruction.opcode == "select":
        operands = operands[1:]
    zeros = (padding_is_zero(i, inside, uneven_dims, far - 1) for i in operands)
    return any(zeros) if instruction.opcode == "multiply" else all(zeros)
