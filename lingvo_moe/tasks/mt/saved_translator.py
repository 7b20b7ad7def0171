"""An exported model, used as a Translator; and how a translating function is called on Python lines."""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
import tensorflow_text  # noqa: F401 - registers the ops of exported tokenizers

from lingvo_moe.core.nested_map import NestedMap


class SavedTranslator:
    """An exported model, used as a Translator.

    Args:
        path: a SavedModel directory.

    Raises:
        ValueError: there is no SavedModel, or one of another kind.
    """

    def __init__(self, path: str):
        if not tf.saved_model.contains_saved_model(path):
            raise ValueError(f"{path}: no SavedModel there (no saved_model.pb); see tools.export")
        with quiet_absl():
            self._loaded = tf.saved_model.load(path)
        signature = self._loaded.signatures.get("serving_default")
        outputs = set(signature.structured_outputs) if signature else set()
        if not {"translations", "scores", "truncated"} <= outputs:
            raise ValueError(
                f"{path}: a SavedModel, but not one by tools.export: its outputs are {sorted(outputs)}"
            )
        self._signature = signature
        self._by_language = "language" in signature.structured_input_signature[1]

    def Translate(
        self, lines: Sequence[str | bytes], languages: str | Sequence[str] | None = None
    ) -> NestedMap:
        """Translates; see `translations_of` for arguments and what comes back."""

        def run(text: tf.Tensor, *language: tf.Tensor) -> Any:
            return self._signature(text=text, **({"language": language[0]} if language else {}))

        return translations_of(run, lines, languages, self._by_language)


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
        lines: N lines; bytes may hold anything.
        languages: the source language of each line, or of all; needed, and looked at, by models that route by it.
        by_language: whether this is one.

    Returns:
        NestedMap(translations: list of N lists of K str, scores: float32 [N,K], truncated: bool [N]).

    Raises:
        ValueError: no language where it is needed, or one that the model does not know.
    """
    encoded = [line.encode("utf-8", "replace") if isinstance(line, str) else line for line in lines]
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
