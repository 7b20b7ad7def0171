"""Reads the names of machines: 'v3:32x32' is a TPU slice of 32x32 chips, 'h100:32x8' a cluster of 32 nodes of 8 GPUs.

'v5p:4x4x4*2' are two TPU slices, joined by the data-centre network.

Engine and planner both take such names, and do not import each other. Each knows which machines exist for it, and says
itself what is wrong with a name.
"""

import re
from dataclasses import dataclass, replace
from typing import Self

_SIZE = r"[1-9]\d{0,5}"
_SIZES = re.compile(rf"{_SIZE}(?:x{_SIZE})*")
_TPU = re.compile(r"(?:(?:tpu|v)\d{1,2}[a-z]?)?")


@dataclass(frozen=True)
class TopologyName:
    """The parts of a machine's name. The machine need not exist."""

    kind: str  # what precedes the colon, a TPU generation or a GPU card, e.g. 'v3' or 'h100'
    # Of a slice, its chips in each dimension; of a cluster, its nodes and the GPUs of a node. Empty where they are
    # missing or unreadable.
    sizes: tuple[int, ...]
    # The number of equal TPU slices, after the '*'; 1 without it; 0 where it is unreadable.
    slices: int = 1

    @classmethod
    def parse(cls, text: str) -> Self:
        """Takes a name apart, without the spaces around it. Every text has parts."""
        machine, star, slices = text.strip().partition("*")
        kind, _, sizes = machine.partition(":")
        readable = _SIZES.fullmatch(sizes)
        return cls(
            kind,
            tuple(map(int, sizes.split("x"))) if readable else (),
            (int(slices) if re.fullmatch(_SIZE, slices) else 0) if star else 1,
        )

    @property
    def one_slice(self) -> Self:
        """The name of one of its slices."""
        return replace(self, slices=1)

    @property
    def is_tpu(self) -> bool:
        """Whether the kind is written like a TPU generation, or is missing. Other kinds are GPU cards."""
        return _TPU.fullmatch(self.kind) is not None

    def __str__(self) -> str:
        """The name, e.g. 'v3:32x32' or 'v5p:4x4x4*2'."""
        several = f"*{self.slices}" if self.slices > 1 else ""
        return f"{self.kind}:{'x'.join(map(str, self.sizes))}{several}"
