"""The endless order in which pairs are drawn: languages by temperature, each language shuffled anew every epoch.

The order is a pure function of (seed, weights, sizes). It is made in blocks; where it stands is told by the block, the
place in it, and how many pairs of each language came before the block: a few hundred bytes, whatever the corpus.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from lingvo_moe.tasks.mt.input.mixing import draw_languages, temperature_weights
from lingvo_moe.tasks.mt.input.permutation import permute

_BLOCK = 4096


class PairOrder:
    """An endless iterator over `(language index, position)`."""

    def __init__(self, sizes: Mapping[str, int], temperature: float, seed: int):
        """Starts at the beginning.

        Args:
            sizes: the number of pairs by language; indices follow its order.
            temperature: see mixing.
            seed: of everything drawn.
        """
        self._names = list(sizes)
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
        """Where the order stands, as JSON can hold it."""
        return {"block": self._block, "place": self._place, "before": list(self._before)}

    def SetState(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state of an order with the same sizes, temperature and seed."""
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
                positions[places[now]] = permute(within[now], n, *key)
        self._drawn = list(zip(languages.tolist(), positions.tolist()))
