"""A running batch over a mesh: texts join and leave it between two blocks of tokens.

Letters: as in mesh_pages.py.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lingvo_moe.core.decode.pages import PAGE, PagePool
from lingvo_moe.core.decode.ranges import Sampling
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.lm.mesh_pages import BLOCK, MeshPages
from lingvo_moe.tasks.lm.saved_generator import SETTINGS
from lingvo_moe.tasks.text.decoding.text_batch import FILLED, RunningText, TextBatch

_SHORT = 32  # tokens of prompts that a program reads, where the first has no more; else FILLED
_SETTINGS = dict([*SETTINGS.items()][1:])  # without max_tokens
_SMALLEST_TABLE, _LARGER = 4, 4  # pages of a row's table, and how many times larger the next one is


class MeshBatch(TextBatch[RunningText]):
    """A batch over the devices of an engine.

    Args:
        programs: of the model.
        rows: the number of texts that run at a time, which divides over the devices.
        pages: of keys and values, of all texts together.
        longest: the largest number of pages of one text.
    """

    def __init__(self, programs: MeshPages, rows: int, pages: int, longest: int):
        self._programs, self._num_rows, self._most_pages = programs, rows, longest
        super().__init__(rows, self._Pools(pages // programs.parts))

    def Step(self) -> list[RunningText]:
        """See TextBatch. Where another batch has emptied the pages meanwhile, tokens are read again."""
        if self._turn != self._programs.turn:
            for text in reversed([*self.running]):
                self._SendBack(text)
            self._pools = self._Pools(self._pools[0].pages)
        return super().Step()

    def _Pools(self, pages: int) -> list[PagePool]:
        self._turn = self._programs.Empty(pages)
        return [PagePool(pages) for _ in range(self._programs.parts)]

    def _Longest(self, text: RunningText) -> int:
        return len(text.ids) - 1 + self._Most(text)

    def _Most(self, text: RunningText) -> int:
        """The number of tokens of a text that are drawn next at most."""
        return min(BLOCK, text.settings.max_tokens - len(text.log_probs))

    def _Width(self, tokens: int) -> int:
        return _SHORT if tokens <= _SHORT else FILLED

    def WarmUps(self) -> list[Callable[[], Any]]:
        """See TextBatch."""
        works: list[Callable[[], Any]] = []
        for table in self._TableSizes():
            read = [self._NoPlaces(width, table) for width in (_SHORT, FILLED)]
            works += [functools.partial(self._programs.Read, places) for places in read]
            works.append(functools.partial(self._programs.Block, self._NoRows(table)))
        return works

    def _Fill(self, parts: Sequence[tuple[RunningText, int]]) -> None:
        texts = [text for text, _ in parts]
        width = self._Width(max(until - text.filled for text, until in parts))
        places = self._NoPlaces(width, self._TableOf(texts))
        for row, (text, until) in zip(self._Numbers(texts, len(places.ids)), parts):
            at = np.arange(text.filled, until)
            places.pages[row, : len(text.pages)] = text.pages
            places.at[row] += text.filled
            places.ids[row, : at.size] = text.ids[text.filled : until]
            places.slots[row, : at.size] = places.pages[row, at // PAGE] * PAGE + at % PAGE
        self._programs.Read(places)

    def _Draw(self, texts: Sequence[RunningText]) -> None:
        rows = self._NoRows(self._TableOf(texts))
        numbers = self._Numbers(texts, len(rows.ids))
        for row, text in zip(numbers, texts):
            rows.pages[row, : len(text.pages)] = text.pages
            rows.before[row] = np.resize(text.ids, rows.before.shape[1])
            rows.ids[row], rows.at[row] = text.ids[-1], len(text.ids) - 1
            rows.left[row], rows.step[row] = self._Most(text), len(text.log_probs)
            for name, value in zip(_SETTINGS, text.settings.Values()[1:], strict=True):
                rows.settings[name][row] = value
        drawn = self._programs.Block(rows)
        if "experts" in drawn:
            self._Note(drawn.experts[:, numbers], self._programs.num_experts)
        for row, text in zip(numbers, texts):
            tokens = drawn.tokens[row, : rows.left[row]].tolist()
            for token, log_prob in zip(tokens, drawn.log_probs[row].tolist()):
                if not self._Add(text, token, log_prob):
                    break
            # The newest token has no keys and values, unless the text ended behind it.
            self._Filled(text, len(text.ids) - (text.reason != "stop"))

    def _NoPlaces(self, width: int, table: int) -> NestedMap:
        """The inputs of MeshPages.Read for rows of so many tokens and pages, of which none is anybody's."""
        rows = self._programs.RowsOf(FILLED // width)
        ids, slots = (np.zeros([rows, width], np.int32) for _ in range(2))
        at = np.tile(np.arange(width, dtype=np.int32), [rows, 1])
        return NestedMap(ids=ids, at=at, slots=slots, pages=np.zeros([rows, table], np.int32))

    def _NoRows(self, table: int) -> NestedMap:
        """The inputs of MeshPages.Block likewise."""
        rows = self._num_rows
        counts = {name: np.zeros([rows], np.int32) for name in ("ids", "at", "left", "step")}
        settings = NestedMap({
            name: np.array([value] * rows, spec.dtype.as_numpy_dtype)
            for (name, spec), value in zip(_SETTINGS.items(), Sampling().Values()[1:], strict=True)
        })  # fmt: skip
        pages, before = (np.zeros([rows, n], np.int32) for n in (table, table * PAGE))
        return NestedMap(counts, pages=pages, before=before, settings=settings)

    def _Numbers(self, texts: Sequence[RunningText], rows: int) -> list[int]:
        """The rows of texts, each among those of its part."""
        counts, numbers = [0] * len(self._pools), []
        for text in texts:
            numbers.append(text.part * (rows // len(counts)) + counts[text.part])
            counts[text.part] += 1
        return numbers

    def _TableOf(self, texts: Sequence[RunningText]) -> int:
        """The number of pages of a row's table that is enough for texts."""
        most = max(len(text.pages) for text in texts)
        return next(size for size in self._TableSizes() if size >= most)

    def _TableSizes(self) -> list[int]:
        sizes = [min(_SMALLEST_TABLE, self._most_pages)]
        while sizes[-1] < self._most_pages:
            sizes.append(min(sizes[-1] * _LARGER, self._most_pages))
        return sizes
