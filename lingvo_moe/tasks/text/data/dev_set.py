"""Reads the held-out pairs of a data directory, in order and unpacked, for BLEU."""

import itertools
import logging
import os
from collections.abc import Iterator, Sequence

from lingvo_moe.tasks.text.data import tsv
from lingvo_moe.tasks.text.data.errors import DataError, NoDevSetError
from lingvo_moe.tasks.text.data.file_list import check_languages, data_files, local_data

_DEV = "dev"
_log = logging.getLogger(__name__)


class DevSet:
    """Pairs by language, read when they are requested.

    Example:
        >>> for lang, pairs in DevSet("corpus", max_per_language=20).items(): ...
    """

    def __init__(
        self,
        data_dir: str | os.PathLike,
        max_per_language: int | None = None,
        languages: Sequence[str] = (),
        field: str | None = None,
    ):
        """Finds the files of `<data_dir>/dev`; `field` as of scan.

        Raises:
            NoDevSetError: there is no such directory.
            DataError: there are none in it, a language is not among them, or they are not those that a tool has listed.
        """
        data_dir = local_data(data_dir)
        directory = data_dir / _DEV
        if data_dir.is_dir() and not directory.is_dir():
            if data_dir.resolve().name == "dev":
                raise NoDevSetError(
                    f"{str(data_dir)!r} has no dev directory, but seems to be one: give the directory that it"
                    f" is in, {str(data_dir.resolve().parent)!r}"
                )
            raise NoDevSetError(
                f"{str(data_dir)!r} has no dev directory; put held-out pairs into {directory}/<lang>.tsv.gz"
            )
        self._files, self._listed = data_files(data_dir, _DEV, field is not None)
        self._field = field or "text"
        self._max = max_per_language
        self._told: set[str] = set()  # languages that were read before
        self._directory = directory
        check_languages(directory, languages, self._files)
        self.languages: list[str] = sorted(set(languages) or self._files)

    def __getitem__(self, lang: str) -> list[tuple[str, str]]:
        """The `(source, reference)` pairs of a language, at most `max_per_language`, in the file's order.

        Raises DataError: there are none, or their file is damaged.
        """
        check_languages(self._directory, [lang], self._files)
        if self._listed and lang not in self._told:
            self._listed.Verify([self._files[lang]])
        warn = None if lang in self._told else _log.warning
        self._told.add(lang)
        all_pairs = tsv.read_pairs(self._files[lang], warn=warn, field=self._field)
        pairs = list(itertools.islice(all_pairs, self._max))
        if not pairs:
            raise DataError(f"{self._files[lang]}: no good line; lines must be source<TAB>english")
        return pairs

    def items(self) -> Iterator[tuple[str, list[tuple[str, str]]]]:
        """`(language, pairs)`, one language at a time."""
        for lang in self.languages:
            yield lang, self[lang]
