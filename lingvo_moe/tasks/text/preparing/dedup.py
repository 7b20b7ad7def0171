"""Finds the first of equal pairs by their hashes, on disk: memory does not grow with the number of pairs.

Hashes (uint64) and their positions are distributed to files by their top bits, so that equal ones are in one file,
and each file is sorted in memory separately. It takes 25 bytes of disk a pair. Among a billion pairs, the probability
that two different ones are taken for equal is 3%.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from lingvo_moe.core.files.files import open_to_write, reserve

HASHES_AT_ONCE = 2_000_000  # some 150 MB while they are sorted
_READ_AT_ONCE = 1_000_000
ENTRY = np.dtype([("hash", "<u8"), ("place", "<u8")])


def keep_first(hashes: Sequence[Path], directory: Path, at_once: int | None = None) -> np.ndarray:
    """Marks each of N pairs that is the first with its hash.

    Args:
        hashes: files of little-endian uint64, one after the other.
        directory: for temporary files; the caller removes them.
        at_once: hashes that are sorted in memory together, about; None for HASHES_AT_ONCE.

    Returns:
        bool [N], on disk (a memory map) where there are any.

    Raises:
        OSError: the disk has no space for the temporary files.
    """
    total = hashes_in(hashes)
    return marked(total, _firsts(hashes, directory, parts_of(total, at_once)), directory)


def hashes_in(hashes: Iterable[Path]) -> int:
    """The number of hashes in some files."""
    return sum(path.stat().st_size for path in hashes) // 8


def parts_of(total: int, at_once: int | None = None) -> int:
    """The number of parts of which each is sorted in memory; `at_once` as for keep_first."""
    return math.ceil(total / (at_once or HASHES_AT_ONCE))


def marked(total: int, firsts: Iterable[np.ndarray], directory: Path) -> np.ndarray:
    """Bool [total], in a file `keep` of the directory: whether a place is in one of `firsts`, uint64 [N] each."""
    if not total:
        return np.zeros(0, bool)
    reserve(directory / "keep", total)
    keep = np.memmap(directory / "keep", bool, "r+", shape=(total,))
    for places in firsts:
        keep[places] = True
    return keep


def entries_of(path: Path, place: int) -> Iterator[np.ndarray]:
    """The hashes of a file and their places, ENTRY [N] at a time; `place` is that of the first."""
    with open(path, "rb") as file:
        while (values := np.fromfile(file, "<u8", _READ_AT_ONCE)).size:
            entries = np.empty(values.size, ENTRY)
            entries["hash"] = values
            entries["place"] = np.arange(place, place + values.size)
            place += values.size
            yield entries


def by_part(entries: np.ndarray, parts: int) -> Iterator[tuple[int, np.ndarray]]:
    """Distributes entries, ENTRY [N], to parts by their hashes; those of a part stay in their order."""
    part = (entries["hash"] >> np.uint64(32)) % np.uint64(parts)
    order = np.argsort(part, kind="stable")
    edges = np.searchsorted(part[order], np.arange(parts + 1))
    for i in range(parts):
        if edges[i] < edges[i + 1]:
            yield i, entries[order[edges[i] : edges[i + 1]]]


def first_places(entries: np.ndarray) -> np.ndarray:
    """The first place of each hash, uint64 [M], of all entries of a part, ENTRY [N], in the order of their places."""
    # np.unique gives the first of equal ones.
    _, first = np.unique(entries["hash"], return_index=True)
    return entries["place"][first]


def _firsts(hashes: Sequence[Path], directory: Path, parts: int) -> Iterator[np.ndarray]:
    starts = itertools.accumulate((hashes_in([path]) for path in hashes), initial=0)
    read = itertools.chain.from_iterable(map(entries_of, hashes, starts))
    if parts == 1:
        yield first_places(np.concatenate(list(read)))
        return
    for entries in read:
        for i, some in by_part(entries, parts):
            with open_to_write(directory / f"part-{i}", "ab") as file:
                file.write(some.tobytes())
    for path in sorted(directory.glob("part-*")):
        yield first_places(np.fromfile(path, ENTRY))
        path.unlink()
