"""Arrays, instructions and computations of a compiled program."""

import dataclasses
import functools
import re


class HloError(ValueError):
    """The text is not in a form that XLA prints; the message quotes it and says what was expected."""


@dataclasses.dataclass(frozen=True)
class Array:
    """An array in memory; `memory_space` 0 is the device's main memory (HBM)."""

    dtype: str
    dims: tuple[int, ...]
    num_bytes: int
    padded_bytes: int
    memory_space: int = 0


@dataclasses.dataclass(slots=True)
class Instruction:
    """One line of a computation."""

    name: str  # unique in the module
    opcode: str  # e.g. 'dot'
    arrays: tuple[Array, ...]  # the result; the arrays of a tuple are flattened in order
    operands: tuple[str, ...]  # names of instructions of the same computation
    op_name: str  # the TensorFlow operation that it came from, with its name scope; '' if unknown
    called: tuple[str, ...]  # names of the computations that it calls
    attributes: str  # the rest of the line as text; `attribute` finds one of them
    literal: str = ""  # the text in the parentheses of a constant or a parameter
    is_root: bool = False  # whether it is the result of its computation

    def attribute(self, key: str) -> str:
        """The text after `key=`, including its braces; '' without the attribute."""
        match = re.search(rf"(?:^|[ ,]){re.escape(key)}=", self.attributes)
        return balanced(self.attributes, match.end()) if match else ""

    @property
    def num_bytes(self) -> int:
        return sum(array.num_bytes for array in self.arrays)

    @property
    def padded_bytes(self) -> int:
        return sum(array.padded_bytes for array in self.arrays)


@dataclasses.dataclass
class Computation:
    """A computation: its instructions in schedule order. Their names are unique in the module."""

    name: str
    instructions: list[Instruction] = dataclasses.field(default_factory=list)

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {i.name: i for i in self.instructions}

    @functools.cached_property
    def parameters(self) -> list[Instruction]:
        """The parameters, in the order of their numbers."""
        parameters = [i for i in self.instructions if i.opcode == "parameter"]
        return sorted(parameters, key=lambda i: int(i.literal))

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that read each instruction, by its name, in schedule order."""
        table: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                table.setdefault(operand, []).append(instruction)
        return table

    @functools.cached_property
    def root(self) -> Instruction:
        """The instruction whose value is the computation's."""
        return next((i for i in self.instructions if i.is_root), self.instructions[-1])

    def operands(self, instruction: Instruction) -> list[Instruction]:
        return [self.by_name[name] for name in instruction.operands]


def balanced(text: str, start: int) -> str:
    """The text from `start` to the end of its bracketed group, and what follows up to a space."""
    depth = 0
    quoted = False
    for place in range(start, len(text)):
        letter = text[place]
        if letter == '"':
            quoted = not quoted
        elif quoted:
            continue
        elif letter in "({[":
            depth += 1
        elif letter in ")}]":
            depth -= 1
            if depth < 0:
                return text[start:place]
            following = text[place + 1 : place + 3]
            is_last = following[:1] in ("", " ", ",") and following != " {"
            if depth == 0 and is_last:  # `mesh['x'=8] {'x'}` is one group with its brace.
                return text[start : place + 1]
        elif depth == 0 and letter in " ," and text[place : place + 2] != " {":
            return text[start:place]
    return text[start:]
