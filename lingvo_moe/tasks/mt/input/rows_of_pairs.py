"""Packs several pairs into each row of a batch, source and target side by side.

Letters: B row of the batch, T time: source_length or target_length.

A pair goes into the first row with space for both of its sides. Pairs that fit nowhere wait and go first into the next
batch; a batch is complete when enough of them wait. So few positions are padding, and no pair is lost.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.mt.input.special_ids import BOS_ID, EOS_ID

Ids = np.ndarray
MAX_WAITING = 512
# A row with less free space than this is full: hardly any pair is shorter, including eos.
_SMALLEST_SIDE = 2


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

    def Fits(self, source: Ids, target: Ids) -> bool:
        """Whether a pair fits into an empty row, with eos and bos."""
        return len(source) < self.source_length and len(target) < self.target_length

    @property
    def max_waiting(self) -> int:
        """Number of pairs that may wait for the next batch before this one is closed: at most one for each row."""
        return max(1, min(self.rows, MAX_WAITING)) if self.pack else 0


class RowFiller:
    """Chooses rows for pairs, by their lengths."""

    def __init__(self, shape: Shape):
        self._shape = shape
        # Free space for ids; every pair also takes one position for eos or bos.
        self._source_room = np.full(shape.rows, shape.source_length)
        self._target_room = np.full(shape.rows, shape.target_length)
        self.rows: list[list[tuple]] = [[] for _ in range(shape.rows)]
        self._placed = 0

    def Add(self, source: Ids, target: Ids, *more: Any) -> bool:
        """Puts a pair (ids without eos and bos, and its extra fields) into the first row with space.

        Returns:
            False if no row has space.
        """
        s, t = len(source) + 1, len(target) + 1
        if self._shape.pack:
            room = (self._source_room >= s) & (self._target_room >= t)
            row = int(room.argmax())
            if not room[row]:
                return False
        else:
            row = self._placed
            if row == self._shape.rows:
                return False
        self._source_room[row] -= s
        self._target_room[row] -= t
        self.rows[row].append((source, target, *more))
        self._placed += 1
        return True

    @property
    def full(self) -> bool:
        """Whether no further pair can be placed."""
        if not self._shape.pack:
            return self._placed == self._shape.rows
        room = np.minimum(self._source_room, self._target_room)
        return bool(room.max() < _SMALLEST_SIDE)


def fill_batch(
    shape: Shape, waiting: Sequence[tuple], draw: Callable[[], tuple | None]
) -> tuple[NestedMap, list[tuple]]:
    """Makes one batch.

    Args:
        waiting: pairs left over by the batch before, which are placed first.
        draw: gives the next pair; None when there are no more. Pairs are tuples that begin with source and target
            ids, each of which fits, and end with the task, if the shape has tasks.

    Returns:
        The batch (see `to_batch`) and the pairs that now wait for the next one.
    """
    filler = RowFiller(shape)
    left = [pair for pair in waiting if not filler.Add(*pair)]
    while not filler.full and (not shape.pack or len(left) < shape.max_waiting):
        if (pair := draw()) is None:
            break
        if not filler.Add(*pair):
            left.append(pair)
    return to_batch(filler.rows, shape), left


def to_batch(rows: Sequence[Sequence[tuple]], shape: Shape) -> NestedMap:
    """Arrays from rows of pairs.

    Returns:
        NestedMap of int32 [B, T]: `src.ids` (the source, then eos), `tgt.ids` (bos, then the target), `tgt.labels` (the
        target, then eos), and `segment_ids` (1, 2, ... by pair, 0 for padding) and `segment_pos` (0, 1, ... within a
        pair, 0 for padding) of both sides; and `task_ids` of both, if the shape has them. Padding ids are 0.
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
            end = source_start + len(source) + 1
            src.ids[row, source_start : end - 1] = source
            src.ids[row, end - 1] = EOS_ID
            src.segment_ids[row, source_start:end] = segment
            src.segment_pos[row, source_start:end] = steps[: end - source_start]
            if shape.task_ids:
                src.task_ids[row, source_start:end] = rest[-1]
            source_start = end
            end = target_start + len(target) + 1
            tgt.ids[row, target_start] = BOS_ID
            tgt.ids[row, target_start + 1 : end] = target
            tgt.labels[row, target_start : end - 1] = target
            tgt.labels[row, end - 1] = EOS_ID
            tgt.segment_ids[row, target_start:end] = segment
            tgt.segment_pos[row, target_start:end] = steps[: end - target_start]
            if shape.task_ids:
                tgt.task_ids[row, target_start:end] = rest[-1]
            target_start = end
    return NestedMap(src=src, tgt=tgt)


def _zeros(rows: int, length: int, *names: str) -> NestedMap:
    return NestedMap({name: np.zeros((rows, length), np.int32) for name in names})
