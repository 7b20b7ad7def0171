"""How often a compiled loop's body runs.

A loop's condition and the step of what it reads are scalar arithmetic on integers, so they are
evaluated: from the loop's initial tuple on, until the condition is false. This covers a counter
that goes up, one that goes down, and steps that a compiler has put into fusions or copies.
"""

import functools
import operator
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lingvo_moe.core.hlo.errors import HloError

if TYPE_CHECKING:
    from lingvo_moe.core.hlo.module import Computation, Instruction, Module

_MOST_TRIPS = 1_000_000
_KNOWN = re.compile(r'known_trip_count"?:\s*\{"?n"?:\s*"?(\d+)')
# A name scope by which a program tells what it expects of a loop whose length data decide, e.g. one
# over the rows that experts get (core/moe/grouped_matmul.py).
_TOLD = re.compile(r"/about_(\d+)_trips(?:_\d+)?/")
_SAME = (
    "copy",
    "bitcast",
    "bitcast-convert",
    "convert",
    "reshape",
    "broadcast",
    "copy-start",
    "copy-done",
)
_COMPARE = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
}
_ARITHMETIC: dict[str, Callable[..., int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "minimum": min,
    "maximum": max,
    "negate": operator.neg,
    "not": lambda x: int(not x),
}
# The value of a scalar, or None where it cannot be told.
_Value = int | None
# A computation's parameter: from an element of its tuple (None: it is no tuple) to a value.
_Parameter = Callable[[int | None], _Value]


def trip_count(module: "Module", inside: "Computation", loop: "Instruction") -> int:
    """How often `loop`, an instruction of `inside`, runs its body.

    Raises:
      HloError: the condition does not follow from constants, or holds for ever.
    """
    known = _KNOWN.search(loop.attributes)
    if known:
        return int(known[1])
    condition = module.computation(loop.attribute("condition"))
    body = module.computation(loop.attribute("body"))
    state: dict[int | None, _Value] = {}

    def initial(element: int | None) -> _Value:
        if element not in state:
            state[element] = _evaluate(module, inside, loop.operands[0], element, _NO_PARAMETERS)
        return state[element]

    _evaluate(module, condition, condition.root.name, None, [initial])
    seen = 0
    while seen < len(state):  # What the condition reads, and what the next values of that read.
        for element in list(state)[seen:]:
            seen += 1
            _evaluate(module, body, body.root.name, element, [initial])
    for trips in range(_MOST_TRIPS):
        at = [state.get]
        goes_on = _evaluate(module, condition, condition.root.name, None, at)
        if goes_on is None:
            break
        if not goes_on:
            return trips
        state = {e: _evaluate(module, body, body.root.name, e, at) for e in state}
    raise HloError(
        f"cannot tell how often the loop {loop.name} ({loop.op_name or 'unnamed'}) runs: its condition"
        f" {condition.name} is not that of a counter from a constant to a constant"
    )


def told_trips(loop: "Instruction") -> int | None:
    """How often the program expects a loop to run whose length data decide; None if it does not tell."""
    told = _TOLD.findall(f"{loop.op_name}/")
    return int(told[-1]) if told else None


_NO_PARAMETERS: Sequence[_Parameter] = ()


def _evaluate(
    module: "Module",
    inside: "Computation",
    name: str,
    element: int | None,
    parameters: Sequence[_Parameter],
) -> _Value:
    """The value of instruction `name`, or of one element of the tuple that it is."""
    instruction = inside.by_name[name]
    opcode, operands = instruction.opcode, instruction.operands

    def value(index: int, of: int | None = None) -> _Value:
        return _evaluate(module, inside, operands[index], of, parameters)

    if opcode == "parameter":
        number = int(instruction.literal)
        return parameters[number](element) if number < len(parameters) else None
    if opcode == "constant":
        return _literal(instruction.literal)
    if opcode == "get-tuple-element":
        return value(0, int(instruction.attribute("index")))
    if opcode == "tuple":
        return None if element is None else value(element)
    if opcode in ("fusion", "call"):
        called = module.computation(instruction.called[0])
        inner: list[_Parameter] = [functools.partial(value, i) for i in range(len(operands))]
        return _evaluate(module, called, called.root.name, element, inner)
    if opcode in _SAME or opcode == "opt-barrier":
        return value(0, element)
    return (
        _scalar(instruction, [value(i) for i in range(len(operands))])
        if _is_known(opcode)
        else None
    )


def _is_known(opcode: str) -> bool:
    return opcode in _ARITHMETIC or opcode in ("compare", "select", "and", "or")


def _scalar(instruction: "Instruction", values: list[_Value]) -> _Value:
    opcode = instruction.opcode
    if opcode == "and" and 0 in values:
        return 0
    if opcode == "or" and 1 in values and instruction.arrays[0].dtype == "pred":
        return 1
    if opcode == "select":
        return None if values[0] is None else values[1] if values[0] else values[2]
    known = [v for v in values if v is not None]
    if len(known) < len(values):
        return None
    if opcode == "compare":
        return int(_COMPARE[instruction.attribute("direction")](*known))
    if opcode in ("and", "or"):
        return (operator.and_ if opcode == "and" else operator.or_)(*known)
    return _ARITHMETIC[opcode](*known)


def _literal(text: str) -> _Value:
    text = text.strip().strip("{}").strip()
    if text in ("true", "false"):
        return int(text == "true")
    return int(text) if re.fullmatch(r"-?\d+", text) else None
