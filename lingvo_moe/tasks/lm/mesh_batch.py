"""A running batch over a mesh: texts join and leave it between two blocks of tokens.

Letters: as in mesh_pages.py.
"""

from collections.abc import Sequence

import numpy as np

from lingvo_moe.core.decode.pages import PAGE, PagePool
from lingvo_moe.core.decode.ranges import Sampling
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.lm.mesh_pages import BLOCK, MeshPages
from lingvo_moe.tasks.lm.running_batch import FILLED, RunningText, TextBatch
from lingvo_moe.tasks.lm.saved_generator import SETTINGS

_SHORT = 32  # tokens of prompts that a program reads, where the first has no more; else FILLED
_SMALLEST_TABLE, _LARGER = 4, 4  # pages of a row's table, and how many times larger the next one is


class MeshBatch(TextBatch):
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

    def _Fill(self, parts: Sequence[tuple[RunningText, int]]) -> None:
        width = self._Width(max(until - text.filled for text, until in parts))
        texts = [text for text, _ in parts]
        rows, numbers = self._Placed(texts, self._programs.RowsOf(FILLED // width))
        pages_BU = self._Tables(texts, numbers, rows)
        ids_BT, slot_BT, at_BT = (np.zeros([rows, width], np.int32) for _ in range(3))
        at_BT[:] = np.arange(width)
        for row, (text, until) in zip(numbers, parts):
            at = np.arange(text.filled, until)
            at_BT[row] += text.filled
            ids_BT[row, : at.size] = text.ids[text.filled : until]
            slot_BT[row, : at.size] = pages_BU[row, at // PAGE] * PAGE + at % PAGE
        self._programs.Read(NestedMap(ids=ids_BT, at=at_BT, slots=slot_BT, pages=pages_BU))

    def _Draw(self, texts: Sequence[RunningText]) -> None:
        rows, numbers = self._Placed(texts, self._num_rows)
        pages_BU = self._Tables(texts, numbers, rows)
        before_BL = np.zeros([rows, pages_BU.shape[1] * PAGE], np.int32)
        counts = {name: np.zeros([rows], np.int32) for name in ("ids", "at", "left", "step")}
        values = [Sampling().Values()[1:]] * rows
        for row, text in zip(numbers, texts):
            values[row] = text.settings.Values()[1:]
            before_BL[row] = np.resize(text.ids, before_BL.shape[1])
            newest = text.ids[-1], len(text.ids) - 1, self._Most(text), len(text.log_probs)
            for column, value in zip(counts.values(), newest):
                column[row] = value
        specs = [*SETTINGS.items()][1:]
        settings = NestedMap({
            name: np.asarray(column, spec.dtype.as_numpy_dtype)
            for (name, spec), column in zip(specs, zip(*values), strict=True)
        })  # fmt: skip
        inputs = NestedMap(counts, pages=pages_BU, before=before_BL, settings=settings)
        drawn = self._programs.Block(inputs)
        if "experts" in drawn:
            self._Note(drawn.experts[:, numbers], self._programs.num_experts)
        for row, text in zip(numbers, texts):
            for token, log_prob in zip(
                drawn.tokens[row, : counts["left"][row]].tolist(), drawn.log_probs[row].tolist()
            ):
                if not self._Add(text, token, log_prob):
                    break
            # The newest token has no keys and values, unless the text ended behind it.
            self._Filled(text, len(text.ids) - (text.reason != "stop"))

    def _Placed(self, texts: Sequence[RunningText], rows: int) -> tuple[int, list[int]]:
        """The number of rows, and that of each text's, among those of its part."""
        counts, numbers = [0] * len(self._pools), []
        for text in texts:
            numbers.append(text.part * (rows // len(counts)) + counts[text.part])
            counts[text.part] += 1
        return rows, numbers

    def _Tables(
        self, texts: Sequence[RunningText], numbers: Sequence[int], rows: int
    ) -> np.ndarray:
        """The pages of texts, page_BU of TablePlaces."""
        most, width = max(len(text.pages) for text in texts), _SMALLEST_TABLE
        while width < most:
            width *= _LARGER
        page_BU = np.zeros([rows, min(width, self._most_pages)], np.int32)
        for row, text in zip(numbers, texts):
            page_BU[row, : len(text.pages)] = text.pages
        return page_BU
