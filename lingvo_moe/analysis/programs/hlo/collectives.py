"""Reads kind, size and replica groups of a collective from a compiled program.

Between TPU slices the compiler sends what collectives exchange (megascale.py). Such a `send` counts as a collective
among slices. Other collectives of the same program are listed for the devices of one slice.
"""

import dataclasses

from lingvo_moe.analysis.programs.hlo import megascale
from lingvo_moe.analysis.programs.hlo.groups import Groups, device_groups
from lingvo_moe.analysis.programs.hlo.instructions import Computation, Instruction
from lingvo_moe.analysis.programs.hlo.module import Module

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
    """One execution of a collective."""

    kind: str  # one of COLLECTIVES
    # Bytes on one device of its operands or its results, whichever are larger, without padding.
    bytes: int
    participants: int  # devices in one replica group
    groups: int  # number of replica groups
    tensors: int = 1  # number of arrays that the compiler combined into this collective
    # The ids of the devices in each replica group; of a permute, each (source, target) pair.
    devices: Groups = dataclasses.field(default=(), repr=False)


def collective_kind(instruction: Instruction) -> str | None:
    """The kind of collective, of COLLECTIVES, that an instruction is or starts; None for any other."""
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in COLLECTIVES else megascale.transfer_kind(instruction)


def collective_use(
    instruction: Instruction, inside: Computation, module_attributes: str = ""
) -> CollectiveUse | None:
    """Describes the collective that `instruction` is; None if it is none.

    Of an asynchronous pair (-start, -done) only the start counts.

    Args:
      module_attributes: `Module.attributes`, needed where replica groups mean all devices.

    Raises:
      HloError: its replica groups cannot be read.
    """
    kind = collective_kind(instruction)
    if kind is None:
        return None
    operands = [array for operand in inside.operands(instruction) for array in operand.arrays]
    groups = device_groups(instruction, module_attributes)
    participants = 2 if kind == "collective-permute" else len(groups[0])
    if instruction.opcode == "send":
        sent = operands[0].num_bytes * (participants if kind == "all-gather" else 1)
        return CollectiveUse(kind, sent, participants, len(groups), devices=groups)
    results = list(instruction.arrays)
    if kind != instruction.opcode and len(results) > len(operands):
        results = results[len(operands) : 2 * len(operands)]  # (operands, results, contexts)
    sizes = [sum(array.num_bytes for array in arrays) for arrays in (operands, results)]
    return CollectiveUse(
        kind, max(sizes), participants, len(groups), tensors=len(operands), devices=groups
    )


def executed_collective(
    instruction: Instruction, inside: Computation, module: Module
) -> CollectiveUse | None:
    """Returns the collective that an instruction is, or that a fusion contains; otherwise None.

    The TPU compiler writes a reduce-scatter as a fusion of an all-reduce and the slice of its result. One that runs
    beside other work is a fusion that starts it, fusions with work that go on with it, and one that ends it; the first
    counts.

    Raises:
      HloError: as collective_use.
    """
    if instruction.opcode != "fusion":
        return collective_use(instruction, inside, module.attributes)
    fused = module.computation(instruction.called[0])
    if fused.name.startswith("async_collective_fusion") or any(
        '"AsyncCollectiveDone"' in inner.attributes for inner in fused.instructions
    ):
        return None
    for inner in fused.instructions:
        use = collective_use(inner, fused, module.attributes)
        if use is not None:
            scatters = use.kind == "all-reduce"
            return dataclasses.replace(use, kind="reduce-scatter") if scatters else use
    return None
