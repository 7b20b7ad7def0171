"""One pass over the training files before anything else: are they usable, how many pairs, which bytes."""

import dataclasses
import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from lingvo_moe.core.suggest import did_you_mean
from lingvo_moe.tasks.mt.input import tsv
from lingvo_moe.tasks.mt.input.errors import DataError

Progress = Callable[[str], None]
_log = logging.getLogger(__name__)


def quiet(message: str) -> None:
    """The progress callback that says nothing."""
    del message


@dataclasses.dataclass(frozen=True)
class Scan:
    """What a pass over the data found.

    Attributes:
        files: the file of each language.
        pairs: the number of good pairs of each language; languages without any are left out everywhere.
        skipped: bad lines by reason, over all files.
        fingerprint: hex digest over languages and file contents.
    """

    files: dict[str, Path]
    pairs: dict[str, int]
    skipped: dict[str, int]
    fingerprint: str


def scan(
    data_dir: str | os.PathLike, languages: Sequence[str] = (), progress: Progress = quiet
) -> Scan:
    """Reads all training files once, streaming.

    Args:
        data_dir: a directory of TSVs.
        languages: which languages to use; empty means all.
        progress: called with a line of text now and then.

    Raises:
        DataError: see tsv.language_files and tsv.read_pairs; also an unknown language, or not one good pair.
    """
    files = tsv.language_files(data_dir)
    for lang in languages:
        if lang not in files:
            raise DataError(f"{data_dir} has no language {lang!r}{did_you_mean(lang, files)}")
    if languages:
        files = {lang: files[lang] for lang in sorted(set(languages))}
    digest = hashlib.blake2b(digest_size=16)
    total, pairs = tsv.LineCounts(), {}
    for i, (lang, path) in enumerate(files.items()):
        progress(f"reading {lang} ({i + 1} of {len(files)} languages)")
        counts = tsv.LineCounts()
        # The one pass that tells of bad lines; later ones skip them silently.
        for _ in tsv.read_pairs(path, counts, _log.warning):
            pass
        total += counts
        if counts.good:
            pairs[lang] = counts.good
        digest.update(f"{lang} {_content_hash(path)}\n".encode())
    if not pairs:
        lines = sum(total.skipped().values())
        why = (
            f"all {lines} lines are malformed: {total.skipped()}"
            if lines
            else "all files are empty"
        )
        raise DataError(f"no pairs in {str(data_dir)!r}: {why}; lines must be source<TAB>english")
    return Scan({lang: files[lang] for lang in pairs}, pairs, total.skipped(), digest.hexdigest())


def _content_hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
