"""Estimates translation probabilities of pieces by IBM model 1 (Brown et al. 1993, section 4.1), with EM.

t(e|f) is the probability that source piece f is translated by target piece e, under the assumption that each target
piece comes from some piece of its source, all equally likely. A round of EM distributes every target piece over the
pieces of its source in proportion to t, and sums the shares for each (f, e). EOS, which ends every source, is the
model's empty word.

Memory holds the pairs' ids, one number for each target token, the `keep` best e of each f, and the sums of one block of
source pieces over the complete target vocabulary. Blocks are processed one after another; they share only the sum of
each target token's shares, which is kept for the next round.

Letters: F source piece of a block, E target piece; token: a place in the joined targets; event: a source token beside
a token of its target.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_matrix, vstack

from lingvo_moe.core.input.base_input import Progress, quiet
from lingvo_moe.tasks.text.vocabulary.special_ids import EOS_ID

Ids = Sequence[int] | np.ndarray

_CELLS = 2**23  # of a block: F times E
_EVENTS = 2**21  # looked at at once


@dataclass(frozen=True)
class TokenPairs:
    """Tokenised pairs; the ids of all sources are one array, and so are those of all targets."""

    # `sources`, `targets`: int32 ids; a source ends in EOS, a target does not.
    sources: np.ndarray
    targets: np.ndarray
    # `source_starts`, `target_starts`: int64 [pairs + 1], where each begins, and the end of the last.
    source_starts: np.ndarray
    target_starts: np.ndarray

    @classmethod
    def Join(cls, sources: Sequence[Ids], targets: Sequence[Ids]) -> "TokenPairs":
        """Joins the ids of each source and each target, both without EOS; appends EOS to the sources."""
        ended = ((*ids, EOS_ID) for ids in sources)
        return cls(
            np.fromiter(itertools.chain.from_iterable(ended), np.int32),
            np.fromiter(itertools.chain.from_iterable(targets), np.int32),
            np.cumsum([0, *(len(ids) + 1 for ids in sources)]),
            np.cumsum([0, *map(len, targets)]),
        )


def lexical_table(
    pairs: TokenPairs,
    source_size: int,
    target_size: int,
    keep: int,
    rounds: int = 5,
    progress: Progress = quiet,
) -> csr_matrix:
    """Estimates model 1 from pairs.

    Args:
        keep: how many translations of a source piece are kept, between rounds and at the end.
        rounds: of EM, 1 or more.

    Returns:
        t(e|f), float32 [source pieces, target pieces], with the likeliest translations of each row first.
    """
    rows = _SourceTokens(pairs)
    # At first all shares are alike: of each target token, one over the length of its source.
    lengths = np.diff(pairs.source_starts)
    share_sums = np.repeat(lengths, np.diff(pairs.target_starts)).astype(np.float64)
    table = None
    for number in range(1, rounds + 1):
        blocks, next_sums = [], np.zeros_like(share_sums)
        for first, last in _blocks(source_size, target_size):
            progress(f"model 1, round {number} of {rounds}: {first:,} of {source_size:,} pieces")
            old_FE = None if table is None else table[first:last].toarray().ravel()
            sums_FE = _sums(rows, first, last, target_size, old_FE, share_sums)
            block = _best(sums_FE, keep)
            blocks.append(block)
            new_FE = block.toarray().ravel()
            for at, tokens in rows.Events(first, last, target_size):
                next_sums += np.bincount(tokens, new_FE[at], len(next_sums))
        table, share_sums = vstack(blocks, "csr"), next_sums
    assert table is not None
    return table


class _SourceTokens:
    """The source tokens in the order of their ids, each with the target that it stands beside."""

    def __init__(self, pairs: TokenPairs):
        order = np.argsort(pairs.sources, kind="stable")
        self._ids = pairs.sources[order]
        pair = np.searchsorted(pairs.source_starts, order, side="right") - 1
        self._begin = pairs.target_starts[pair]
        self._length = pairs.target_starts[pair + 1] - self._begin
        self._ends = np.cumsum(self._length)  # of each row's events, among all
        self._targets = pairs.targets

    def Events(
        self, first: int, last: int, target_size: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields the events of the source pieces from `first` to `last`, about _EVENTS at a time.

        Yields:
            For each event its index in an [F,E], flattened, int64, and its target token.
        """
        row, end = np.searchsorted(self._ids, [first, last])
        while row < end:
            before = self._ends[row - 1] if row else 0
            stop = max(np.searchsorted(self._ends, before + _EVENTS, side="right"), row + 1)
            some = slice(row, min(stop, end))
            length = self._length[some]
            begins = np.cumsum(length) - length
            tokens = np.repeat(self._begin[some] - begins, length) + np.arange(length.sum())
            offsets = (self._ids[some].astype(np.int64) - first) * target_size
            yield np.repeat(offsets, length) + self._targets[tokens], tokens
            row = some.stop


def _blocks(source_size: int, target_size: int) -> Iterator[tuple[int, int]]:
    size = max(_CELLS // target_size, 1)
    for first in range(0, source_size, size):
        yield first, min(first + size, source_size)


def _sums(
    rows: _SourceTokens,
    first: int,
    last: int,
    target_size: int,
    old_FE: np.ndarray | None,
    share_sums: np.ndarray,
) -> np.ndarray:
    """The E step for a block of source pieces: expected counts of each (source piece, target piece).

    Each target token is distributed over the pieces of its source in proportion to t(e|f).

    Args:
        first, last: the block's source pieces, `last` excluded.
        target_size: E.
        old_FE: t(e|f) of the last round for this block; None in the first round, where it is uniform.
        share_sums: for each target token, the sum of t(e|f) over the pieces of its source; in the first round the
            number of those pieces.

    Returns:
        float64 [F,E].
    """
    cells = (last - first) * target_size
    sums_FE = np.zeros(cells)
    for at, tokens in rows.Events(first, last, target_size):
        shares = 1.0 / np.maximum(share_sums[tokens], 1e-30)  # 0 where no piece kept the token
        if old_FE is not None:
            shares *= old_FE[at]
        sums_FE += np.bincount(at, shares, cells)
    return sums_FE.reshape(-1, target_size)


def _best(sums_FE: np.ndarray, keep: int) -> csr_matrix:
    """Keeps the `keep` largest of each row and normalises them to probabilities."""
    row, target = np.nonzero(sums_FE)
    sums = sums_FE[row, target]
    order = np.lexsort((target, -sums, row))
    row, target, sums = row[order], target[order], sums[order]
    starts = np.searchsorted(row, np.arange(len(sums_FE) + 1))
    among_best = np.arange(len(row)) - starts[row] < keep
    row, target, sums = row[among_best], target[among_best], sums[among_best]
    totals = np.bincount(row, sums, len(sums_FE))
    starts = np.searchsorted(row, np.arange(len(sums_FE) + 1))
    return csr_matrix(((sums / totals[row]).astype(np.float32), target, starts), sums_FE.shape)
