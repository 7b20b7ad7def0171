"""Lists the collectives of a compiled program's text."""

import re
from collections import Counter
from collections.abc import Iterator

from lingvo_moe.analysis.programs.hlo.collectives import COLLECTIVES, collective_kind
from lingvo_moe.analysis.programs.hlo.instructions import Instruction
from lingvo_moe.analysis.programs.hlo.module import parse_instruction
from lingvo_moe.core.engine.program_analysis import Collective

_MAYBE = re.compile(rf"^.* = .* (?:{'|'.join(COLLECTIVES)}|send)(?:-start)?\(.*$", re.MULTILINE)


def parse_collectives(hlo_text: str) -> list[Collective]:
    """All collectives of a compiled module that devices carry out themselves, in order of appearance."""
    collectives = []
    for kind, instruction in _parse(hlo_text):
        results = instruction.arrays
        if instruction.opcode in ("all-gather-start", "collective-permute-start"):
            count = len(instruction.operands)
            # (operands, results, contexts); a permute in place has its result and places among its operands.
            results = results[count : 2 * count] or results[1:2]
        if instruction.opcode != "send":
            collectives.append(
                Collective(
                    kind,
                    instruction.name,
                    tuple((array.dtype, array.dims) for array in results),
                    sum(array.num_bytes for array in results),
                    instruction.op_name,
                )
            )
    return collectives


def count_collectives(hlo_text: str) -> dict[str, int]:
    """Kind -> number of operations, for the kinds that occur; transfers between TPU slices are such operations too."""
    return dict(sorted(Counter(kind for kind, _ in _parse(hlo_text)).items()))


def _parse(hlo_text: str) -> Iterator[tuple[str, Instruction]]:
    for line in _MAYBE.findall(hlo_text):
        instruction = parse_instruction(line.strip())
        if kind := collective_kind(instruction):
            yield kind, instruction
