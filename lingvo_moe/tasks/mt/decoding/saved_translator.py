"""Translations of Python lines by a Translator or by an exported one."""

import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.private.tensorflow import unoptimized
from lingvo_moe.tasks.text.decoding.line_stream import utf8_of
from lingvo_moe.tasks.text.decoding.saved_functions import SavedFunctions


class SavedTranslator(SavedFunctions):
    """An exported model, used as a Translator; see SavedFunctions."""

    NAME = "translate"
    joins = False  # its function takes whole batches

    def Translate(
        self, lines: Sequence[str | bytes], languages: str | Sequence[str] | None = None
    ) -> NestedMap:
        """Translates lines; see `translations_of` for arguments and result."""
        return translations_of(self._loaded.translate, lines, languages, bool(self.languages))


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
        lines, languages, by_language: as of called_with.

    Returns:
        NestedMap(translations: list of N lists of K str, scores: float32 [N,K], truncated: bool [N]).

    Raises ValueError: as called_with.
    """
    out = called_with(function, lines, languages, by_language)
    texts = [[t.decode("utf-8", "replace") for t in row] for row in out["translations"].numpy()]
    return NestedMap(
        translations=texts, scores=out["scores"].numpy(), truncated=out["truncated"].numpy()
    )


def called_with(
    function: Any,
    lines: Sequence[str | bytes],
    languages: str | Sequence[str] | None = None,
    by_language: bool = False,
) -> dict[str, tf.Tensor]:
    """Calls a function of string [N], and of the languages, string [N], with Python lines; returns its result.

    Args:
        lines: N lines; bytes may hold anything. In a string, half a surrogate pair is U+FFFD, as by HTTP.
        languages: the source language of each line, or of all; needed, and looked at, by models that route by it. Of a
            model that translates from any language to any, SOURCE-TARGET.
        by_language: whether this is one.

    Raises:
        ValueError: no language where it is needed, or one that the model does not know.
    """
    encoded = [utf8_of(line) if isinstance(line, str) else line for line in lines]
    arguments: list[list] = [encoded]
    if by_language:
        if languages is None:
            raise ValueError("the model needs the language of each line: give it (--language)")
        one = isinstance(languages, str)
        arguments.append([languages] * len(lines) if one else list(languages))
    try:
        tensors = (tf.constant(a, tf.string, shape=[len(encoded)]) for a in arguments)
        with unoptimized():
            out: dict[str, tf.Tensor] = function(*tensors)
    except tf.errors.InvalidArgumentError as e:
        if not (unknown := re.search(r"unknown (source )?language[^]]*", str(e))):
            raise
        raise ValueError(unknown[0]) from None
    return out
