"""Recognises a directory that tools.prepare made, whose vocabularies and records can be used directly.

Beside `<lang>.tsv.gz` and `dev/`, which any data directory has, there are `prepared.json`, `vocab/source.model`,
`vocab/target.model` and `records/`, shards of tokenised pairs as records.py reads them; and `prepared.sha256`, the list
of all these files, by which each is verified before it is read.
"""

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.data.file_list import PREPARED_LIST, FileList, local_data
from lingvo_moe.tasks.text.data.shards import shard_language

FORMAT = 2


@dataclass(frozen=True)
class Prepared:
    """A prepared data set."""

    directory: Path  # where it lies
    # What prepared.json says; `summary["languages"][lang]` is about a language.
    summary: dict[str, Any]
    listed: FileList  # the list of its files

    @classmethod
    def Of(cls, files: Mapping[str, Path], listed: FileList | None) -> "Prepared | None":
        """The data set of data_files; None for one that tools.prepare did not make.

        Raises DataError: prepared.json is of another version, or TSVs are of another length. What is in the other files
        is verified when they are read: see `listed`.
        """
        if listed is None or listed.kind is not PREPARED_LIST:
            return None
        path, remedy = listed.directory / PREPARED_LIST.summary, PREPARED_LIST.remedy
        try:
            summary = json.loads(path.read_text(encoding="utf-8"))
            if summary["format"] != FORMAT:
                raise ValueError(f"format {summary['format']}, where {FORMAT} is known")
            sizes = {lang: about["bytes"] for lang, about in sorted(summary["languages"].items())}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise DataError(f"{path}: damaged or of another version: {e}; {remedy}") from e
        for lang, size in sizes.items():
            if files[lang].stat().st_size != size:  # the reader verifies the contents
                raise DataError(f"{files[lang]} has changed since it was prepared; {remedy}")
        return cls(listed.directory, summary, listed)

    @property
    def vocab_dir(self) -> Path:
        return self.directory / "vocab"

    def VerifyVocabularies(self) -> None:
        """Raises DataError unless `vocab/` is as it was written."""
        self.listed.Verify(p for p in self.listed.paths if p.startswith("vocab/"))

    def VerifyRecords(self, languages: Collection[str]) -> None:
        """Raises DataError unless the tokenised pairs of these languages are as they were written."""
        of_records = (p for p in self.listed.paths if p.startswith("records/"))
        self.listed.Verify(p for p in of_records if shard_language(p) in (None, *languages))

    @property
    def pairs(self) -> dict[str, int]:
        """Training pairs by language."""
        return {lang: about["pairs"] for lang, about in self.summary["languages"].items()}

    @property
    def digests(self) -> dict[str, str]:
        """Hex digests of the training files' bytes, by language."""
        languages = sorted(self.summary["languages"].items())
        return {lang: about["digest"] for lang, about in languages}


def target_language(data_dir: str | os.PathLike) -> str:
    """The code of the language that a prepared data set is translated into; '' for other data.

    Raises DataError: its summary is damaged.
    """
    listed = FileList.Open(local_data(data_dir))
    if listed is None or listed.kind is not PREPARED_LIST:
        return ""
    summary = json.loads((listed.directory / PREPARED_LIST.summary).read_text(encoding="utf-8"))
    return str(summary.get("target_language") or "")


def content_digest(path: Path) -> str:
    """Hex digest of the bytes of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def fingerprint(digests: Mapping[str, str]) -> str:
    """Hex digest over languages and the contents of their files."""
    digest = hashlib.blake2b(digest_size=16)
    for lang, content in digests.items():
        digest.update(f"{lang} {content}\n".encode())
    return digest.hexdigest()
