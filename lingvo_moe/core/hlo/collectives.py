"""What one collective of a compiled program puts on the network."""

import dataclasses

from lingvo_moe.core.hlo import attributes
from lingvo_moe.core.hlo.module import Computation, Instruction

COLLECTIVES = (
    "all-reduce",
    "all-to-all",
    "all-gather",
    "reduce-scatter",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)


@dataclasses.dataclass(frozen=True)
class CollectiveUse:
    """One execution of a collective.

    Attributes:
      kind: all-reduce, all-to-all, ...
      bytes: what one device holds of it, the larger of what it gives and what it gets, without
        padding: what goes over the network.
      participants: devices that talk with each other.
      groups: how many such sets of devices there are.
      tensors: how many arrays were combined into it.
    """

    kind: str
    bytes: int
    participants: int
    groups: int
    tensors: int = 1


def collective_use(
    instruction: Instruction, inside: Computation, module_attributes: str = ""
) -> CollectiveUse | None:
    """What the network does for `instruction`; None if that is no collective.

    Of a pair that starts and ends apart, the start counts.
    """
    kind = instruction.opcode.removesuffix("-start")
    if kind not in COLLECTIVES:
        return None
    operands = [array for operand in inside.operands(instruction) for array in operand.arrays]
    results = list(instruction.arrays)
    if kind != instruction.opcode and len(results) > len(operands):
        results = results[len(operands) : 2 * len(operands)]  # Then come contexts.
    participants, groups = attributes.replica_groups(instruction, module_attributes)
    sizes = [sum(array.num_bytes for array in arrays) for arrays in (operands, results)]
    return CollectiveUse(kind, max(sizes), participants, groups, tensors=len(operands))
