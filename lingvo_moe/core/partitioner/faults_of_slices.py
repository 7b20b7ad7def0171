"""Detects slices from starts of run time, which XLA's SPMD partitioner (of jaxlib 0.10.2) gets wrong out of range.

On one device a start is first brought into the range in which the slice lies inside the tensor. Where a slice is
sharded along the dimension that it shortens, each device instead reads its part behind the start that it is given, and
brings that into the range of its part. Where a slice of one element is replaced in a sharded dimension, a device
whose part does not have the start leaves its part as it is, and so do all if the start is outside of the tensor.
"""

from collections.abc import Sequence

from lingvo_moe.core.hlo.instructions import Computation, Instruction
from lingvo_moe.core.hlo.sharding import TensorSharding
from lingvo_moe.core.partitioner.faults_of_products import parts

# What a start is followed through, to an argument of the program. A minimum, a clamp or a remainder is a bound.
_FOLLOWED = (
    *("add", "subtract", "multiply", "negate", "maximum", "select", "convert", "copy"),
    *("reshape", "broadcast", "transpose", "slice", "concatenate"),
)


def sliced_dim(
    instruction: Instruction, operand: Instruction, result: TensorSharding
) -> int | None:
    """The dimension that a dynamic-slice shortens and along which its result has equal parts; None if there is none."""
    before, after = operand.arrays[0].dims, instruction.arrays[0].dims
    sizes = zip(before, after, parts(result, range(len(after))), strict=True)
    is_wrong = (n > size and count > 1 and size % count == 0 for n, size, count in sizes)
    return next((d for d, wrong in enumerate(is_wrong) if wrong), None)


def replaced_dim(
    instruction: Instruction, update: Instruction, result: TensorSharding
) -> int | None:
    """The sharded dimension of which a dynamic-update-slice replaces one element; None if there is none."""
    before, new = instruction.arrays[0].dims, update.arrays[0].dims
    sizes = zip(before, new, parts(result, range(len(new))), strict=True)
    return next((d for d, (n, m, count) in enumerate(sizes) if count > 1 and m == 1 < n), None)


def comes_from_outside(start: Instruction, inside: Computation) -> bool:
    """Whether a start is an argument of the program, or computed from one by sums and the like, without a bound.

    Args:
        inside: the program's entry computation.
    """
    todo, done = [start], set[str]()
    while todo:
        instruction = todo.pop()
        if instruction.opcode == "parameter":
            return True
        if instruction.opcode in _FOLLOWED and instruction.name not in done:
            done.add(instruction.name)
            todo += _numbers(inside.operands(instruction))
    return False


def _numbers(operands: Sequence[Instruction]) -> list[Instruction]:
    """The operands but for conditions."""
    return [i for i in operands if i.arrays and i.arrays[0].dtype != "pred"]
