"""Liveness analysis: which buffers a compiled program holds at each point of its schedule.

The text of a scheduled program shows where each value is written and where it is last read. Values
that share a buffer count once: values forwarded by tuples, bitcasts and loops, the target of an update
in place, and results that reuse a donated argument. A loop's body is laid out once, at the position of
its loop. The values that the loop carries are one set of buffers, live from before the loop to the
last reader after it.

This is a reconstruction. The compiler's own allocator shares more memory (a sum may reuse the buffer of
one of its terms) and loses some to packing; breakdown.py reports both peaks.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from lingvo_moe.analysis.programs.hlo.instructions import Computation, Instruction
from lingvo_moe.analysis.programs.hlo.module import Executed, Module, is_backward

_FORWARDED = ("async-update", "bitcast", "get-tuple-element", "tuple", "opt-barrier")
_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}")


@dataclass(frozen=True)
class Value:
    """One array of an instruction's result."""

    producer: Executed
    index: int

    @property
    def instruction(self) -> Instruction:
        """The instruction that produces it."""
        return self.producer.instruction


@dataclass
class Buffer:
    """Memory that one or more values share."""

    num_bytes: int = 0  # its size, including the padding of tiles
    start: int = 1 << 60  # schedule position of the first instruction that writes it
    end: int = -1  # schedule position of the last instruction that reads it
    # The values written to it, in schedule order; values that are only forwarded are left out.
    values: list[Value] = field(default_factory=list)
    argument: int | None = None  # the number of the program's argument that it holds, or None


@dataclass(frozen=True)
class Liveness:
    """The buffers of a program."""

    buffers: list[Buffer]  # all buffers in main memory
    length: int  # number of positions in the schedule
    backward: int  # position of the first loop that computes gradients; `length` if there is none
    # For each instruction's name, the index in `buffers` of each array of its result; None for an array outside main
    # memory.
    buffer_of: dict[str, list[int | None]]

    def Peak(self) -> tuple[int, int]:
        """Returns (the schedule position with the most live bytes, those bytes), including arguments."""
        change = [0] * (self.length + 2)
        for buffer in self.buffers:
            change[buffer.start] += buffer.num_bytes
            change[buffer.end + 1] -= buffer.num_bytes
        best, live, place = 0, 0, 0
        for at, delta in enumerate(change):
            live += delta
            if live > best:
                best, place = live, at
        return place, best


def liveness(module: Module) -> Liveness:
    """Traces a scheduled module. Raises HloError: the text calls a computation that it does not contain."""
    return _Tracer(module).Trace()


class _Tracer:
    """Numbers the schedule's instructions in order and unites values that share memory (union-find)."""

    def __init__(self, module: Module):
        self._module = module
        self._ids: dict[str, list[int]] = {}  # instruction name -> the values of its result
        self._parent: list[int] = []  # union-find
        self._values: list[Value] = []
        self._written: list[int | None] = []  # position of the write; None: only forwarded
        self._read: list[int] = []  # position of the last read
        self._clock = 0
        self._backward = -1

    def Trace(self) -> Liveness:
        entry = self._module.entry
        self._visit(entry, False)
        arguments = {self._ids[p.name][0]: int(p.literal) for p in entry.parameters}
        numbers = {number: value for value, number in arguments.items()}
        results = self._ids[entry.root.name]
        _, _, aliases = self._module.attributes.partition("input_output_alias=")
        for output, argument in _ALIAS.findall(aliases.partition(", entry_")[0]):
            self._join(results[int(output or 0)], numbers[int(argument)])
        for value in results:
            self._read[value] = self._clock
        return self._collect(arguments)

    def _visit(self, computation: Computation, backward: bool) -> None:
        for instruction in computation.instructions:
            first = len(self._parent)
            ids = list(range(first, first + len(instruction.arrays)))
            executed = Executed(instruction, computation, 1, backward)
            for i in range(len(ids)):
                self._parent.append(first + i)
                self._values.append(Value(executed, i))
                self._written.append(self._clock)
                self._read.append(self._clock)
            self._ids[instruction.name] = ids
            self._place(instruction, computation, ids, backward)
            self._clock += 1

    def _place(
        self, instruction: Instruction, inside: Computation, ids: list[int], backward: bool
    ) -> None:
        opcode = instruction.opcode
        if opcode == "parameter":
            return
        operands = [self._ids[name] for name in instruction.operands]
        flat = [value for operand in operands for value in operand]
        if opcode in _FORWARDED or opcode.endswith("-done"):
            self._forward(instruction, inside, ids, operands)
            return
        for value in flat:
            self._read[value] = self._clock
        if opcode == "while":
            self._loop(instruction, ids, operands[0], backward)
        elif opcode in ("call", "conditional"):
            self._call(instruction, ids, operands, backward)
        elif opcode.endswith("-start"):
            self._start(instruction, ids, flat)
        elif opcode == "send":  # its result begins with its operand
            self._forward_value(ids[0], flat[0])
        else:
            for out, operand in _updated_in_place(self._module, inside, instruction):
                self._join(ids[out], self._ids[operand][0])

    def _forward(
        self,
        instruction: Instruction,
        inside: Computation,
        ids: list[int],
        operands: list[list[int]],
    ) -> None:
        if instruction.opcode == "get-tuple-element":
            operand = inside.by_name[instruction.operands[0]]
            index = int(instruction.attribute("index"))
            # Nested tuples are flattened, so the index does not give the position of the element.
            flat = len(operand.arrays) > index and len(ids) == 1
            sources = operands[0][index : index + 1] if flat else operands[0][: len(ids)]
        elif instruction.opcode.endswith("-done"):
            start = inside.by_name[instruction.operands[0]]
            bare = ("copy-start", "all-reduce-start", "recv")  # their results begin with the value
            skipped = 0 if start.opcode in bare else len(start.operands)
            sources = operands[0][skipped : skipped + len(ids)] or operands[0]
            for value in operands[0]:
                self._read[value] = self._clock
        else:
            sources = [value for operand in operands for value in operand]
        for out, source in zip(ids, sources):
            self._forward_value(out, source)

    def _loop(
        self, instruction: Instruction, ids: list[int], init: list[int], backward: bool
    ) -> None:
        for out, value in zip(ids, init):
            self._forward_value(out, value)
        condition = self._module.computation(instruction.attribute("condition"))
        body = self._module.computation(instruction.attribute("body"))
        backward = backward or is_backward(instruction, body)
        if backward and self._backward < 0:
            self._backward = self._clock
        for called in (condition, body):
            self._clock += 1
            self._visit(called, backward)
            for inner, value in zip(self._ids[called.parameters[0].name], ids):
                self._forward_value(inner, value)
        for inner, value in zip(self._ids[body.root.name], ids):
            self._join(inner, value)
            self._read[inner] = self._clock
        for value in ids:
            self._read[value] = self._clock

    def _call(
        self,
        instruction: Instruction,
        ids: list[int],
        operands: list[list[int]],
        backward: bool,
    ) -> None:
        several = instruction.opcode == "conditional"
        for branch, name in enumerate(instruction.called):
            called = self._module.computation(name)
            self._clock += 1
            self._visit(called, backward)
            passed = [operands[branch + 1]] if several and branch + 1 < len(operands) else operands
            inner = [value for p in called.parameters for value in self._ids[p.name]]
            for value, source in zip(inner, (v for operand in passed for v in operand)):
                self._forward_value(value, source)
            for out, value in zip(ids, self._ids[called.root.name]):
                self._forward_value(out, value)
                self._read[value] = self._clock

    def _start(self, instruction: Instruction, ids: list[int], flat: list[int]) -> None:
        """The result of a start contains its operands, which therefore stay live until the matching done."""
        if instruction.opcode == "copy-start":
            self._forward_value(ids[1], flat[0])
        elif instruction.opcode != "all-reduce-start":
            for out, value in zip(ids[: len(flat)] if len(ids) > len(flat) else [], flat):
                self._forward_value(out, value)

    def _forward_value(self, value: int, source: int) -> None:
        self._written[value] = None
        self._join(value, source)

    def _find(self, value: int) -> int:
        while self._parent[value] != value:
            self._parent[value] = self._parent[self._parent[value]]
            value = self._parent[value]
        return value

    def _join(self, a: int, b: int) -> None:
        a, b = self._find(a), self._find(b)
        self._parent[max(a, b)] = min(a, b)

    def _collect(self, arguments: dict[int, int]) -> Liveness:
        buffers: dict[int, Buffer] = {}
        for value, written in enumerate(self._written):
            buffer = buffers.setdefault(self._find(value), Buffer())
            buffer.end = max(buffer.end, self._read[value])
            if written is not None:
                entry = self._values[value]
                array = entry.instruction.arrays[entry.index]
                buffer.start = min(buffer.start, written)
                is_constant = entry.instruction.opcode == "constant"  # counted with the code
                if array.memory_space == 0 and not is_constant:
                    buffer.num_bytes = max(buffer.num_bytes, array.padded_bytes)
                buffer.values.append(entry)
            if value in arguments:
                buffer.argument = arguments[value]
        used = {root: b for root, b in buffers.items() if b.num_bytes and b.values}
        for buffer in used.values():
            if buffer.argument is not None:
                buffer.start, buffer.end = 0, self._clock
        number = {root: i for i, root in enumerate(used)}
        return Liveness(
            list(used.values()),
            self._clock,
            self._backward if self._backward >= 0 else self._clock,
            {
                name: [number.get(self._find(value)) for value in ids]
                for name, ids in self._ids.items()
            },
        )


def _updated_in_place(
    module: Module, inside: Computation, instruction: Instruction
) -> Iterator[tuple[int, str]]:
    """Yields (index of the array in the result, name of the operand that it overwrites)."""
    if instruction.opcode in ("dynamic-update-slice", "scatter"):
        yield 0, instruction.operands[0]
    elif instruction.opcode == "fusion":
        called = module.computation(instruction.called[0])
        root = called.root
        results = called.operands(root) if root.opcode == "tuple" else [root]
        for out, result in enumerate(results):
            number = _overwritten(module, called, result)
            if number is not None:
                yield out, instruction.operands[number]


def _overwritten(module: Module, inside: Computation, value: Instruction) -> int | None:
    """The number of the parameter of `inside` that `value` updates in place; None if there is none."""
    updated = False
    while True:
        if value.opcode == "parameter":
            return int(value.literal) if updated else None
        if value.opcode == "fusion":
            sources = dict(_updated_in_place(module, inside, value))
            if 0 not in sources:
                return None
            updated, value = True, inside.by_name[sources[0]]
        elif value.opcode in ("dynamic-update-slice", "scatter"):
            updated, value = True, inside.by_name[value.operands[0]]
        elif value.opcode in ("bitcast", "reshape"):
            value = inside.by_name[value.operands[0]]
        else:
            return None
