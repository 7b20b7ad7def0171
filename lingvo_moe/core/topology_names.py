"""Reads the names of machines: 'v3:32x32' is a TPU slice of 32x32 chips, 'h100:32x8' a cluster of 32 nodes of 8 GPUs.

Engine and planner both take such names, and do not import each other. Each knows which machines exist for it, and says
itself what is wrong with a name.
"""

import re
from dataclasses import dataclass
from typing import Self

_SIZE = r"[1-9]\d{0,5}"
_SIZES = re.compile(rf"{_SIZE}(?:x{_SIZE})*")
_TPU = re.compile(r"(?:v\d{1,2}[a-z]?)?")


@dataclass(frozen=True)
class TopologyName:
    """The parts of a machine's name. The machine need not exist.

    Attributes:
        kind: what precedes the colon, a TPU generation or a GPU card, e.g. 'v3' or 'h100'.
        sizes: of a slice, its chips in each dimension; of a cluster, its nodes and the GPUs of a node. Empty where they
            are missing or unreadable.
    """

    kind: str
    sizes: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Takes a name apart, without the spaces around it. Every text has parts."""
        kind, _, sizes = text.strip().partition(":")
        readable = _SIZES.fullmatch(sizes)
        return cls(kind, tuple(map(int, sizes.split("x"))) if readable else ())

    @property
    def is_tpu(self) -> bool:
        """Whether the kind is written like a TPU generation, or is missing. Other kinds are GPU cards."""
        return _TPU.fullmatch(self.kind) is not None

    def __str__(self) -> str:
        """The name, e.g. 'v3:32x32'."""
        return f"{self.kind}:{'x'.join(map(str, self.sizes))}"
