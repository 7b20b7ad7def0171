"""Parses an instruction's attributes: windows, dimension labels, estimated cycles."""

import dataclasses
import functools
import re

from lingvo_moe.analysis.programs.hlo.instructions import HloError, Instruction

_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')


@dataclasses.dataclass(frozen=True)
class WindowDim:
    """One spatial dimension of a convolution's window, as XLA defines it."""

    size: int
    stride: int = 1
    pad_low: int = 0
    lhs_dilate: int = 1
    rhs_dilate: int = 1


@functools.cache
def valid_positions(window: WindowDim, input_size: int, output_size: int) -> int:
    """Counts the (kernel, output) positions that meet an input element, not padding or a hole."""
    count = 0
    for kernel in range(window.size):
        offset = kernel * window.rhs_dilate - window.pad_low
        for output in range(output_size):
            place, hole = divmod(output * window.stride + offset, window.lhs_dilate)
            count += not hole and 0 <= place < input_size
    return count


def window(instruction: Instruction) -> tuple[WindowDim, ...]:
    """Parses `window={size=1x16 pad=0_0x15_15 ..}`; () without the attribute."""
    text = instruction.attribute("window").strip("{}")
    fields = dict(field.split("=", 1) for field in text.split())
    if "size" not in fields:
        return ()
    sizes = [int(size) for size in fields["size"].split("x")]

    def each(key: str, default: int) -> list[int]:
        if key not in fields:
            return [default] * len(sizes)
        return [int(value.split("_")[0]) for value in fields[key].split("x")]

    columns = (each("stride", 1), each("pad", 0), each("lhs_dilate", 1), each("rhs_dilate", 1))
    return tuple(WindowDim(*row) for row in zip(sizes, *columns, strict=True))


@dataclasses.dataclass(frozen=True)
class ConvolutionDims:
    """Parsed `dim_labels=0bf1_i1o0->0b1f`: for both operands and the output, label to dimension."""

    lhs: dict[str, int]
    rhs: dict[str, int]
    output: dict[str, int]


def convolution_dims(instruction: Instruction) -> ConvolutionDims:
    """Parses a convolution's `dim_labels`.

    Raises:
      HloError: the attribute is missing or malformed.
    """
    inputs, _, output = instruction.attribute("dim_labels").partition("->")
    lhs, _, rhs = inputs.partition("_")
    if not (lhs and rhs and output):
        raise HloError(f"convolution {instruction.name} has no dim_labels like bf_io->bf")
    tables = [{label: place for place, label in enumerate(text)} for text in (lhs, rhs, output)]
    return ConvolutionDims(*tables)


def dims_list(instruction: Instruction, key: str) -> tuple[int, ...]:
    """Parses `key={0,2}` into (0, 2); () without the attribute."""
    return tuple(int(d) for d in re.findall(r"\d+", instruction.attribute(key)))


def estimated_cycles(instruction: Instruction) -> int:
    """The compiler's own estimate of one execution, in clock cycles; 0 without an estimate."""
    match = _CYCLES.search(instruction.attributes)
    return int(match[1]) if match else 0
