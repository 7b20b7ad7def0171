"""Reads transfers between TPU slices from a compiled program.

Slices are joined by the data-centre network. The TPU compiler splits a collective whose devices lie in several slices
into a part inside each slice, and a `send` with its `recv`, which the hosts carry out (XLA calls their runtime
Megascale). The attributes of both say what is done between the slices:

    _xla_megascale_transfer_type="ALL_REDUCE", _xla_megascale_target="{1,2}x{0:3}"

A target lists groups of devices, `{{100000,200000},{100001,200001}}`, or pairs, `{{100000->200000}}`. Device 200003 is
device 3 of the second slice. `{1,2}x{0:3}` is short for a group for each of the devices 0 to 3, with that device of
slices 1 and 2.
"""

import functools
import re

from lingvo_moe.analysis.programs.hlo.instructions import HloError, Instruction

_KINDS = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
_TYPE = re.compile(r'_xla_megascale_transfer_type="([^"]*)"')
_TARGET = re.compile(r'_xla_megascale_target=(?:"([^"]*)"|(\{\{.*?\}\}))')
_PRODUCT = re.compile(r"\{([\d,:]+)\}x\{([\d,:]+)\}$")
_GROUP = re.compile(r"\{(\d+(?:(?:,|->)\d+)*)\}")
_SLICE = 100_000  # device ids: the slice, counted from 1, times this, plus the device's number in its slice


def transfer_kind(instruction: Instruction) -> str | None:
    """The kind of collective that a `send` carries out between slices; None for any other instruction.

    Raises HloError: an unknown type of transfer.
    """
    if instruction.opcode != "send":
        return None
    match = _TYPE.search(instruction.attributes)
    if match is None:
        return None
    if match[1] not in _KINDS:
        raise HloError(
            f"send {instruction.name}: unknown type of transfer between slices {match[1]!r}; known are"
            f" {', '.join(_KINDS)}"
        )
    return _KINDS[match[1]]


def transfer_groups(
    instruction: Instruction, devices_per_slice: int
) -> tuple[tuple[int, ...], ...]:
    """The devices of each group of a transfer, or each (source, target) pair, numbered over all slices.

    Args:
        devices_per_slice: device d of slice s, both counted from 0, is number s * devices_per_slice + d.

    Raises:
        HloError: the target cannot be read.
    """
    match = _TARGET.search(instruction.attributes)
    groups = _groups(match[1] or match[2], devices_per_slice) if match else ()
    if not groups or len({len(group) for group in groups}) != 1:
        text = (match[0] if match else instruction.attributes)[:80]
        raise HloError(f"send {instruction.name}: cannot read the devices of {text}")
    return groups


@functools.lru_cache(maxsize=256)
def _groups(text: str, devices_per_slice: int) -> tuple[tuple[int, ...], ...]:
    def number(slice_: int, device: int) -> int:
        return (slice_ - 1) * devices_per_slice + device

    if product := _PRODUCT.match(text):
        slices, devices = _numbers(product[1]), _numbers(product[2])
        return tuple(tuple(number(s, d) for s in slices) for d in devices)
    ids = (map(int, re.split(",|->", group)) for group in _GROUP.findall(text))
    return tuple(tuple(number(*divmod(i, _SLICE)) for i in group) for group in ids)


def _numbers(text: str) -> list[int]:
    """Reads '1,2' and '0:3', which is 0 to 3."""
    numbers: list[int] = []
    for piece in text.split(","):
        first, _, last = piece.partition(":")
        numbers += range(int(first), int(last or first) + 1)
    return numbers
