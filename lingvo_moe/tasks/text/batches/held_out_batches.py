"""Packed batches of held-out pairs, each pair once.

Letters: B row of the batch, T time.

A batch holds pairs of one resource group, so that the loss of each group costs nothing extra. Groups take turns in
proportion to their pairs, and within a group so do languages: the first batches represent all.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from lingvo_moe.core.input.base_input import HeldOutBatch
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.text.batches.rows_of_pairs import Shape, Sized, fill_batch, to_batch

# Pairs of a language, e.g. of texts, and what else rows need of it: its task or None; and Marks, if not the usual.
LanguagePairs = tuple[Sequence[Any], tuple[Any, ...]]
Encode = Callable[[str], Sequence[int]]


class _GroupPairs:
    """The pairs of a group, spread evenly by language, and how many of them were drawn."""

    def __init__(self, languages: Sequence[LanguagePairs]):
        self._languages = languages
        self._places = sorted(
            ((i + 0.5) / len(pairs), number, i)
            for number, (pairs, _) in enumerate(languages)
            for i in range(len(pairs))
        )
        self._drawn = 0
        self.waiting: list[Sized] = []  # for the next batch

    @property
    def share(self) -> float:
        """The share of its pairs that were drawn."""
        return self._drawn / len(self._places)

    def Draw(self) -> Iterator[tuple[Any, tuple[Any, ...]]]:
        """Yields the pairs that were not drawn yet, with what else rows need of their languages."""
        while self._drawn < len(self._places):
            _, number, i = self._places[self._drawn]
            self._drawn += 1
            pairs, about = self._languages[number]
            yield pairs[i], about


def encoded(
    encode: tuple[Encode, Encode], shape: Shape, truncate: bool
) -> Callable[[tuple[str, str], tuple[Any, ...]], Sized | None]:
    """A function from texts and LanguagePairs[1] to what a batch takes; None of a pair longer than a row, unless it is
    truncated.

    `encode` gives the ids of a source, and of a target.
    """

    def sized(pair: tuple[str, str], about: tuple[Any, ...]) -> Sized | None:
        source, target = (np.array(f(text), np.int32) for f, text in zip(encode, pair))
        more = about[1].more if len(about) > 1 else 0
        if truncate:
            source = source[: shape.source_length - 1 - more]
            target = target[: shape.target_length - 1 - more]
        sizes = source.size + more, target.size + more
        if source.size and target.size and shape.Fits(*sizes):
            return *sizes, (source, target, *about)
        return None

    return sized


def held_out_batches(
    groups: dict[str, list[LanguagePairs]],
    sized: Callable[[Any, tuple[Any, ...]], Sized | None],
    shape: Shape,
    batch: Callable[[list, Shape], NestedMap] = to_batch,
) -> Iterator[HeldOutBatch]:
    """Batches of all pairs; see rows_of_pairs.to_batch. The last ones of a group have empty rows.

    Each group has languages with at least one pair each; `sized` gives what `batch` takes, as `encoded` does.
    """
    left = {name: _GroupPairs(languages) for name, languages in groups.items() if languages}
    while left:
        name = min(left, key=lambda name: left[name].share)
        group = left[name]
        drawn = filter(None, itertools.starmap(sized, group.Draw()))
        rows, group.waiting = fill_batch(shape, group.waiting, drawn)
        if any(rows):
            yield HeldOutBatch(batch(rows, shape), name)
        if group.share == 1 and not group.waiting:
            del left[name]
