"""The endless order in which pairs are drawn: languages by temperature, each language shuffled again every epoch.

The order is a pure function of (seed, weights, sizes). It is made in blocks. A position consists of the block, the
index in it, and the number of earlier pairs of each language: a few hundred bytes for any corpus.

A language of many shards is not drawn from all of them at once, since then all would have to be open: an epoch goes
through the shards in a new order and shuffles the pairs of WINDOW shards at a time.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lingvo_moe.core.input.permutation import permute
from lingvo_moe.tasks.mt.input.mixing import draw_languages, temperature_weights

_BLOCK = 4096
# Shards of a language that are drawn from at once; up to so many, every epoch shuffles all its pairs.
WINDOW = 4


class PairOrder:
    """An endless iterator over `(language index, position)`."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        temperature: float,
        seed: int,
        shards: Mapping[str, Sequence[int]] | None = None,
    ):
        """Starts at the beginning.

        Args:
            sizes: the number of pairs by language; indices follow its order.
            shards: the number of pairs in each shard, by language; None for one shard a language.
        """
        self._names = list(sizes)
        shards = shards or {name: [size] for name, size in sizes.items()}
        self._shards = [np.array(shards[name], np.int64) for name in self._names]
        self._sizes = [sizes[name] for name in self._names]
        weights = temperature_weights(sizes, temperature)
        self._weights = np.array([weights[name] for name in self._names])
        self._seed = seed
        self._block = 0
        self._place = 0
        self._before = [0] * len(self._sizes)  # pairs of each language before this block
        self._drawn: list[tuple[int, int]] = []
        self._after: list[int] = []
        self._draw()

    def __iter__(self) -> "PairOrder":
        return self

    def __next__(self) -> tuple[int, int]:
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
        self._draw()

    def _draw(self) -> None:
        languages = draw_languages(self._weights, self._seed, self._block, _BLOCK)
        positions = np.empty(_BLOCK, np.int64)
        self._after = list(self._before)
        for lang in np.unique(languages):
            places = np.flatnonzero(languages == lang)
            start, n = self._before[lang], self._sizes[lang]
            self._after[lang] = start + places.size
            epoch, within = np.divmod(np.arange(start, start + places.size), n)
            for e in np.unique(epoch):
                now = epoch == e
                key = (self._seed, self._names[lang], int(e))
                positions[places[now]] = shuffled(within[now], self._shards[lang], *key)
        self._drawn = list(zip(languages.tolist(), positions.tolist()))


def shuffled(within: np.ndarray, shards: np.ndarray, *key: int | str) -> np.ndarray:
    """Positions of the pairs at the indices `within` of an epoch.

    Args:
        within: int64 [N], indices in the epoch, from 0 to below the number of pairs.
        shards: int64 [S], the number of pairs of each shard, in the order of their positions.
        key: names the epoch.

    Returns:
        int64 [N]. Over a complete epoch each position occurs once.
    """
    if len(shards) <= WINDOW:
        return permute(within, int(shards.sum()), *key)
    order = _epoch_order(len(shards), *key)
    sizes = shards[order]
    starts = (np.cumsum(shards) - shards)[
        order
    ]  # first position of each shard, in the epoch's order
    ends = np.cumsum(sizes)
    last_of_window = np.minimum(
        np.arange(WINDOW - 1, len(ends) + WINDOW - 1, WINDOW), len(ends) - 1
    )
    windows = np.searchsorted(ends[last_of_window], within, side="right")
    positions = np.empty_like(within)
    for window in np.unique(windows):
        now = windows == window
        mine = slice(window * WINDOW, last_of_window[window] + 1)
        begin, inside = ends[mine] - sizes[mine], within[now]
        places = permute(inside - begin[0], int(sizes[mine].sum()), *key, int(window)) + begin[0]
        shard = np.searchsorted(ends[mine], places, side="right")
        positions[now] = starts[mine][shard] + places - begin[shard]
    return positions


@functools.lru_cache(maxsize=256)
def _epoch_order(shards: int, *key: int | str) -> np.ndarray:
    """The order of the shards in an epoch, int64 [shards]."""
    return permute(np.arange(shards), shards, "shards", *key)
