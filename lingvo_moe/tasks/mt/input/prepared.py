"""Recognises a directory that tools.prepare made: what it holds is known without reading it, and is used as it lies.

Beside `<lang>.tsv.gz` and `dev/`, which any data directory has, there are `prepared.json`, `vocab/source.model`,
`vocab/target.model` and `records/`, shards of tokenised pairs as records.py reads them.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lingvo_moe.tasks.mt.directories import PREPARED
from lingvo_moe.tasks.mt.input import tsv
from lingvo_moe.tasks.mt.input.errors import DataError

SUMMARY = PREPARED.marks[0]
FORMAT = 1
_REMEDY = "run tools.prepare again, or delete {summary} to use the files as they are"


@dataclass(frozen=True)
class Prepared:
    """A prepared data set.

    Attributes:
        directory: where it lies.
        summary: what prepared.json says; `summary["languages"][lang]` is about a language.
    """

    directory: Path
    summary: dict[str, Any]

    @classmethod
    def Open(cls, directory: str | os.PathLike) -> "Prepared | None":
        """The data set in a directory; None for one without prepared.json.

        Raises:
            DataError: prepared.json is damaged, or files were added, removed or changed since.
        """
        directory = Path(directory)
        path = directory / SUMMARY
        if not path.is_file():
            return None
        remedy = _REMEDY.format(summary=path)
        try:
            summary = json.loads(path.read_text(encoding="utf-8"))
            if summary["format"] != FORMAT:
                raise ValueError(f"format {summary['format']}, where {FORMAT} is known")
            sizes = {lang: about["bytes"] for lang, about in sorted(summary["languages"].items())}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise DataError(f"{path}: damaged or of another version: {e}; {remedy}") from e
        files = tsv.language_files(directory)
        for lang in sorted(set(files) ^ set(sizes)):
            what = "is not there any more" if lang in sizes else "was added"
            raise DataError(f"{directory}: {lang} {what} since the data was prepared; {remedy}")
        for lang, size in sizes.items():
            if files[lang].stat().st_size != size:
                raise DataError(f"{files[lang]} has changed since it was prepared; {remedy}")
        return cls(directory, summary)

    @property
    def vocab_dir(self) -> Path:
        return self.directory / "vocab"

    @property
    def records_dir(self) -> Path:
        return self.directory / "records"

    @property
    def pairs(self) -> dict[str, int]:
        """Training pairs by language."""
        return {lang: about["pairs"] for lang, about in self.summary["languages"].items()}

    @property
    def digests(self) -> dict[str, str]:
        """Hex digests of the training files' bytes, by language."""
        languages = sorted(self.summary["languages"].items())
        return {lang: about["digest"] for lang, about in languages}


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
