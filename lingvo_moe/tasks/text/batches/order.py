"""The endless order in which pairs are drawn: languages by temperature, each language shuffled again every epoch.

The order is a pure function of (seed, weights, sizes). It is made in blocks. A position consists of the block, the
index in it, and the number of earlier pairs of each language: a few hundred bytes for any corpus.

A language of many shards is not drawn from all of them at once, since then all would have to be open: an epoch goes
through the shards in a new order and shuffles the pairs of WINDOW shards at a time.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lingvo_moe.core.input.permutation import Key, permute, permute_each
from lingvo_moe.tasks.text.data.mixing import draw_languages, given_weights, temperature_weights

_BLOCK = 4096
# Shards of a language that are drawn from at once; up to so many, every epoch shuffles all its pairs.
WINDOW = 4


class PairOrder:
    """An endless iterator over `(language index, position, *about)`; see `about` below."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        temperature: float,
        seed: int,
        shards: Mapping[str, Sequence[int]] | None = None,
        about: Callable[[int, np.ndarray], np.ndarray] | None = None,
        weights: Mapping[str, float] | None = None,
    ):
        """Starts at the beginning.

        Args:
            sizes: the number of pairs by language; indices follow its order.
            shards: the number of pairs in each shard, by language; None for one shard a language.
            about: gives numbers about pairs, int [N, K], from the index of their language and their positions [N];
                looked up for many pairs at once.
            weights: by which languages are drawn, by name, in place of the temperature; none: by temperature.
        """
        self._names = list(sizes)
        shards = shards or {name: [size] for name, size in sizes.items()}
        self._shards = [np.array(shards[name], np.int64) for name in self._names]
        self._sizes = [sizes[name] for name in self._names]
        shares = (
            given_weights(sizes, weights) if weights else temperature_weights(sizes, temperature)
        )
        self._weights = np.array([shares[name] for name in self._names])
        self._seed, self._about = seed, about
        self._block = 0
        self._place = 0
        self._before = [0] * len(self._sizes)  # pairs of each language before this block
        self._drawn: list[tuple[int, ...]] = []  # this block; empty until it is needed
        self._after: list[int] = []

    def __iter__(self) -> "PairOrder":
        return self

    def __next__(self) -> tuple[int, ...]:
        if not self._drawn:
            self._draw()
        if self._place == len(self._drawn):
            self._block, self._place, self._before = self._block + 1, 0, self._after
            self._draw()
        self._place += 1
        return self._drawn[self._place - 1]

    def GetState(self) -> dict[str, Any]:
        """The position in the order, for JSON."""
        return {"block": self._block, "place": self._place, "before": list(self._before)}

    def SetState(self, state: Mapping[str, Any]) -> None:
        """Continues from a state of an order with the same sizes, temperature and seed."""
        self._block, self._place = state["block"], state["place"]
        self._before = list(state["before"])
        self._drawn = []

    def _draw(self) -> None:
        languages = draw_languages(self._weights, self._seed, self._block, _BLOCK)
        counts = np.bincount(languages, minlength=len(self._sizes))
        self._after = list(self._before)
        epochs: list[Epoch] = []
        for lang in np.flatnonzero(counts).tolist():
            start, size = self._before[lang], self._sizes[lang]
            self._after[lang] = start + int(counts[lang])
            while start < self._after[lang]:
                epoch, first = divmod(start, size)
                within = np.arange(first, min(first + self._after[lang] - start, size))
                epochs.append((within, self._shards[lang], (self._seed, self._names[lang], epoch)))
                start += len(within)
        by_language = np.argsort(languages, kind="stable")
        positions = np.empty(_BLOCK, np.int64)
        positions[by_language] = np.concatenate(shuffled(epochs))
        fields = [languages, positions]
        if self._about is not None:
            draws = np.split(by_language, np.cumsum(counts)[:-1])
            facts = [self._about(lang, positions[n]) for lang, n in enumerate(draws) if n.size]
            about = np.empty((_BLOCK, facts[0].shape[1]), np.int64)
            about[by_language] = np.concatenate(facts)
            fields += [*about.T]
        self._drawn = list(zip(*(field.tolist() for field in fields)))


# Ascending indices in an epoch, int64 [N], below its number of pairs; the number of pairs of each shard, int64 [S], in
# the order of their positions; what names the epoch.
Epoch = tuple[np.ndarray, np.ndarray, Key]


def shuffled(epochs: Sequence[Epoch]) -> list[np.ndarray]:
    """Positions of the pairs at some indices of each epoch, int64 [N]. A complete epoch has every position once."""
    windows = [list(_windows(*epoch)) for epoch in epochs]
    indices, sizes, keys = zip(*((w.indices, w.size, w.key) for parts in windows for w in parts))
    permuted = iter(permute_each(indices, sizes, keys))
    return [np.concatenate([w.Positions(next(permuted)) for w in parts]) for parts in windows]


class _Window(NamedTuple):
    """Indices of an epoch that fall into shards whose pairs are shuffled together."""

    indices: np.ndarray  # int64 [N], from the window's first pair on
    size: int  # pairs of its shards
    key: Key
    # `begins`, `starts`: of each shard the first index in the window, and the first position.
    begins: np.ndarray
    starts: np.ndarray

    def Positions(self, permuted: np.ndarray) -> np.ndarray:
        shard = np.searchsorted(self.begins, permuted, side="right") - 1
        return self.starts[shard] + permuted - self.begins[shard]


def _windows(within: np.ndarray, shards: np.ndarray, key: Key) -> Iterator[_Window]:
    """The windows that some indices of an epoch fall into, in order."""
    if len(shards) <= WINDOW:
        first = np.zeros(1, np.int64)
        yield _Window(within, int(shards.sum()), key, first, first)
        return
    order = _epoch_order(len(shards), *key)
    starts, sizes = (np.cumsum(shards) - shards)[order], shards[order]
    begins = np.cumsum(sizes) - sizes
    windows = np.searchsorted(begins[::WINDOW], within, side="right") - 1
    for window in np.unique(windows).tolist():
        mine = slice(window * WINDOW, (window + 1) * WINDOW)
        first = begins[mine][0]
        index = within[windows == window] - first
        size = int(sizes[mine].sum())
        yield _Window(index, size, (*key, window), begins[mine] - first, starts[mine])


@functools.lru_cache(maxsize=256)
def _epoch_order(shards: int, *key: int | str) -> np.ndarray:
    """The order of the shards in an epoch, int64 [shards]."""
    return permute(np.arange(shards), shards, "shards", *key)
