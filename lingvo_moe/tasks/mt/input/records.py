"""Tokenised pairs on disk: one ArrayRecord file a language, any record at hand without reading the others.

A record is an array of unsigned little-endian ids: the number of source ids, the source ids, the target ids; without
bos and eos. `manifest.json` says what must be there, so that a cache cut short is noticed; a flipped bit is noticed by
the checksums of the record files when it is read.
"""

import hashlib
import itertools
import json
import logging
import os
from collections import Counter
from pathlib import Path

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from lingvo_moe.core import files
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.mt.input import tsv
from lingvo_moe.tasks.mt.input.errors import DataError
from lingvo_moe.tasks.mt.input.scan import Progress, Scan, quiet

_FORMAT = "1"  # change it when the meaning of the bytes does
_MANIFEST = "manifest.json"
_TOKENISED_AT_ONCE = 4096
_MAX_IDS = 2**16 - 1
# A group a record, so that reading one decodes one.
_WRITER_OPTIONS = "group_size:1,uncompressed"
_READER_OPTIONS = "readahead_buffer_size:0"
_log = logging.getLogger(__name__)


class Records:
    """The records of a cache directory, by language index and position.

    Attributes:
        languages: `{lang: number of records}`, sorted by language.
        key: names data and vocabularies.
        dropped: good lines that gave no record, by reason.
    """

    def __init__(self, directory: Path, key: str):
        """Opens a cache.

        Raises:
            DataError: something is missing or is not as long as it must be.
        """
        self.directory, self.key = directory, key
        try:
            manifest = json.loads((directory / _MANIFEST).read_text())
            self._dtype = np.dtype(manifest["dtype"])
            entries = manifest["languages"]
            self.dropped: dict[str, int] = manifest["dropped"]
            if manifest["key"] != key:
                raise ValueError("it was made from other data")
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise DataError(f"{directory / _MANIFEST}: missing or damaged: {e}") from e
        self.languages: dict[str, int] = {}
        self._readers: list[ArrayRecordReader] = []
        for lang, entry in sorted(entries.items()):
            path = _record_file(directory, lang)
            if not path.is_file() or path.stat().st_size != entry["bytes"]:
                raise DataError(f"{path}: missing or cut short, expected {entry['bytes']} bytes")
            reader = ArrayRecordReader(str(path), _READER_OPTIONS)
            if reader.num_records() != entry["records"]:
                raise DataError(
                    f"{path}: {reader.num_records()} records, expected {entry['records']}"
                )
            self._readers.append(reader)
            self.languages[lang] = entry["records"]

    def Read(self, language: int, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Source and target ids of a record, as read-only unsigned arrays.

        Raises:
            DataError: the record is damaged.
        """
        try:
            (data,) = self._readers[language].read([position])
            ids = np.frombuffer(data, self._dtype)
            if not 0 < ids[0] < ids.size:
                raise ValueError(f"length {ids[0]} of {ids.size}")
        except (RuntimeError, ValueError, IndexError) as e:
            lang = list(self.languages)[language]
            raise DataError(
                f"{_record_file(self.directory, lang)}: record {position} is damaged ({e});"
                f" delete {self.directory} and start again, it is made anew"
            ) from e
        end = int(ids[0]) + 1
        return ids[1:end], ids[end:]


def cached_records(
    scan: Scan, vocabs: NestedMap, cache_dir: str | os.PathLike, progress: Progress = quiet
) -> Records:
    """Opens the records of this data and these vocabularies, tokenising it first where that was not done.

    A cache found damaged is made anew, with a warning.

    Raises:
        DataError: the data cannot be read.
    """
    digest = hashlib.blake2b(f"{_FORMAT} {scan.fingerprint}".encode(), digest_size=8)
    for side in ("source", "target"):
        digest.update(hashlib.blake2b(vocabs[side].model_bytes).digest())
    key = digest.hexdigest()
    directory = Path(cache_dir) / f"records-{key}"
    with files.only_one(Path(cache_dir)):
        if directory.exists():
            try:
                return Records(directory, key)
            except DataError as e:
                _log.warning("the cache of tokenised data is damaged and made anew: %s", e)
        with files.replaced_directory(directory) as temp:
            _write_records(scan, vocabs, temp, key, progress)
        return Records(directory, key)


def _record_file(directory: Path, lang: str) -> Path:
    return directory / f"{lang}.array_record"


def _write_records(
    scan: Scan, vocabs: NestedMap, directory: Path, key: str, progress: Progress
) -> None:
    wide = max(vocabs.source.size, vocabs.target.size) > _MAX_IDS
    dtype = np.dtype("<u4" if wide else "<u2")
    entries: dict[str, dict[str, int]] = {}
    dropped: Counter[str] = Counter()
    for i, (lang, path) in enumerate(scan.files.items()):
        progress(f"tokenising {lang} ({i + 1} of {len(scan.files)} languages)")
        target = _record_file(directory, lang)
        count = _write_language(path, target, vocabs, dtype, dropped)
        if count:
            entries[lang] = {"records": count, "bytes": target.stat().st_size}
    if not entries:
        raise DataError("no pair has any token left on both sides after tokenisation")
    manifest = {"key": key, "dtype": dtype.str, "languages": entries, "dropped": dropped}
    files.write_atomic(directory / _MANIFEST, json.dumps(manifest, indent=1).encode())


def _write_language(
    path: Path, target: Path, vocabs: NestedMap, dtype: np.dtype, dropped: Counter[str]
) -> int:
    """Tokenises one file; returns the number of records. What gives none is counted in `dropped`."""
    pairs = tsv.read_pairs(path)
    writer = ArrayRecordWriter(str(target), _WRITER_OPTIONS)
    count = 0
    try:
        while chunk := list(itertools.islice(pairs, _TOKENISED_AT_ONCE)):
            sources, targets = zip(*chunk)
            for source, english in zip(
                vocabs.source.EncodeBatch(sources), vocabs.target.EncodeBatch(targets)
            ):
                if not source or not english:
                    dropped["empty_after_tokenising"] += 1
                elif len(source) > _MAX_IDS:
                    dropped["too_long"] += 1
                else:
                    ids = np.array([len(source), *source, *english], dtype)
                    writer.write(ids.tobytes())
                    count += 1
    finally:
        writer.close()
    return count
