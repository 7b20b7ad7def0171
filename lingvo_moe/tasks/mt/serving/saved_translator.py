"""An exported model, used as a Translator; and how a translating function is called on Python lines."""

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import tensorflow as tf
import tensorflow_text  # noqa: F401 - registers the ops of exported tokenizers

from lingvo_moe.core.console.quiet import quiet
from lingvo_moe.core.files.copies import local
from lingvo_moe.core.files.manifest import ManifestError, verify_manifest
from lingvo_moe.core.files.store import check_place
from lingvo_moe.core.kernels import eight_bit
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.mt.decoding.line_stream import utf8_of

# TensorFlow Serving hands what lies in assets.extra through and does not look at it.
ABOUT, ABOUT_GENERATOR = "assets.extra/translator.json", "assets.extra/generator.json"
MANIFEST = "assets.extra/manifest.sha256"


class SavedFunctions:
    """An exported model. Every file of it is verified before any is used.

    Attributes:
        NAME: what it does, by which it is used.
        about: what the exporter said of it: model, params_override, step, languages.
        options: how it translates, with the attributes of TranslateOptions; or how it generates.
        languages: source languages by task id, of a model that routes by them; none of others.

    Raises:
        ManifestError: a file was changed, is missing or was added since it was exported.
        PathError: a path from which TensorFlow cannot load a model.
        ValueError: there is no SavedModel, or one that is not by tools.export, or weights of 8 bits where they cannot
            be; or one that does something else.
    """

    NAME: ClassVar[str]

    def __init__(self, path: str | os.PathLike):
        check_place(path, "--saved_model")
        path = local(path)
        _verify(path)
        if (does := use_of(path)) != self.NAME:
            raise ValueError(
                f"--saved_model={path}: this model does not {self.NAME}, it is for tools.{does}"
            )
        file = ABOUT if does == "translate" else ABOUT_GENERATOR
        self.about = json.loads((path / file).read_text("utf-8"))
        self.options = SimpleNamespace(**self.about.pop("options"))
        self.languages = tuple(self.about.get("languages", ()))
        if self.about.get("weights") == "int8":
            eight_bit.check_supported()
        with quiet_absl(), quiet():  # see translator.py: its tokenizer
            self._loaded = tf.saved_model.load(str(path))
        self._signature = self._loaded.signatures["serving_default"]


class SavedTranslator(SavedFunctions):
    """An exported model, used as a Translator; see SavedFunctions."""

    NAME = "translate"

    def Translate(
        self, lines: Sequence[str | bytes], languages: str | Sequence[str] | None = None
    ) -> NestedMap:
        """Translates; see `translations_of` for arguments and what comes back."""

        def run(text: tf.Tensor, *language: tf.Tensor) -> Any:
            return self._signature(text=text, **({"language": language[0]} if language else {}))

        return translations_of(run, lines, languages, bool(self.languages))


def use_of(path: str | os.PathLike) -> str:
    """The use of an exported model: 'generate' or 'translate'."""
    return "generate" if (local(path) / ABOUT_GENERATOR).is_file() else "translate"


def _verify(path: Path) -> None:
    """Raises ManifestError, or ValueError where nothing was exported, unless `path` is as it was exported."""
    if (path / MANIFEST).is_file():
        verify_manifest(path, MANIFEST)
    elif not tf.saved_model.contains_saved_model(str(path)):
        raise ValueError(f"{path}: no SavedModel there (no saved_model.pb); see tools.export")
    else:
        raise ManifestError(
            f"{path}: {MANIFEST}, the list of its files, is missing, so nothing says that they are whole:"
            " it is damaged, or not by this version of tools.export; export the model again"
        )


@contextlib.contextmanager
def quiet_absl() -> Iterator[None]:
    """Keeps TensorFlow from warning, for every function of a SavedModel, that it has no gradient or name there."""
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def translations_of(
    function: Any,
    lines: Sequence[str | bytes],
    languages: str | Sequence[str] | None = None,
    by_language: bool = False,
) -> NestedMap:
    """Calls a translating function on Python lines.

    Args:
        function: string [N] (and string [N], the languages) -> dict of translations, scores, truncated, as
            `Translator.translate`.
        lines: N lines; bytes may hold anything. In a string, half a surrogate pair is U+FFFD, as by HTTP.
        languages: the source language of each line, or of all; needed, and looked at, by models that route by it.
        by_language: whether this is one.

    Returns:
        NestedMap(translations: list of N lists of K str, scores: float32 [N,K], truncated: bool [N]).

    Raises:
        ValueError: no language where it is needed, or one that the model does not know.
    """
    encoded = [utf8_of(line) if isinstance(line, str) else line for line in lines]
    arguments: list[list] = [encoded]
    if by_language:
        if languages is None:
            raise ValueError("the model routes by the source language: give it (--language)")
        one = isinstance(languages, str)
        arguments.append([languages] * len(lines) if one else list(languages))
    try:
        out = function(*(tf.constant(a, tf.string, shape=[len(encoded)]) for a in arguments))
    except tf.errors.InvalidArgumentError as e:
        if "unknown source language" not in str(e):
            raise
        start = str(e).index("unknown source language")
        raise ValueError(str(e)[start:].split("]")[0]) from None
    texts = [[t.decode("utf-8", "replace") for t in row] for row in out["translations"].numpy()]
    return NestedMap(
        translations=texts, scores=out["scores"].numpy(), truncated=out["truncated"].numpy()
    )
