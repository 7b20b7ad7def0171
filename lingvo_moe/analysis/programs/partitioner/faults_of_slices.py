"""Detects slices from starts of run time, which XLA's SPMD partitioner (of jaxlib 0.10.2) gets wrong out of range.

On one device a start is first brought into the range in which the slice lies inside the tensor. Where a slice is
sharded into equal parts along the dimension that it shortens, each device instead reads its part behind the start that
it is given, and brings that into range. Where one element along a sharded dimension is replaced, no device does so if
the start is outside of the tensor.
"""

from collections.abc import Sequence

from lingvo_moe.analysis.programs.hlo.instructions import Computation, Instruction
from lingvo_moe.analysis.programs.hlo.sharding import TensorSharding
from lingvo_moe.analysis.programs.partitioner.faults_of_products import parts

# What a start is followed through, to an argument of the program. A minimum, a clamp or a remainder is a bound.
_FOLLOWED = (
    *("add", "subtract", "multiply", "negate", "maximum", "select", "convert", "copy"),
    *("reshape", "broadcast", "transpose", "slice", "concatenate"),
)
REPLACES = "dynamic-update-slice"


def unbounded_dim(
    instruction: Instruction,
    operands: Sequence[Instruction],
    result: TensorSharding,
    inside: Computation,
) -> dict[str, object] | None:
    """The `dim` along which a slice is wrong where its start, which an argument decides, is out of range; None if none.

    Args:
        instruction: a dynamic-slice or a dynamic-update-slice of the program's entry computation, `inside`.

    Returns:
        Also `last`, the last start that is in range.
    """
    replaces = instruction.opcode == REPLACES
    part, starts = (operands[1], operands[2:]) if replaces else (instruction, operands[1:])
    counts = parts(result, range(len(starts)))
    sizes = zip(operands[0].arrays[0].dims, part.arrays[0].dims, counts, starts, strict=True)
    for dim, (whole, size, count, start) in enumerate(sizes):
        may_be_wrong = size == 1 if replaces else size % count == 0
        if count > 1 and size < whole and may_be_wrong and _is_unbounded(start, inside):
            return {"dim": dim, "last": whole - size}
    return None


def _is_unbounded(start: Instruction, inside: Computation) -> bool:
    """Whether a start is an argument, or computed from one by sums and the like, without a bound."""
    todo, done = [start], set[str]()
    while todo:
        at = todo.pop()
        if at.opcode == "parameter":
            return True
        if at.opcode in _FOLLOWED and at.name not in done:
            done.add(at.name)
            todo += [i for i in inside.operands(at) if i.arrays and i.arrays[0].dtype != "pred"]
    return False
