"""The second stage: the pairs of a language from all sources, each once, and its held-out pairs."""

import dataclasses
import gzip
import heapq
import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lingvo_moe.core.files import files
from lingvo_moe.tasks.text.corpus import split
from lingvo_moe.tasks.text.data.made_once import make_once
from lingvo_moe.tasks.text.data.prepared import content_digest
from lingvo_moe.tasks.text.data.tidying import KEYS, sentence_key
from lingvo_moe.tasks.text.preparing.dedup import hashes_in, keep_first, marked
from lingvo_moe.tasks.text.preparing.formats import read_source
from lingvo_moe.tasks.text.preparing.lines import Fields, Source
from lingvo_moe.tasks.text.preparing.read_stage import held_out_pair

TRAIN, DEV, SUMMARY = "train.tsv.gz", "dev.tsv.gz", "summary.json"
_WRITTEN_AT_ONCE = 4096
# Level 6 would take three times as long for files smaller by a tenth.
_LEVEL = 3


@dataclasses.dataclass(frozen=True)
class LanguageJob:
    """The job for one language."""

    lang: str  # its code
    parts: tuple[str, ...]  # directories of the first stage, in the order of the sources
    # Where its held-out pairs are given; None to draw them from those of `parts`.
    dev_sources: tuple[Source, ...] | None
    fields: Fields  # for `dev_sources`
    max_dev: int  # the most that are drawn
    block: int  # pairs that are compressed together, so that they can be read alone
    output: str  # the directory to make
    # A directory of files with the places of the pairs to keep, uint64; None to look for duplicates.
    firsts: str | None = None
    keys: int = KEYS  # the version of sentence_key

    def Hashes(self) -> list[Path]:
        """The files of the hashes of its pairs, in order."""
        return [p for part in self.parts if (p := Path(part) / f"{self.lang}.hashes").exists()]


def language_stage(job: LanguageJob, report: Callable[[int], None]) -> str:
    """Does a job atomically, unless it was done before. Returns its directory.

    `report` is called with 1 when it is done.

    Raises:
        DataError: see read_source.
        OSError: the directory cannot be written.
    """

    def write(directory: Path) -> None:
        summary = _write_train(job, directory)
        summary["dev"] = _write_dev(job, directory)
        files.write_atomic(directory / SUMMARY, json.dumps(summary).encode())

    made = make_once(job.output, write)
    report(1)
    return made


def _write_train(job: LanguageJob, directory: Path) -> dict[str, Any]:
    """Writes the training pairs. Returns what the summary says of them."""
    work = directory / "work"
    work.mkdir()
    hashes = job.Hashes()
    if job.firsts is None:
        keep = keep_first(hashes, work)
    else:
        places = (np.fromfile(path, "<u8") for path in Path(job.firsts).glob("*"))
        keep = marked(hashes_in(hashes), places, work)
    num_kept = int(keep.sum())
    about: dict[str, Any] = {"kept": num_kept, "duplicates": keep.size - num_kept, "dev": 0}
    if num_kept:
        lines, path = _lines(job, "tsv"), directory / TRAIN
        starts = _write(path, (line for line, keeps in zip(lines, keep) if keeps), job.block)
        about |= {"bytes": path.stat().st_size, "digest": content_digest(path), "blocks": starts}
    del keep
    shutil.rmtree(work)
    return about


def _write_dev(job: LanguageJob, directory: Path) -> int:
    """Writes the held-out pairs and returns how many they are."""
    lines: list[bytes] | Iterator[bytes]
    if job.dev_sources is None:
        lines = _drawn(job)
        if not lines:
            return 0
        _write(directory / DEV, iter(lines), job.block)
        return len(lines)
    count = 0

    def given() -> Iterator[bytes]:
        nonlocal count
        for source in job.dev_sources or ():
            for line in read_source(source, job.fields):
                given_source, target, reason = held_out_pair(line)
                if line.lang == job.lang and not reason:
                    count += 1
                    yield f"{given_source}\t{target}\n".encode()

    path = directory / DEV
    _write(path, given(), job.block)
    if not count:
        path.unlink()
    return count


def _drawn(job: LanguageJob) -> list[bytes]:
    """Draws at most `max_dev` held-out pairs, one for each sentence, ordered by hash."""
    best: dict[int, bytes] = {}

    def cut() -> list[tuple[int, bytes]]:
        return heapq.nsmallest(job.max_dev, best.items())

    for line in _lines(job, "held_out"):
        target = line.decode("utf-8").rstrip("\n").partition("\t")[2]
        # One pair a sentence: "in 2 days" beside "in 5 days" would measure the same twice.
        best.setdefault(split.text_hash(f"drawn {sentence_key(target, job.keys)}"), line)
        if len(best) > 2 * job.max_dev + 1000:
            best = dict(cut())
    return [line for _, line in cut()]


def _lines(job: LanguageJob, kind: str) -> Iterator[bytes]:
    for part in job.parts:
        path = Path(part) / f"{job.lang}.{kind}"
        if path.exists():
            with open(path, "rb") as file:
                yield from file


def _write(path: Path, lines: Iterator[bytes], block: int) -> list[int]:
    """Writes a compressed file, a stream of gzip for each `block` lines. Returns where each begins, in bytes."""
    starts = []
    with files.open_to_write(path) as raw:
        while first := list(itertools.islice(lines, min(block, _WRITTEN_AT_ONCE))):
            starts.append(raw.tell())
            # No name and no time in the header: the same data is the same bytes.
            with gzip.GzipFile("", "wb", _LEVEL, raw, mtime=0) as file:
                file.write(b"".join(first))
                rest = itertools.islice(lines, block - len(first))
                while some := list(itertools.islice(rest, _WRITTEN_AT_ONCE)):
                    file.write(b"".join(some))
    return starts
