"""Lengths of pairs in tokens: percentiles, the pairs that do not fit into a row, and row lengths that keep nearly all.

A row holds a pair if it has a position for each of its ids and one more, for eos or bos.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from lingvo_moe.tasks.text.batches.records import Records

# A greater loss is worth a warning, which names row lengths that keep this share.
KEPT = 0.99
NAMES = ("input.source_length", "input.target_length")
PERCENTILES = (50, 90, 95, 99, 100)
_MOST_READ = 500_000  # pairs, which memory holds


@dataclass(frozen=True)
class Loss:
    """The pairs that rows do not hold."""

    share: float  # the share of all pairs
    # `worst`, `worst_share`: the language that loses the largest share of its pairs, and that share.
    worst: str
    worst_share: float
    rows: tuple[int, ...]  # the source and target lengths, or that of the target alone
    enough: tuple[int, ...]  # no smaller ones, which hold KEPT of the pairs
    names: tuple[str, ...]  # the parameters of these lengths

    @property
    def matters(self) -> bool:
        """Whether it is worth a warning."""
        return self.share > 1 - KEPT

    @property
    def settings(self) -> str:
        """The override with which rows hold KEPT of the pairs."""
        changed = zip(self.names, self.rows, self.enough)
        return ";".join(f"{name}={more}" for name, n, more in changed if more != n)

    def __str__(self) -> str:
        """The share, the parameters, and the values that would keep nearly all, as the trainer takes them."""
        current = ", ".join(f"{name}={n}" for name, n in zip(self.names, self.rows))
        return (
            f"{self.share:.1%} of the {'pairs' if len(self.rows) > 1 else 'texts'} are longer than a row ({current}), "
            f"{self.worst_share:.1%} of {self.worst}: "
            f"--model_params_override='{self.settings}' keeps {KEPT:.0%}, for longer steps and more memory"
        )


@dataclass(frozen=True)
class Lengths:
    """The positions that pairs need in a row."""

    # int32 [2, N] by language, for source and target; or [1, N], for rows that hold the target alone
    by_lang: Mapping[str, np.ndarray]
    pairs: int  # all pairs. Of more than some 500,000, `by_lang` is a sample

    @property
    def all(self) -> np.ndarray:
        """int32 [2 or 1, N], those of all languages."""
        return np.concatenate(list(self.by_lang.values()), axis=1)

    @property
    def is_sample(self) -> bool:
        """Whether shares of pairs are estimates."""
        return self.all.shape[1] < self.pairs

    def LastSides(self, number: int) -> "Lengths":
        """The lengths of the last sides: of both for 2, of the target alone for 1."""
        return Lengths(
            {lang: needed[-number:] for lang, needed in self.by_lang.items()}, self.pairs
        )

    def Percentiles(self) -> dict[str, list[int]]:
        """PERCENTILES of each side; the last is the longest."""
        sides = np.percentile(self.all, PERCENTILES, axis=1, method="inverted_cdf").astype(int).T
        return dict(zip(("source", "target")[-len(sides) :], sides.tolist()))

    def Loss(self, rows: tuple[int, ...]) -> "Loss":
        """The pairs too long for rows of a source and a target length; or of a target length, without a source."""
        lengths = self.LastSides(len(rows))
        shares = {lang: _too_long(needed, rows) for lang, needed in lengths.by_lang.items()}
        worst = max(shares, key=lambda lang: shares[lang])
        share, enough = _too_long(lengths.all, rows), lengths.RowLengths(least=rows)
        return Loss(share, worst, shares[worst], rows, enough, NAMES[-len(rows) :])

    def RowLengths(self, least: tuple[int, ...] = (), share: float = KEPT) -> tuple[int, ...]:
        """The length of each side of the shortest rows, in sum, that hold a share of the pairs.

        No length is below its own of `least`, 1 by default; others are round numbers.
        """
        needed = self.all
        choices = [
            np.array([low, *_round_numbers(low, int(most))])
            for low, most in zip(least or (1,) * len(needed), needed.max(axis=1))
        ]
        fits = np.zeros([len(lengths) for lengths in choices], np.int64)
        at = (np.searchsorted(lengths, side) for lengths, side in zip(choices, needed))
        np.add.at(fits, tuple(at), 1)
        for axis in range(fits.ndim):
            fits = fits.cumsum(axis)
        sums = np.where(
            fits >= share * needed.shape[1], sum(np.ix_(*choices)), np.iinfo(np.int64).max
        )
        best = np.unravel_index(sums.argmin(), sums.shape)
        return tuple(int(lengths[i]) for lengths, i in zip(choices, best))


def measure(records: Records, most: int = _MOST_READ) -> Lengths:
    """The lengths of all pairs, or of an even sample of about `most`. Raises DataError: as Records.Lengths."""
    pairs = sum(records.languages.values())
    every = -(-pairs // most)
    sampled = ((lang, records.Lengths(i)[::every]) for i, lang in enumerate(records.languages))
    return Lengths({lang: lengths.T.astype(np.int32) + 1 for lang, lengths in sampled}, pairs)


def _too_long(needed: np.ndarray, rows: tuple[int, ...]) -> float:
    return float(np.mean((needed > np.array(rows)[:, None]).any(axis=0)))


def _round_numbers(above: int, most: int) -> Iterator[int]:
    """8, 16, ..., 64, then four in each doubling: those above a number, up to the first that is at least `most`."""
    length = 8
    while above < most:
        if length > above:
            yield length
        if length >= most:
            return
        length += max(8, 1 << (length.bit_length() - 3))
