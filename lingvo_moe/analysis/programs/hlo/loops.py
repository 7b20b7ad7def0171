"""Computes how often the body of a compiled loop runs.

A loop's condition, and the updates of the values that it reads, are scalar integer arithmetic. So they
are evaluated, from the loop's initial tuple until the condition is false. This covers counters that go
up or down, and updates that the compiler has moved into fusions or copies.
"""

import functools
import operator
import re
from collections.abc import Callable, Sequence

from lingvo_moe.analysis.programs.hlo.instructions import Computation, HloError, Instruction

_MOST_TRIPS = 1_000_000
_KNOWN = re.compile(r'known_trip_count"?:\s*\{"?n"?:\s*"?(\d+)')
# A name scope that states the expected trip count of a loop whose length depends on data, e.g. of a
# loop over the rows that experts receive (core/kernels/grouped_matmul.py).
_EXPECTED = re.compile(r"/about_(\d+)_trips(?:_\d+)?/")
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
# The value of a scalar; None where it does not follow from constants.
_Value = int | None
# A computation's parameter, as a function from the index of a tuple element (None for a parameter
# that is no tuple) to a value.
_Parameter = Callable[[int | None], _Value]
_Computations = Callable[[str], Computation]


def trip_count(computation: _Computations, inside: Computation, loop: Instruction) -> int:
    """Returns how often a loop runs its body.

    Args:
      computation: gives a computation of the program by its name.
      inside: the computation that contains the loop.
      loop: a `while` instruction.

    Raises:
      HloError: the condition does not follow from constants, or never becomes false.
    """
    match = _KNOWN.search(loop.attributes)
    if match:
        return int(match[1])
    condition = computation(loop.attribute("condition"))
    body = computation(loop.attribute("body"))
    state: dict[int | None, _Value] = {}

    def initial(element: int | None) -> _Value:
        if element not in state:
            state[element] = _evaluate(
                computation, inside, loop.operands[0], element, _NO_PARAMETERS
            )
        return state[element]

    _evaluate(computation, condition, condition.root.name, None, [initial])
    seen = 0
    while seen < len(state):  # The elements that the condition reads, and those their updates read.
        for element in list(state)[seen:]:
            seen += 1
            _evaluate(computation, body, body.root.name, element, [initial])
    for trips in range(_MOST_TRIPS):
        at = [state.get]
        goes_on = _evaluate(computation, condition, condition.root.name, None, at)
        if goes_on is None:
            break
        if not goes_on:
            return trips
        state = {e: _evaluate(computation, body, body.root.name, e, at) for e in state}
    raise HloError(
        f"loop {loop.name} ({loop.op_name or 'unnamed'}): its trip count is unknown, because its condition"
        f" {condition.name} does not compare a counter that starts at a constant with a constant"
    )


def expected_trips(loop: Instruction) -> int | None:
    """The trip count that the program's name scope `about_N_trips` states for a loop; None without one."""
    stated = _EXPECTED.findall(f"{loop.op_name}/")
    return int(stated[-1]) if stated else None


_NO_PARAMETERS: Sequence[_Parameter] = ()


def _evaluate(
    computation: _Computations,
    inside: Computation,
    name: str,
    element: int | None,
    parameters: Sequence[_Parameter],
) -> _Value:
    """Evaluates instruction `name` of `inside`, or one element of it if it is a tuple."""
    instruction = inside.by_name[name]
    opcode, operands = instruction.opcode, instruction.operands

    def value(index: int, element: int | None = None) -> _Value:
        return _evaluate(computation, inside, operands[index], element, parameters)

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
        called = computation(instruction.called[0])
        inner: list[_Parameter] = [functools.partial(value, i) for i in range(len(operands))]
        return _evaluate(computation, called, called.root.name, element, inner)
    if opcode in _SAME or opcode == "opt-barrier":
        return value(0, element)
    if opcode in _ARITHMETIC or opcode in ("compare", "select", "and", "or"):
        return _scalar(instruction, [value(i) for i in range(len(operands))])
    return None


def _scalar(instruction: Instruction, values: list[_Value]) -> _Value:
    opcode = instruction.opcode
    if opcode == "and" and 0 in values:
        return 0
    if opcode == "or" and 1 in values and instruction.arrays[0].dtype == "pred":
        return 1
    if opcode == "select":
        return None if values[0] is None else values[1] if values[0] else values[2]
    numbers = [v for v in values if v is not None]
    if len(numbers) < len(values):
        return None
    if opcode == "compare":
        return int(_COMPARE[instruction.attribute("direction")](*numbers))
    if opcode in ("and", "or"):
        return (operator.and_ if opcode == "and" else operator.or_)(*numbers)
    return _ARITHMETIC[opcode](*numbers)


def _literal(text: str) -> _Value:
    text = text.strip().strip("{}").strip()
    if text in ("true", "false"):
        return int(text == "true")
    return int(text) if re.fullmatch(r"-?\d+", text) else None
