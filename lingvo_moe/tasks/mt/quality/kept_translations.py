"""Keeps finished translations on disk, so that an interrupted evaluation can resume."""

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lingvo_moe.core.files.sealed import read_sealed, write_sealed

_log = logging.getLogger(__name__)
# Lines, and the language of each -> one translation each.
TranslateLines = Callable[[list[str], list[str]], Sequence[str]]


class KeptTranslations:
    """Translates as `translate` does, but reuses earlier translations, also of other processes, from a directory.

    Each call has a file, named by a hash of the lines, their languages and the translator, so translations of another
    model, with other options or of other lines are never reused.

    Attributes:
        reused: how many lines were found.
        translated: how many were not.
        seconds: that all of them took to translate, whenever that was.
    """

    def __init__(
        self, translate: TranslateLines, directory: str | Path | None = None, identity: Any = None
    ):
        """Wraps a translator.

        Args:
            directory: the directory of stored translations; None stores none.
            identity: JSON data that differs between translators.
        """
        self._translate, self._identity = translate, identity
        self._directory = Path(directory) if directory else None
        self.reused, self.translated, self.seconds = 0, 0, 0.0

    def __call__(self, lines: list[str], langs: list[str]) -> Sequence[str]:
        if self._directory is None:
            return self._new(lines, langs)[0]
        key = json.dumps([self._identity, lines, langs], sort_keys=True)
        name = hashlib.sha256(key.encode()).hexdigest()[:32]
        file = self._directory / f"{name}.kept"
        warning = "kept translations: %s; the lines are translated again"
        if body := read_sealed(file, lambda why: _log.warning(warning, why)):
            kept = json.loads(body)
            self.reused += len(lines)
            self.seconds += kept["seconds"]
            return kept["translations"]
        translations, seconds = self._new(lines, langs)
        content = {"translations": list(translations), "seconds": seconds}
        write_sealed(file, json.dumps(content).encode())
        return translations

    def Clear(self) -> None:
        """Deletes all kept translations, also those of other translators; call it when the results are saved."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _new(self, lines: list[str], langs: list[str]) -> tuple[Sequence[str], float]:
        start = time.monotonic()
        translations = self._translate(lines, langs)
        seconds = time.monotonic() - start
        self.translated += len(lines)
        self.seconds += seconds
        return translations, seconds
