"""Finds the first of equal pairs by their hashes, on disk: memory does not grow with the number of pairs.

Hashes (uint64) and their positions are distributed to files by their top bits, so that equal ones are in one file,
and each file is sorted in memory separately. It takes 25 bytes of disk a pair. Among a billion pairs, the probability
that two different ones are taken for equal is 3%.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from lingvo_moe.core.files.files import open_to_write, reserve

HASHES_AT_ONCE = 2_000_000  # some 150 MB while they are sorted
_READ_AT_ONCE = 1_000_000
_ENTRY = np.dtype([("hash", "<u8"), ("place", "<u8")])


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
    total = sum(path.stat().st_size for path in hashes) // 8
    if not total:
        return np.zeros(0, bool)
    reserve(directory / "keep", total)
    keep = np.memmap(directory / "keep", bool, "r+", shape=(total,))
    parts = math.ceil(total / (at_once or HASHES_AT_ONCE))
    if parts == 1:
        _mark_first(np.concatenate(list(_entries(hashes))), keep)
        return keep
    for entries in _entries(hashes):
        part = (entries["hash"] >> np.uint64(32)) % np.uint64(parts)
        order = np.argsort(part, kind="stable")
        edges = np.searchsorted(part[order], np.arange(parts + 1))
        for i in range(parts):
            with open_to_write(directory / f"part-{i}", "ab") as file:
                file.write(entries[order[edges[i] : edges[i + 1]]].tobytes())
    for i in range(parts):
        path = directory / f"part-{i}"
        _mark_first(np.fromfile(path, _ENTRY), keep)
        path.unlink()
    return keep


def _entries(hashes: Sequence[Path]) -> Iterator[np.ndarray]:
    place = 0
    for path in hashes:
        with open(path, "rb") as file:
            while (values := np.fromfile(file, "<u8", _READ_AT_ONCE)).size:
                entries = np.empty(values.size, _ENTRY)
                entries["hash"] = values
                entries["place"] = np.arange(place, place + values.size)
                place += values.size
                yield entries


def _mark_first(entries: np.ndarray, keep: np.ndarray) -> None:
    # np.unique gives the first of equal ones, and entries are in the order of their places.
    _, first = np.unique(entries["hash"], return_index=True)
    keep[entries["place"][first]] = True
