"""Reads the training files once before anything else, to check and count pairs and to compute a fingerprint.

Data made by tools.prepare needs no such pass: its summary has these figures.
"""

import dataclasses
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lingvo_moe.core.input.base_input import Progress, quiet
from lingvo_moe.tasks.text.data import tsv
from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.data.file_list import check_languages, data_files, local_data
from lingvo_moe.tasks.text.data.prepared import Prepared, content_digest, fingerprint
from lingvo_moe.tasks.text.data.sides import Side, Words, swapped

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Scan:
    """The result of a pass over the data."""

    files: dict[str, Path]  # the file of each language
    # The number of good pairs of each language; languages without any are left out everywhere.
    pairs: dict[str, int]
    skipped: dict[str, int]  # bad lines by reason, over all files
    fingerprint: str  # hex digest over languages and file contents
    # The data set of tools.prepare that the files are of, if they are.
    prepared: Prepared | None = None
    field: str = "text"  # the field of a text in files of JSON
    tidied: int = 0  # the version of tidy_text that the texts went through; 0: none
    texts: bool = False  # whether targets alone are used, or texts without a source

    @property
    def sides(self) -> tuple[str, ...]:
        """The sides that a vocabulary is trained for."""
        return ("target",) if self.texts else ("target", "source")

    def Pairs(self, lang: str) -> Iterator[tuple[str, str]]:
        """The `(source, english)` pairs of a language, read again; `("", text)` of texts. Raises DataError."""
        if self.prepared:  # no pass has looked at it
            self.prepared.listed.Verify([self.files[lang]])
        for source, target in tsv.read_pairs(self.files[lang], field=self.field):
            yield "" if self.texts else source, target


def scan(
    data_dir: str | os.PathLike,
    languages: Sequence[str] = (),
    progress: Progress = quiet,
    field: str | None = None,
) -> Scan:
    """Reads all training files once, streaming; those of a prepared data set are not read.

    `languages` are those to use; empty means all. With a `field` texts will do: see tsv.

    Raises:
        DataError: see data_files, tsv.read_pairs and Prepared.Of; also an unknown language, or not one good pair.
    """
    data_dir = local_data(data_dir)
    texts = field is not None
    files, listed = data_files(data_dir, texts=texts)
    for warning in (tsv.hidden_files(data_dir), tsv.unread_files(data_dir, files.values(), texts)):
        if warning:
            _log.warning("%s", warning)
    prepared, tidied = Prepared.Of(files, listed), listed.tidied if listed else 0
    field = field or "text"
    check_languages(data_dir, languages, files)
    if languages:
        files = {lang: files[lang] for lang in sorted(set(languages))}
    if prepared:
        chosen = {lang: prepared.digests[lang] for lang in files}
        pairs = {lang: prepared.pairs[lang] for lang in files}
        return Scan(files, pairs, {}, fingerprint(chosen), prepared, field, tidied, texts)
    digests: dict[str, str] = {}
    words: dict[str, list[Side]] = {}
    total, pairs = Counter[str](), {}
    for i, (lang, path) in enumerate(files.items()):
        progress(f"reading {lang} ({i + 1} of {len(files)} languages)")
        if listed:
            listed.Verify([path])
        counts = Counter[str]()
        # The only pass that reports bad lines; later ones skip them silently.
        of_file = Words()
        for pair in tsv.read_pairs(path, counts, _log.warning, field):
            of_file.Add(*pair)
        words[lang] = of_file.Shares()
        total += counts
        if counts["good"]:
            pairs[lang] = counts["good"]
        else:
            _log.warning("%s: left out: it %s", path, "has no good line" if counts else "is empty")
        of_json = f" {field}" * (".jsonl" in path.suffixes)
        digests[lang] = content_digest(path) + of_json
    _warn_of_sides(files, words)
    skipped = tsv.skipped_of(total)
    if not pairs:
        lines = sum(skipped.values())
        why = f"all {lines} lines are malformed: {skipped}" if lines else "all files are empty"
        right = "source<TAB>english"
        units = "pairs"
        if any(map(tsv.text_name, files.values())):
            units = "texts"
            right = f"texts, those of JSON objects with a string in the field {field!r}"
        raise DataError(f"no {units} in {str(data_dir)!r}: {why}; lines must be {right}")
    used = {lang: files[lang] for lang in pairs}
    return Scan(used, pairs, skipped, fingerprint(digests), None, field, tidied, texts)


def _warn_of_sides(files: Mapping[str, Path], words: Mapping[str, Sequence[Side]]) -> None:
    langs = [lang for lang in words if not lang.lower().startswith("en")]
    for i in swapped([words[lang] for lang in langs], "en"):
        _log.warning(
            "%s: source and target seem to be in each other's place: the source is English; lines must be"
            " source<TAB>english",
            files[langs[i]],
        )
