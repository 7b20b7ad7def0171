"""Packed batches of held-out pairs, each pair once.

Letters: B row of the batch, T time.

A batch holds pairs of one resource group, so that the loss of each group costs nothing extra. Groups take turns in
proportion to their pairs, and within a group so do languages: the first batches represent all.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from lingvo_moe.core.input.base_input import HeldOutBatch
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.text.batches.rows_of_pairs import Shape, Sized, fill_batch, to_batch

# Pairs of a language, e.g. of texts, and its task or None.
LanguagePairs = tuple[Sequence[Any], int | None]
Encode = Callable[[str], Sequence[int]]


class _Group:
    """The pairs of a group, spread evenly by language, and how many of them are in batches."""

    def __init__(self, languages: Sequence[LanguagePairs]):
        places = [
            ((i + 0.5) / len(pairs), number, i)
            for number, (pairs, _) in enumerate(languages)
            for i in range(len(pairs))
        ]
        self._languages, self._places = languages, sorted(places)
        self.drawn = 0
        self.waiting: list[Sized] = []

    @property
    def share(self) -> float:
        """The share of its pairs that were drawn."""
        return self.drawn / len(self._places)

    @property
    def done(self) -> bool:
        """Whether nothing is left for another batch."""
        return self.drawn == len(self._places) and not self.waiting

    def Draw(self) -> tuple[Any, int | None] | None:
        """The next pair and its task; None after the last one."""
        if self.drawn == len(self._places):
            return None
        _, number, i = self._places[self.drawn]
        self.drawn += 1
        pairs, task = self._languages[number]
        return pairs[i], task


def encoded(
    encode: tuple[Encode, Encode], shape: Shape, truncate: bool
) -> Callable[[tuple[str, str], int | None], Sized | None]:
    """A function from texts and a task to what a batch takes; None of a pair longer than a row, unless it is truncated.

    `encode` gives the ids of a source, and of a target.
    """

    def sized(pair: tuple[str, str], task: int | None) -> Sized | None:
        source, target = (np.array(f(text), np.int32) for f, text in zip(encode, pair))
        if truncate:
            source = source[: shape.source_length - 1]
            target = target[: shape.target_length - 1]
        if source.size and target.size and shape.Fits(source.size, target.size):
            return source.size, target.size, (source, target, task)
        return None

    return sized


def held_out_batches(
    groups: dict[str, list[LanguagePairs]],
    sized: Callable[[Any, int | None], Sized | None],
    shape: Shape,
    batch: Callable[[list, Shape], NestedMap] = to_batch,
) -> Iterator[HeldOutBatch]:
    """Batches of all pairs; see rows_of_pairs.to_batch. The last ones of a group have empty rows.

    Each group has languages with at least one pair each; `sized` gives what `batch` takes, as `encoded` does.
    """

    def drawn(group: _Group) -> Iterator[Sized]:
        while (item := group.Draw()) is not None:
            if (found := sized(*item)) is not None:
                yield found

    waiting = {name: _Group(languages) for name, languages in groups.items() if languages}
    while waiting:
        name = min(waiting, key=lambda name: waiting[name].share)
        group = waiting[name]

        rows, group.waiting = fill_batch(shape, group.waiting, drawn(group))
        if any(rows):
            yield HeldOutBatch(batch(rows, shape), name)
        if group.done:
            del waiting[name]
