"""Parses scheduled HLO text into computations, instructions and arrays, with their execution counts.

The text is what the compiler prints after its last pass, so each instruction outside of fusions is one
thing that the device executes. Sizes are bytes; `padded_bytes` includes the padding of tiles, e.g.
`f32[9]{0:T(256)}` takes 1024 bytes.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence

from lingvo_moe.analysis.programs.hlo import loops, pipelines
from lingvo_moe.analysis.programs.hlo.instructions import (
    Array,
    Computation,
    HloError,
    Instruction,
    balanced,
)

_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([^\]]*)\](?:\{([^}]*)\})?")
_BITS = re.compile(r"\D+(\d+)")
_TILE = re.compile(r"([TS])\(([^)]*)\)|E\((\d+)\)")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([^\s(]+) \(.*->.*\{$")
_CALLED = re.compile(
    r"[ ,](?:calls|to_apply|condition|body|branch_computations|called_computations|"
    r"true_computation|false_computation|select|scatter)=(?:\{([^}]*)\}|(%?[^\s,}]+))"
)
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_MARK = re.compile(r"/\*.*?\*/")
# Before a line that goes on with the JSON of an attribute, of Pallas's kernels.
_GOES_ON = re.compile(r'\n(?="|\}\}|\}, ")')
_MICRO_BATCHES = re.compile(r"/micro_batches/while(?:_\d+)?$")
GRADIENT = "gradient_tape/"  # Appears in the op_name of operations that compute gradients.


_NOTHING = Instruction("", "", (), (), "", (), "")


@dataclasses.dataclass(frozen=True)
class Executed:
    """A scheduled instruction, and how often one run of the program executes it."""

    instruction: Instruction  # the instruction
    computation: Computation  # the computation that contains it
    times: int  # executions in one run
    in_backward_loop: bool  # whether it runs in a loop that computes gradients
    # The names of the `while` instructions in whose bodies it runs, outermost first.
    loops: tuple[str, ...] = ()

    @property
    def op_name(self) -> str:
        """The instruction's `op_name`."""
        return self.instruction.op_name


@dataclasses.dataclass
class Module:
    """A compiled program; `attributes` is the rest of its first line as text."""

    name: str
    entry: Computation
    computations: dict[str, Computation]
    attributes: str = ""

    def executions(
        self,
        once: bool = False,
        unknown: int | None = None,
        branches: Callable[[Instruction], Sequence[str]] | None = None,
        start: Computation | None = None,
    ) -> Iterator[Executed]:
        """Yields every scheduled instruction in order; instructions inside fusions are left out.

        A loop's condition runs once more than its body.

        Args:
          once: count a loop's body once, as XLA's own cost analysis does.
          unknown: trip count to assume for a loop whose trip count cannot be determined; with 0, the
            instructions of such a loop are recognised by `times == 0`.
          branches: names the branches of a conditional that count as run, once each; None: all of them.
          start: the computation that is run; None: the program's.

        Raises:
          HloError: the trip count of a loop cannot be determined, and `unknown` is None.
        """

        def walk(inside: Computation, at: Executed) -> Iterator[Executed]:
            """Yields the instructions of a computation; `at` has how often it runs, and in which loops."""
            for instruction in inside.instructions:
                here = dataclasses.replace(at, instruction=instruction, computation=inside)
                yield here
                if instruction.opcode == "while":
                    trips = 1 if once else self._trips(inside, instruction, unknown)
                    body = self.computation(instruction.attribute("body"))
                    condition = self.computation(instruction.attribute("condition"))
                    tests = here.times * (1 if once else trips + 1)
                    yield from walk(condition, dataclasses.replace(here, times=tests))
                    trip = dataclasses.replace(
                        here,
                        times=here.times * trips,
                        in_backward_loop=here.in_backward_loop or is_backward(instruction, body),
                        loops=(*here.loops, instruction.name),
                    )
                    yield from walk(body, trip)
                elif instruction.opcode in ("call", "conditional", "async-start"):
                    called: Sequence[str] = instruction.called
                    if branches is not None and instruction.opcode == "conditional":
                        called = branches(instruction)
                    for name in called:
                        yield from walk(self.computation(name), here)

        inside = start or self.entry
        yield from walk(inside, Executed(_NOTHING, inside, 1, False))

    def _trips(self, inside: Computation, loop: Instruction, unknown: int | None) -> int:
        try:
            return loops.trip_count(self.computation, inside, loop)
        except HloError:
            if unknown is not None:
                return unknown
            expected = loops.expected_trips(loop)
            if expected is None:
                raise
            return expected

    def computation(self, name: str) -> Computation:
        """Returns the computation called `name`, given with or without its percent sign.

        Raises:
          HloError: there is none.
        """
        computation = self.computations.get(name.lstrip("%"))
        if computation is None:
            raise HloError(f"module {self.name} calls {name!r}, which its text does not contain")
        return computation


def is_backward(loop: Instruction, body: Computation) -> bool:
    """Whether a loop's body computes gradients, so that forward names in it are recomputations.

    The loop over micro-batches is none: its body is a whole step, with a forward and a backward pass. Nor is a
    pipeline's loop whose ticks have a forward pass.
    """
    if _MICRO_BATCHES.search(loop.op_name):
        return False
    ticks = pipelines.pipeline_loop(loop.op_name)
    if ticks is not None and any(work.kind == pipelines.FORWARD for work in ticks.works):
        return False
    return any(GRADIENT in instruction.op_name for instruction in body.instructions)


def parse_module(text: str) -> Module:
    """Parses a module's text as `HloModule::ToString` prints it, scheduled or not.

    Raises:
      HloError: the text is not a module's, or a line of it cannot be read.
    """
    lines = _GOES_ON.sub("", text).splitlines()
    if not lines or not lines[0].startswith("HloModule "):
        first = lines[0][:60] if lines else ""
        raise HloError(
            f"not the text of a compiled program: it starts with {first!r}, not HloModule"
        )
    name, _, attributes = lines[0][len("HloModule ") :].partition(",")
    computations: dict[str, Computation] = {}
    entry = None
    current: Computation | None = None
    for number, line in enumerate(lines[1:], 2):
        if current is None:
            header = _COMPUTATION.match(line)
            if header:
                current = Computation(header[2])
                computations[current.name] = current
                entry = current if header[1] else entry
        elif line.startswith("}"):
            current = None
        elif line.strip():
            try:
                current.instructions.append(parse_instruction(line.strip()))
            except (ValueError, IndexError) as error:
                raise HloError(
                    f"line {number} is not an instruction: {line.strip()[:120]!r}"
                ) from error
    if entry is None:
        raise HloError(f"module {name} has no ENTRY computation: is its text cut off?")
    return Module(name.strip(), entry, computations, attributes.strip())


def parse_instruction(line: str) -> Instruction:
    """Parses one line of a computation, without its indentation; ValueError or IndexError if it is none."""
    is_root = line.startswith("ROOT ")
    name, equals, rest = (line[5:] if is_root else line).partition(" = ")
    if not equals:
        raise ValueError(line)
    shape = balanced(rest, 0)
    rest = rest[len(shape) :].lstrip()
    opcode, parenthesis, _ = rest.partition("(")
    if not parenthesis or " " in opcode:
        raise ValueError(line)
    inner = balanced(rest, len(opcode))
    attributes = rest[len(opcode) + len(inner) :]
    inner = inner[1:-1]
    is_leaf = opcode in ("constant", "parameter")
    op_name = _OP_NAME.search(attributes)
    return Instruction(
        name=name.lstrip("%"),
        opcode=opcode,
        arrays=parse_shape(shape),
        operands=() if is_leaf else _operand_names(inner),
        op_name=op_name[1] if op_name else "",
        called=_called(attributes),
        attributes=attributes,
        literal=inner if is_leaf else "",
        is_root=is_root,
    )


def _operand_names(text: str) -> tuple[str, ...]:
    if "(" in text:  # Operands are printed with their types, and some are tuples.
        return tuple(re.findall(r"%([^\s,()]+)", text))
    pieces = re.sub(r"\[[^\]]*\]|\{[^}]*\}", "", _MARK.sub("", text)).split(",")
    return tuple(piece.split()[-1].lstrip("%") for piece in pieces if piece.strip())


def _called(attributes: str) -> tuple[str, ...]:
    names: list[str] = []
    for several, one in _CALLED.findall(attributes.partition(", metadata=")[0]):
        names += [n.strip().lstrip("%") for n in (several or one).split(",")]
    return tuple(name for name in names if name)


def parse_shape(text: str) -> tuple[Array, ...]:
    """Parses a printed shape, with tuples flattened: `(f32[8]{0}, /*index=1*/s32[])` gives two arrays."""
    return tuple(_array(*match) for match in _ARRAY.findall(text))


@functools.cache
def _array(dtype: str, dims_text: str, layout: str) -> Array:
    dims = tuple(int(d.strip().lstrip("<=")) for d in dims_text.split(",") if d.strip())
    bits = 8 if dtype == "pred" else int(match[1]) if (match := _BITS.match(dtype)) else 0
    order, _, tiling = layout.partition(":")
    minor_to_major = [int(d) for d in order.split(",") if d.strip().isdigit()]
    physical = [dims[d] for d in reversed(minor_to_major)] if minor_to_major else list(dims)
    space, padded_bits = 0, bits
    for kind, value, element_bits in _TILE.findall(tiling):
        if kind == "S":
            space = int(value)
        elif kind == "T":
            physical = _tile(physical, value)
        elif element_bits:
            padded_bits = int(element_bits)
    num_bytes = -(-math.prod(dims) * bits // 8)
    return Array(dtype, dims, num_bytes, -(-math.prod(physical) * padded_bits // 8), space)


def _tile(dims: list[int], text: str) -> list[int]:
    """Pads dimensions (major first) to tiles: `[5,200]` with tile "8,128" becomes `[1,2,8,128]`.

    A `*` in the tile merges a dimension with the next more minor one.
    """
    tile = [piece.strip() for piece in text.split(",")]
    dims = [1] * (len(tile) - len(dims)) + dims
    outside, tiled = dims[: len(dims) - len(tile)], dims[len(dims) - len(tile) :]
    sizes: list[int] = []
    outer: list[int] = []
    pending = 1
    for dim, piece in zip(tiled, tile, strict=True):
        if piece == "*":
            pending *= dim
            continue
        size = int(piece)
        outer.append(-(-dim * pending // size))
        sizes.append(size)
        pending = 1
    return outside + outer + sizes
