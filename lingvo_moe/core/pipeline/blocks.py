"""Divides the blocks of a stack into the parts that the stages of a pipeline work on.

Letters: L blocks, K stages, V repeats, P = K V parts, n blocks of the largest part.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class StageBlocks:
    """L blocks in P parts of consecutive blocks.

    All stages compute n blocks in a tick. A smaller part is padded, which changes nothing.
    """

    num: int  # L, at least P
    stages: int  # K
    repeats: int = 1  # V; part p is on stage p % K
    # Where the parts end, e.g. (2, 5) for 2 blocks and then 3. (): the sizes of parts differ by at most one, and the
    # first ones are larger.
    ends: tuple[int, ...] = ()

    @property
    def parts(self) -> int:
        """P."""
        return self.stages * self.repeats

    @property
    def largest(self) -> int:
        """n."""
        return int(self.counts.max())

    @property
    def equal(self) -> bool:
        """Whether all parts have n blocks."""
        return self.parts * self.largest == self.num

    @property
    def num_largest(self) -> int:
        """The number of parts, the first ones, that have n blocks, where `ends` is ()."""
        return self.num % self.parts or self.parts

    @property
    def counts(self) -> np.ndarray:
        """The number of blocks of each part, int32 [P]."""
        if self.ends:
            return np.diff(self.ends, prepend=0).astype(np.int32)
        short = np.arange(self.parts) >= self.num_largest
        return -(-self.num // self.parts) - short.astype(np.int32)

    @property
    def firsts(self) -> np.ndarray:
        """The number of each part's first block, int32 [P]."""
        return (np.cumsum(self.counts) - self.counts).astype(np.int32)


def padding(stacks: Sequence[StageBlocks]) -> float:
    """The share of the blocks that the stages compute that is padding."""
    computed = sum(blocks.parts * blocks.largest for blocks in stacks)
    real = sum(blocks.num for blocks in stacks)
    return (computed - real) / computed if computed else 0.0


def describe_padding(
    stacks: Sequence[tuple[str, int]], stages: int, repeats: int, ends: tuple[int, ...] = ()
) -> str:
    """Says what is padding, e.g. '2 stages of 5 blocks have the 9 blocks of the encoder: 10% of their work is padding'.

    Returns:
        The sentence without a full stop; empty if nothing is padding.
    """
    uneven = [(name, StageBlocks(num, stages, repeats, ends)) for name, num in stacks]
    uneven = [(name, blocks) for name, blocks in uneven if not blocks.equal]
    if not uneven:
        return ""
    times = f" {repeats} x" if repeats > 1 else ""
    listed = ", ".join(
        f"{stages} stages of{times} {blocks.largest} blocks have the {blocks.num} blocks of the {name}"
        for name, blocks in uneven
    )
    share = padding([StageBlocks(num, stages, repeats, ends) for _, num in stacks])
    return f"{listed}: {100 * share:.3g}% of the stages' blocks are padding"
