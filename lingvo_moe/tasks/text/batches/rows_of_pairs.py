"""Packs several pairs into each row of a batch, source and target side by side.

Letters: B row of the batch, T time: source_length or target_length.

A pair goes into the first row with space for both of its sides. Pairs that fit nowhere wait and go first into the next
batch; a batch is complete when enough of them wait. So few positions are padding, and no pair is lost. Lengths alone
say where a pair goes: `fill_batch` chooses rows, and `to_batch` fills those whose ids it is given.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.text.vocabulary.language_codes import LanguageCodes
from lingvo_moe.tasks.text.vocabulary.special_ids import BOS_ID, EOS_ID

# The numbers of source and target ids, without one for eos and bos, and whatever stands for the pair.
Sized = tuple[int, int, Any]
MAX_WAITING = 512
# A row with less free space than this is full: hardly any pair is shorter, including eos.
_SMALLEST_SIDE = 2


class Marks:
    """The ids around the texts of a pair: int32 arrays, before and after a source, and before and after a target.

    Attributes:
        more: how many more ids there are on each side than eos, or bos.
    """

    def __init__(self, vocabs: NestedMap, codes: LanguageCodes | None = None, direction: str = ""):
        """`codes` are those of a model between any languages, of which `direction`, SOURCE-TARGET, names two.

        Raises DataError: it does not.
        """
        end, begin, after = [vocabs.source.eos_id], [vocabs.target.bos_id], list[int]()
        sides = [[], end, begin, [vocabs.target.eos_id]]
        if codes:
            source, target = codes.Direction(direction)
            before, after = ([], [source]) if codes.is_last else ([source], [])
            sides = [before, [*end, *after], [codes.start_id, target], sides[3]]
        self.more = int(codes is not None)
        self._sides = [np.array(ids, np.int32) for ids in sides]

    def Source(self, ids: Any) -> np.ndarray:
        """A source with its marks."""
        return np.concatenate([self._sides[0], ids, self._sides[1]])

    def Target(self, ids: Any) -> np.ndarray:
        """A target with its marks: all but the last are inputs, all but the first labels."""
        return np.concatenate([self._sides[2], ids, self._sides[3]])


_USUAL = NestedMap(bos_id=BOS_ID, eos_id=EOS_ID)
_MARKS = Marks(NestedMap(source=_USUAL, target=_USUAL))


@dataclass(frozen=True)
class Shape:
    """The shape of a batch: `rows` B, `source_length` and `target_length` T.

    With `pack` False a row holds one pair; with `task_ids` the batch includes each pair's task.
    """

    rows: int
    source_length: int
    target_length: int
    pack: bool = True
    task_ids: bool = False

    def Fits(self, source: int, target: int) -> bool:
        """Whether a pair of so many ids fits into an empty row, with eos and bos."""
        return source < self.source_length and target < self.target_length

    @property
    def max_waiting(self) -> int:
        """Number of pairs that may wait for the next batch before this one is closed: at most one for each row."""
        return max(1, min(self.rows, MAX_WAITING)) if self.pack else 0


def fill_batch(
    shape: Shape, waiting: Sequence[Sized], pairs: Iterator[Sized]
) -> tuple[list[list[Any]], list[Sized]]:
    """Chooses the pairs of each row of a batch.

    Args:
        waiting: pairs left over by the batch before, which are placed first.
        pairs: further pairs, of which no more are taken than needed. Each fits into a row, and has an id on both sides.

    Returns:
        The third fields of the pairs of each row, and the pairs that now wait for the next batch.
    """
    rows, most = _OpenRows(shape), shape.max_waiting
    left = [pair for pair in waiting if not rows.Add(*pair)]
    full = shape.pack and len(left) >= most
    while rows.open and not full and (pair := next(pairs, None)):
        if not rows.Add(*pair):
            left.append(pair)
            full = len(left) >= most
    return rows.pairs, left


class _OpenRows:
    """The rows of a batch while they are filled.

    Attributes:
        pairs: of each row, what stands for them.
        open: how many rows have space for a further pair.
    """

    def __init__(self, shape: Shape):
        self.pairs: list[list[Any]] = [[] for _ in range(shape.rows)]
        self.open, self._pack = shape.rows, shape.pack
        # Free space for ids; every pair also takes one position for eos or bos.
        self._source_room = np.full(shape.rows, shape.source_length, np.int32)
        self._target_room = np.full(shape.rows, shape.target_length, np.int32)
        self._numbers = _numbers(max(shape.source_length, shape.target_length))
        self._fits, self._target_fits = np.empty((2, shape.rows), np.bool_)

    def Add(self, source: int, target: int, pair: Any) -> bool:
        """Puts a pair into the first row with space. Returns False if no row has space."""
        source_room, target_room, fits = self._source_room, self._target_room, self._fits
        np.greater(source_room, self._numbers[source], fits)
        np.greater(target_room, self._numbers[target], self._target_fits)
        np.logical_and(fits, self._target_fits, fits)
        row = fits.tobytes().find(1)
        if row < 0:
            return False
        source_room[row] = source_left = source_room.item(row) - source - 1 if self._pack else 0
        target_room[row] = target_left = target_room.item(row) - target - 1 if self._pack else 0
        if source_left < _SMALLEST_SIDE or target_left < _SMALLEST_SIDE:
            self.open -= 1
        self.pairs[row].append(pair)
        return True


@functools.lru_cache
def _numbers(count: int) -> list[np.ndarray]:
    """0, 1, ... as arrays, with which NumPy compares in a fifth of the time that a Python number takes."""
    return [np.array(i, np.int32) for i in range(count)]


def to_batch(rows: Sequence[Sequence[Any]], shape: Shape) -> NestedMap:
    """Arrays from rows of pairs: source and target ids, the task, if the shape has tasks, and Marks, if not the usual.

    Returns:
        NestedMap of int32 [B, T]: `src.ids` (the source, then eos), `tgt.ids` (bos, then the target), `tgt.labels` (the
        target, then eos), or as other Marks say, and `segment_ids` (1, 2, ... by pair, 0 for padding) and `segment_pos`
        (0, 1, ... within a pair, 0 for padding) of both sides; and `task_ids` of both, if the shape has them. Padding
        ids are 0.
    """
    tasks = ["task_ids"] if shape.task_ids else []
    src = _zeros(shape.rows, shape.source_length, "ids", "segment_ids", "segment_pos", *tasks)
    tgt = _zeros(
        shape.rows, shape.target_length, "ids", "labels", "segment_ids", "segment_pos", *tasks
    )
    steps = np.arange(max(shape.source_length, shape.target_length), dtype=np.int32)
    for row, pairs in enumerate(rows):
        source_start = target_start = 0
        for segment, (source, target, *rest) in enumerate(pairs, start=1):
            task, marks = (*rest, None)[0], rest[1] if len(rest) > 1 else _MARKS
            source, target = marks.Source(source), marks.Target(target)
            end = source_start + len(source)
            src.ids[row, source_start:end] = source
            src.segment_ids[row, source_start:end] = segment
            src.segment_pos[row, source_start:end] = steps[: end - source_start]
            if shape.task_ids:
                src.task_ids[row, source_start:end] = task
            source_start = end
            end = target_start + len(target) - 1
            tgt.ids[row, target_start:end] = target[:-1]
            tgt.labels[row, target_start:end] = target[1:]
            tgt.segment_ids[row, target_start:end] = segment
            tgt.segment_pos[row, target_start:end] = steps[: end - target_start]
            if shape.task_ids:
                tgt.task_ids[row, target_start:end] = task
            target_start = end
    return NestedMap(src=src, tgt=tgt)


def _zeros(rows: int, length: int, *names: str) -> NestedMap:
    return NestedMap({name: np.zeros((rows, length), np.int32) for name in names})
