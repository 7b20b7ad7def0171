"""Tokenised pairs on disk: ArrayRecord shards of a bounded number of pairs, with random access.

A record is an array of unsigned little-endian ids: the number of source ids, the source ids, the target ids; without
bos and eos. `manifest.json` describes the shards, and `<lang>.lengths` has the lengths of a language's pairs, which
say what goes into a batch without reading it. Everything is verified against a list of SHA-256 before it is
opened; later changes are detected by the checksums of the record files.
"""

import bisect
import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import os
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader

from lingvo_moe.core.files import files
from lingvo_moe.core.files.manifest import ManifestError
from lingvo_moe.core.input.base_input import Progress, quiet
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.text.batches.order import WINDOW
from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.data.made_once import making, verify_made
from lingvo_moe.tasks.text.data.prepared import fingerprint
from lingvo_moe.tasks.text.data.scan import Scan
from lingvo_moe.tasks.text.data.shards import (
    LENGTHS,
    MAX_IDS,
    PAIRS_PER_SHARD,
    LanguageShards,
    id_dtype,
    lengths_file,
    shard_file,
    write_shards,
)

_MANIFEST = "manifest.json"
_AGAIN = "start again: it is made again"
# The shards of a language that are open at once: those that the order draws from, and the window before; less where
# there are so many languages that a process could not have so many files open (1,024 is a common limit).
_OPEN_SHARDS = 2 * WINDOW
_OPEN_IN_ALL = 512
_READ_AT_ONCE = 8192
_READER_OPTIONS = "readahead_buffer_size:0"
_log = logging.getLogger(__name__)


class Records:
    """The records of a directory, by language index and position.

    Shards are opened when they are read, and only so many of a language stay open: memory does not grow with the data.

    Attributes:
        languages: `{lang: number of records}`, sorted by language.
        shards: `{lang: number of records of each shard}`.
        key: names data, vocabularies and, where the order depends on it, the division into shards.
        dropped: good lines that gave no record, by reason.
    """

    def __init__(
        self, directory: Path, key: str, languages: Iterable[str] = (), remedy: str | None = None
    ):
        """Opens a directory of records.

        Args:
            key: what the manifest must name.
            remedy: what to do about a record that is damaged later, for its message.

        Raises:
            DataError: something is missing or is not as long as it must be. The caller has verified the contents.
        """
        self.directory = directory
        self._remedy = remedy or _AGAIN
        try:
            manifest = json.loads((directory / _MANIFEST).read_text())
            self._dtype = np.dtype(manifest["dtype"])
            entries = {
                lang: LanguageShards(**entry)
                for lang, entry in sorted(manifest["languages"].items())
                if not languages or lang in languages
            }
            if manifest["key"] != key:
                raise ValueError("it was made from other data")
            all_there = len(entries) == len(manifest["languages"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise DataError(f"{directory / _MANIFEST}: missing or damaged: {e}") from e
        self._names = list(entries)
        self._starts: list[list[int]] = []
        self._open: list[OrderedDict[int, ArrayRecordReader]] = []
        for lang, entry in entries.items():
            _check_sizes(directory, lang, entry)
            self._starts.append([0, *itertools.accumulate(entry.records)])
            self._open.append(OrderedDict())
        self._lengths: dict[int, np.ndarray] = {}
        self.shards = {lang: list(entry.records) for lang, entry in entries.items()}
        self.languages = {lang: sum(records) for lang, records in self.shards.items()}
        self.dropped: Counter[str] = Counter()
        for entry in entries.values():
            self.dropped.update(entry.dropped)
        self.key = key if all_there else f"{key} {','.join(self._names)}"
        if any(len(records) > WINDOW for records in self.shards.values()):
            self.key += f" in shards {_digest(json.dumps(self.shards).encode()).hexdigest()}"

    def Read(self, language: int, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Source and target ids of a record, as read-only unsigned arrays. Raises DataError: the record is damaged."""
        starts = self._starts[language]
        shard = bisect.bisect_right(starts, position) - 1
        try:
            reader = self._open[language].get(shard) or self._Open(language, shard)
            (data,) = reader.read([position - starts[shard]])
            ids = np.frombuffer(data, self._dtype)
            source, target = self.Lengths(language)[position].tolist()
            if (ids[0], ids.size) != (source, 1 + source + target):
                raise ValueError(f"{ids[0]} of {ids.size} ids, not {source} and {target}")
        except (RuntimeError, ValueError, IndexError) as e:
            path = shard_file(self.directory, self._names[language], shard)
            raise DataError(
                f"{path}: record {position - starts[shard]} is damaged ({e}); {self._remedy}"
            ) from e
        return ids[1 : source + 1], ids[source + 1 :]

    def Lengths(self, language: int) -> np.ndarray:
        """The numbers of source and target ids of a language's records, in their order: uint16 [N, 2], read-only.

        They are read when they are looked at. Of records that an earlier version made, which have none beside them, all
        are read at the first call.

        Raises:
            DataError: a shard is damaged.
        """
        if language not in self._lengths:
            path = lengths_file(self.directory, self._names[language])
            lengths: np.ndarray
            if path.exists():
                lengths = np.memmap(path, LENGTHS, "r")
            else:
                if not self._lengths:
                    _log.warning(
                        "%s: made by an earlier version, without lengths: each start reads all records; tools.prepare "
                        "again, or a start without this cache, writes them",
                        self.directory,
                    )
                lengths = self._Measured(language)
            self._lengths[language] = np.asarray(lengths).reshape(-1, 2)
        return self._lengths[language]

    def _Measured(self, language: int) -> np.ndarray:
        """The lengths of a language, flat, from its records."""
        lengths, width = [], self._dtype.itemsize
        for shard, count in enumerate(self.shards[self._names[language]]):
            try:
                reader = self._open[language].get(shard) or self._Open(language, shard)
                for start in range(0, count, _READ_AT_ONCE):
                    data = reader.read(list(range(start, min(start + _READ_AT_ONCE, count))))
                    firsts = b"".join(record[:width] for record in data)
                    source = np.frombuffer(firsts, self._dtype).astype(np.int64)
                    ids = np.fromiter(map(len, data), np.int64, len(data)) // width
                    lengths.append(np.stack([source, ids - 1 - source], axis=1).astype(LENGTHS))
            except (RuntimeError, ValueError, IndexError) as e:
                path = shard_file(self.directory, self._names[language], shard)
                raise DataError(f"{path}: damaged ({e}); {self._remedy}") from e
        return np.concatenate(lengths)

    def _Open(self, language: int, shard: int) -> ArrayRecordReader:
        is_open, lang = self._open[language], self._names[language]
        reader = ArrayRecordReader(str(shard_file(self.directory, lang, shard)), _READER_OPTIONS)
        if reader.num_records() != self.shards[lang][shard]:
            raise ValueError(f"{reader.num_records()} records, expected {self.shards[lang][shard]}")
        while len(is_open) >= max(1, min(_OPEN_SHARDS, _OPEN_IN_ALL // len(self._names))):
            is_open.popitem(last=False)[1].close()
        is_open[shard] = reader
        return reader


def records_key(fingerprint: str, vocabs: NestedMap) -> str:
    """The key of the records of some data (Scan.fingerprint) in the ids of two vocabularies."""
    # The 1 has stood there since positions were first saved in checkpoints; it must stay for them to be recognised.
    digest = _digest(f"1 {fingerprint}".encode())
    for side in ("source", "target"):
        digest.update(hashlib.blake2b(vocabs[side].model_bytes).digest())
    return digest.hexdigest()


def prepared_records(scan: Scan, vocabs: NestedMap) -> Records | None:
    """The records that tools.prepare wrote beside the data; None if there are none for these vocabularies.

    Raises DataError: they are damaged: those of the languages in question are all read and verified.
    """
    if scan.prepared is None:
        return None
    key = records_key(fingerprint(scan.prepared.digests), vocabs)
    if key != scan.prepared.summary["records"]:
        return None
    scan.prepared.VerifyRecords(scan.files)
    directory, remedy = scan.prepared.directory / "records", scan.prepared.listed.kind.remedy
    return Records(directory, key, scan.files, remedy)


def cached_records(
    scan: Scan,
    vocabs: NestedMap,
    cache_dir: str | os.PathLike,
    progress: Progress = quiet,
    pairs_per_shard: int = PAIRS_PER_SHARD,
) -> Records:
    """Opens the records of this data and these vocabularies, tokenising the data first if necessary.

    The cache is read and verified. A damaged cache is made again, with a warning.

    Raises:
        DataError: the data cannot be read.
        OSError: the cache cannot be written.
    """
    key = records_key(scan.fingerprint, vocabs)
    # The key says nothing of whether sources were left out, or texts tidied that are not tidy.
    tidied = vocabs.target.tidied
    more = "-texts" * scan.texts + f"-tidied{tidied}" * (tidied > scan.tidied)
    directory = Path(cache_dir) / f"shards-{key}{more}"
    if directory.exists():
        # Processes verify at the same time; only those that find damage take turns, and look again.
        with contextlib.suppress(DataError, ManifestError, OSError):
            return _open_verified(directory, key)
    with files.only_one(Path(cache_dir)):
        if directory.exists():
            try:
                return _open_verified(directory, key)
            except (DataError, ManifestError) as e:
                _log.warning("the cache of tokenised data is damaged: %s", e)
        with making(directory) as temp:
            entries: dict[str, LanguageShards] = {}
            for i, lang in enumerate(scan.files):
                progress(f"tokenising {lang} ({i + 1} of {len(scan.files)} languages)")
                entries[lang] = write_shards(scan.Pairs(lang), temp, lang, vocabs, pairs_per_shard)
            write_contents(temp, key, vocabs, entries)
        return Records(directory, key)


def _open_verified(directory: Path, key: str) -> Records:
    verify_made(directory)
    return Records(directory, key)


def write_contents(
    directory: Path, key: str, vocabs: NestedMap, entries: Mapping[str, LanguageShards]
) -> None:
    """Writes into a directory of shards what `Records` reads first. Languages without records are left out.

    Raises DataError: there is no record at all.
    """
    about = {lang: dataclasses.asdict(entry) for lang, entry in entries.items() if entry.records}
    if not about:
        why = sum((Counter(entry.dropped) for entry in entries.values()), Counter[str]())
        raise DataError(
            "no pair or text is left after tokenisation: "
            f"{why['empty_after_tokenising']:,} have no token on a side, {why['too_long']:,} more than {MAX_IDS:,}"
        )
    manifest: dict[str, Any] = {"key": key, "dtype": id_dtype(vocabs).str, "languages": about}
    files.write_atomic(directory / _MANIFEST, json.dumps(manifest, indent=1).encode())


def _check_sizes(directory: Path, lang: str, entry: LanguageShards) -> None:
    sizes = {shard_file(directory, lang, i): size for i, size in enumerate(entry.bytes)}
    lengths = lengths_file(directory, lang)
    if lengths.exists():
        sizes[lengths] = 2 * LENGTHS.itemsize * sum(entry.records)
    for path, size in sizes.items():
        if not path.is_file() or path.stat().st_size != size:
            raise DataError(f"{path}: missing or cut short, expected {size} bytes")


def _digest(data: bytes) -> Any:
    return hashlib.blake2b(data, digest_size=8)
