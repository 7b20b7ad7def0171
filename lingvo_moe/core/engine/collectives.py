"""Lists the collectives of a compiled program's text."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from lingvo_moe.analysis.programs.hlo.collectives import COLLECTIVES, collective_kind
from lingvo_moe.analysis.programs.hlo.instructions import Instruction
from lingvo_moe.analysis.programs.hlo.module import parse_instruction

_MAYBE = re.compile(rf"^.* = .* (?:{'|'.join(COLLECTIVES)}|send)(?:-start)?\(.*$", re.MULTILINE)


@dataclass(frozen=True)
class Collective:
    """One collective of a compiled program."""

    kind: str  # one of COLLECTIVES
    name: str  # the name of the HLO instruction
    # Dtype and dimensions of its results on one device, e.g. (('f32', (8, 16)),).
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    num_bytes: int  # bytes of these results. A loop's body is counted once
    op_name: str = ""  # the model's operation that it comes from, if XLA names it


def parse_collectives(hlo_text: str) -> list[Collective]:
    """All collectives of a compiled module that devices carry out themselves, in order of appearance."""
    found = []
    for kind, instruction in _parse(hlo_text):
        results = instruction.arrays
        if instruction.opcode in ("all-gather-start", "collective-permute-start"):
            count = len(instruction.operands)
            # (operands, results, contexts); a permute in place has its result and places among its operands.
            results = results[count : 2 * count] or results[1:2]
        if instruction.opcode != "send":
            found.append(
                Collective(
                    kind,
                    instruction.name,
                    tuple((array.dtype, array.dims) for array in results),
                    sum(array.num_bytes for array in results),
                    instruction.op_name,
                )
            )
    return found


def count_collectives(hlo_text: str) -> dict[str, int]:
    """Kind -> number of operations, for the kinds that occur; transfers between TPU slices are such operations too."""
    return dict(sorted(Counter(kind for kind, _ in _parse(hlo_text)).items()))


def _parse(hlo_text: str) -> Iterator[tuple[str, Instruction]]:
    for line in _MAYBE.findall(hlo_text):
        instruction = parse_instruction(line.strip())
        if kind := collective_kind(instruction):
            yield kind, instruction
