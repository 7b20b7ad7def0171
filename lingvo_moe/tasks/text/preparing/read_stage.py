"""The first stage: reads a source, cleans and filters its pairs, holds some out, and writes the others by language.

A directory holds the results for one source: `<lang>.tsv`, `<lang>.hashes` (a hash a pair, for duplicates),
`<lang>.held_out` (pairs of held-out sentences) and `summary.json`.
"""

import dataclasses
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from lingvo_moe.core.files import files
from lingvo_moe.tasks.text.corpus import split
from lingvo_moe.tasks.text.data import tsv
from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.data.made_once import make_once
from lingvo_moe.tasks.text.data.sides import Words
from lingvo_moe.tasks.text.data.tidying import KEYS, sentence_key, tidy_text
from lingvo_moe.tasks.text.preparing.filters import REASONS, Rules
from lingvo_moe.tasks.text.preparing.formats import FORMATS, read_source
from lingvo_moe.tasks.text.preparing.lines import Fields, ReadLine, Source

SUMMARY = "summary.json"
NO_LANGUAGE = "?"  # under which lines without a language are counted
EXAMPLES = 3  # of what was dropped, by language and reason
_EXAMPLE_CHARS = 60
_SALT = "prepare "  # not build_corpus's: what it left for training would have nothing to hold out
_WRITTEN_AT_ONCE = 2000


@dataclasses.dataclass(frozen=True)
class ReadJob:
    """The job for one source."""

    # `source`, `fields`, `rules`: what to read and what to keep.
    source: Source
    fields: Fields
    rules: Rules
    dev_share: float  # the share of sentences to hold out; see split.is_held_out
    # A file of the hashes of held-out sentences' keys, uint64; None to hold out by `dev_share`.
    dev_keys: str | None
    output: str  # the directory to make
    keys: int = KEYS  # the version of sentence_key


@dataclasses.dataclass
class LanguageCounts:
    """Counts for one language: lines read, pairs kept (including duplicates) and dropped by reason, with examples."""

    read: int = 0
    kept: int = 0
    dropped: Counter[str] = dataclasses.field(default_factory=Counter)
    examples: dict[str, list[str]] = dataclasses.field(default_factory=dict)

    def Drop(self, reason: str, example: str) -> None:
        self.dropped[reason] += 1
        examples = self.examples.setdefault(reason, [])
        if example and len(examples) < EXAMPLES:
            examples.append(example)


def read_stage(job: ReadJob, report: Callable[[int], None]) -> str:
    """Does a job atomically, unless it was done before. Returns its directory.

    `report` is called with the number of lines read since the last call.

    Raises:
        DataError: see read_source; or none of the lines of a source can be used.
        OSError: the directory cannot be written.
    """
    return make_once(job.output, lambda directory: _LineReader(job, directory).Run(report))


class _LineReader:
    """Goes through the lines of a source."""

    def __init__(self, job: ReadJob, directory: Path):
        self._job, self._directory = job, directory
        self._languages = defaultdict[str, LanguageCounts](LanguageCounts)
        self._texts = defaultdict[str, list[str]](list)  # file name -> lines to write
        self._hashes = defaultdict[str, list[int]](list)
        self._characters: dict[str, set[str]] = {"source": set(), "target": set()}
        self._words, self._warnings = Words(), list[str]()
        self._dev_keys: frozenset[int] | None = None
        if job.dev_keys:
            self._dev_keys = frozenset(np.fromfile(job.dev_keys, np.uint64).tolist())

    def Run(self, report: Callable[[int], None]) -> None:
        since = 0
        for line in read_source(self._job.source, self._job.fields):
            since += 1
            self._Line(line)
            if since == _WRITTEN_AT_ONCE:
                self._Flush()
                report(since)
                since = 0
        self._Flush()
        report(since)
        counts = self._languages.values()
        if not sum(c.read - sum(c.dropped[r] for r in LINE_REASONS) for c in counts):
            total = sum((c.dropped for c in counts), Counter[str]())
            raise _unusable(self._job.source, total, self._warnings)
        summary = {
            "languages": {lang: vars(c) for lang, c in self._languages.items()},
            "characters": {side: "".join(sorted(c)) for side, c in self._characters.items()},
            "warnings": self._warnings,
            "words": self._words.Shares(),
        }
        files.write_atomic(self._directory / SUMMARY, json.dumps(summary).encode())

    def _Line(self, line: ReadLine) -> None:
        counts = self._languages[line.lang or NO_LANGUAGE]
        counts.read += 1
        if line.reason:
            counts.Drop(line.reason, "")
            self._Warn(line.number, line.reason)
            return
        lang = line.lang or NO_LANGUAGE
        source, target = tidy_text(line.source), tidy_text(line.target)
        self._words.Add(source, target)
        one_text = FORMATS[self._job.source.form].texts
        reason = self._job.rules.Reason(lang, source, target, one_text)
        if not reason and not tsv.fits(source, target):
            reason = "too_long_line"
            self._Warn(line.number, reason)
        if reason:
            counts.Drop(reason, _example(source, target))
            return
        if self._HeldOut(target):
            counts.Drop("held_out", _example(source, target))
            self._texts[f"{lang}.held_out"].append(f"{source}\t{target}\n")
            return
        counts.kept += 1
        self._texts[f"{lang}.tsv"].append(f"{source}\t{target}\n")
        self._hashes[f"{lang}.hashes"].append(pair_hash(source, target))
        for side, text in (("source", source), ("target", target)):
            if not text.isascii():
                self._characters[side].update(text)

    def _HeldOut(self, target: str) -> bool:
        key = sentence_key(target, self._job.keys)
        if self._dev_keys is not None:
            return split.text_hash(key) in self._dev_keys
        return split.is_held_out(key, self._job.dev_share, _SALT)

    def _Warn(self, number: int, reason: str) -> None:
        if len(self._warnings) < tsv.BAD_LINES_TOLD:
            self._warnings.append(f"{self._job.source.path}:{number}: {REASONS[reason]}")

    def _Flush(self) -> None:
        """Appends what has come together; files are not kept open, for there may be hundreds of languages."""
        for name, lines in self._texts.items():
            with files.open_to_write(self._directory / name, "ab") as file:
                file.write("".join(lines).encode("utf-8"))
        for name, hashes in self._hashes.items():
            with files.open_to_write(self._directory / name, "ab") as file:
                file.write(np.array(hashes, "<u8").tobytes())
        self._texts.clear()
        self._hashes.clear()


LINE_REASONS = tuple(REASONS)[: 1 + list(REASONS).index("too_long_line")]


@dataclasses.dataclass
class GivenHeldOut:
    """The held-out pairs that the user gave."""

    keys: int = KEYS  # the version of sentence_key
    # Of the sentences' keys, as ReadJob.dev_keys holds them.
    hashes: set[int] = dataclasses.field(default_factory=set)
    # Those that hold pairs of a language; lines of JSON may name another one than their file.
    sources: dict[str, list[Source]] = dataclasses.field(default_factory=dict)
    # Of the first lines that cannot be used.
    warnings: list[str] = dataclasses.field(default_factory=list)

    def Read(self, source: Source, fields: Fields) -> None:
        """Adds a source. Raises DataError: see read_source; or none of its lines can be used."""
        languages, dropped, warnings = set[str](), Counter[str](), list[str]()
        for line in read_source(source, fields):
            _, target, reason = held_out_pair(line)
            if not reason:
                languages.add(line.lang or NO_LANGUAGE)
                # As training pairs are tidied: a sentence must have one key, however it is spelt.
                self.hashes.add(split.text_hash(sentence_key(tidy_text(target), self.keys)))
                continue
            dropped[reason] += 1
            if dropped.total() <= tsv.BAD_LINES_TOLD:
                warnings.append(f"{source.path}:{line.number}: {REASONS[reason]}")
        if not languages:
            raise _unusable(source, dropped, warnings)
        self.warnings += warnings
        for lang in languages:
            self.sources.setdefault(lang, []).append(source)


def _unusable(source: Source, dropped: Counter[str], warnings: Sequence[str]) -> DataError:
    """The error for a source without a line that can be used; `warnings` are of its first lines."""
    why = f"{explain(dropped)}; the first: {warnings[0]}" if warnings else "it is empty"
    return DataError(f"{source.path}: no line can be used: {why}")


def held_out_pair(line: ReadLine) -> tuple[str, str, str]:
    """`(source, target, "")` of a line of given held-out pairs, or `(source, target, reason)` why it cannot be used.

    They are unchanged, except for characters that would break the line.
    """
    source, target = (" ".join(side.split()) for side in (line.source, line.target))
    if line.reason or not (source and target):
        return source, target, line.reason or "empty"
    return source, target, "" if tsv.fits(source, target) else "too_long_line"


def pair_hash(source: str, target: str) -> int:
    """64 bits of a pair, the same for pairs that differ only in case."""
    data = f"{source}\t{target}".casefold().encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


def explain(dropped: Counter[str]) -> str:
    """Counts by reason, for people: '2 x a line that is no JSON object'."""
    return ", ".join(f"{n:,} x {REASONS[reason]}" for reason, n in dropped.most_common() if n)


def _example(source: str, target: str) -> str:
    return " | ".join(
        text if len(text) <= _EXAMPLE_CHARS else f"{text[: _EXAMPLE_CHARS - 1]}…"
        for text in (source, target)
    )
