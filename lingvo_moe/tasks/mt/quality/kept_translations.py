"""Keeps finished translations on disk, so that an interrupted evaluation can resume."""

import contextlib
import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lingvo_moe.core.files.copies import local
from lingvo_moe.core.files.sealed import read_sealed, write_sealed
from lingvo_moe.core.runs.run_dir import RunDir
from lingvo_moe.core.runs.saved_steps import LIST, saved_steps

_log = logging.getLogger(__name__)
# Flags on which no translation depends.
_NO_TRANSLATORS = (
    "data_dir",
    "languages",
    "max_per_language",
    "input",
    "output",
    "resource_bounds",
    "bleu_tokenizer",
    "baselines",
    "rescore",
    "batch_size",
    "trust_run",
    "quiet",
)
# Lines, and the language of each -> one translation each.
TranslateLines = Callable[[list[Any], list[str]], Sequence[Any]]


def identity_of(flags: Mapping[str, Any], about: Mapping[str, Any]) -> list[object]:
    """The identity of a translator: every flag on which it could depend, its description, its files' times, and the
    digests of its checkpoints.

    Args:
        flags: the flags of a command by name, with `saved_model` or `logdir`.
        about: a description of its model, with the `step` of a run.
    """
    flags = {name: value for name, value in flags.items() if name not in _NO_TRANSLATORS}
    files = [Path(value) for value in flags.values() if isinstance(value, str)]
    files = [file for file in files if file.is_file()]
    checkpoints: list[str] = []
    if flags["saved_model"]:
        from lingvo_moe.tasks.text.decoding.saved_functions import MANIFEST  # with TensorFlow

        files.append(local(flags["saved_model"]) / MANIFEST)
    else:
        for run in about.get("members") or [{"logdir": flags["logdir"], **about}]:
            saved = saved_steps(RunDir(run["logdir"]).checkpoint_dir)  # which may be in a bucket
            for step in run.get("averaged_steps") or [run["step"]]:
                with contextlib.suppress(OSError):  # the trainer may have deleted it since
                    checkpoints.append(saved.Of(step).Read(LIST).decode())
    times = [file.stat().st_mtime_ns for file in files if file.exists()]
    return [flags, about, times, checkpoints]


class KeptTranslations:
    """Translates as `translate` does, but reuses earlier translations, also of other processes, from a directory.

    Each call has a file, named by a hash of the lines, their languages and the translator, so translations of another
    model, with other options or of other lines are never reused.

    Attributes:
        reused: how many lines had been translated before, by another object or process.
        translated: how many others there were.
        seconds: that all of them took to translate, whenever that was.
    """

    def __init__(
        self, translate: TranslateLines, directory: str | Path | None = None, identity: Any = None
    ):
        """Wraps a translator.

        Args:
            directory: the directory of stored translations; None stores none.
            identity: data that differs between translators: see identity_of.
        """
        self._translate, self._identity = translate, identity
        self._directory = Path(directory) if directory else None
        self._written: set[str] = set()  # the names of the files that this object wrote
        self.reused, self.translated, self.seconds = 0, 0, 0.0

    def __call__(self, lines: list[Any], langs: list[str]) -> Sequence[Any]:
        if self._directory is None:
            return self._new(lines, langs)[0]
        key = json.dumps([self._identity, lines, langs], sort_keys=True, default=repr)
        name = hashlib.sha256(key.encode()).hexdigest()[:32]
        file = self._directory / f"{name}.kept"
        warning = "kept translations: %s; the lines are translated again"
        if body := read_sealed(file, lambda why: _log.warning(warning, why)):
            saved = json.loads(body)
            if name in self._written:  # the same lines came twice
                self.translated += len(lines)
            else:
                self.reused += len(lines)
            self.seconds += saved["seconds"]
            return saved["translations"]
        translations, seconds = self._new(lines, langs)
        content = {"translations": list(translations), "seconds": seconds}
        write_sealed(file, json.dumps(content).encode())
        self._written.add(name)
        return translations

    def Clear(self) -> None:
        """Deletes all kept translations, also those of other translators; call it when the results are saved."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _new(self, lines: list[Any], langs: list[str]) -> tuple[Sequence[Any], float]:
        start = time.monotonic()
        translations = self._translate(lines, langs)
        seconds = time.monotonic() - start
        self.translated += len(lines)
        self.seconds += seconds
        return translations, seconds
