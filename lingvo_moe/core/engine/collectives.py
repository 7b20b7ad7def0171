"""Reads the collectives of a compiled program from its HLO text."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from lingvo_moe.core.hlo.megascale import count_transfers

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)

# `%name = type kind(`, where a start is the operation and its done only waits for it.
_OP = re.compile(
    r"^\s*(?:ROOT )?%?(?P<name>[\w.-]+) = (?P<type>\(.*?\)|\S+) (?P<kind>"
    + "|".join(sorted(KINDS, key=len, reverse=True))
    + r")(?P<start>-start)?\(",
    re.MULTILINE,
)
_ARRAY = re.compile(r"(?P<dtype>[a-z]+[0-9]*(?:e[0-9]+m[0-9]+\w*)?)\[(?P<dims>[0-9,]*)\]")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_BITS = re.compile(r"(?:bf|[a-z])(\d+)")


@dataclass(frozen=True)
class Collective:
    """One collective of a compiled program."""

    kind: str  # one of KINDS
    name: str  # the name of the HLO instruction
    # Dtype and dimensions of its results on one device, e.g. (('f32', (8, 16)),).
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    num_bytes: int  # bytes of these results. A loop's body is counted once
    op_name: str = ""  # the model's operation that it comes from, if XLA names it


def parse_collectives(hlo_text: str) -> list[Collective]:
    """All collectives of a compiled module, in order of appearance."""
    return list(_parse(hlo_text))


def count_collectives(hlo_text: str) -> dict[str, int]:
    """Kind -> number of operations, for the kinds that occur; transfers between TPU slices are such operations too."""
    counts = Counter(c.kind for c in _parse(hlo_text)) + count_transfers(hlo_text)
    return dict(sorted(counts.items()))


def _parse(text: str) -> Iterator[Collective]:
    for match in _OP.finditer(text):
        end = text.find("\n", match.end())
        line = text[match.start() : end if end >= 0 else None]
        arrays = [
            (a["dtype"], tuple(int(n) for n in a["dims"].split(",") if n))
            for a in _ARRAY.finditer(match["type"])
        ]
        if match["start"] and match["kind"] in ("all-gather", "collective-permute"):
            arrays = arrays[1:2]  # (operand, result, ...)
        op_name = _OP_NAME.search(line)
        yield Collective(
            kind=match["kind"],
            name=match["name"],
            shapes=tuple(arrays),
            num_bytes=sum(_num_bytes(dtype, dims) for dtype, dims in arrays),
            op_name=op_name.group(1) if op_name else "",
        )


def _num_bytes(dtype: str, dims: tuple[int, ...]) -> int:
    bits = 8 if dtype == "pred" else int(_BITS.match(dtype).group(1))  # type: ignore[union-attr]
    count = 1
    for n in dims:
        count *= n
    return -(-count * bits // 8)
