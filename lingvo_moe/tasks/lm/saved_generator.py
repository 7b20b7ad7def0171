"""Continuations of prompts by a Generator or by an exported one, called with Python values; the latter needs no JAX."""

import os
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from lingvo_moe.core.decode.ranges import Sampling
from lingvo_moe.core.files.copies import local
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.text.data.file_list import check_tidied
from lingvo_moe.tasks.text.decoding.line_stream import utf8_of
from lingvo_moe.tasks.text.decoding.saved_functions import SavedFunctions
from lingvo_moe.tasks.text.vocabulary.tokenizer_json import JsonVocabulary

TOKENIZER = "assets.extra/tokenizer.json"  # of an export whose functions are of ids

# The inputs of a generating function beside `text`: of each prompt a number, or two.
SETTINGS = {
    "max_tokens": tf.TensorSpec([], tf.int32),
    "temperature": tf.TensorSpec([], tf.float32),
    "top_k": tf.TensorSpec([], tf.int32),
    "top_p": tf.TensorSpec([], tf.float32),
    "seed": tf.TensorSpec([2], tf.int32),
}


class Texts:
    """Calls the functions `generate`, `begin` and `more` of a generator with Python values."""

    NAME = "generate"
    options: Any
    generate: Any
    begin: Any
    more: Any
    vocabulary: JsonVocabulary | None = None  # None: the functions are of strings

    def Generate(self, prompts: Sequence[str | bytes], settings: Sequence[Sampling]) -> NestedMap:
        """Continues N prompts, each with its own settings.

        Returns:
            NestedMap(texts: list of str, tokens: int32 [N], finished: bool [N], truncated: bool [N]); see
            Generator._Generate.

        Raises ValueError: samples are asked for of a beam search, or more tokens than options.max_length.
        """
        ids, arguments = self._Arguments(prompts, settings)
        out = {name: value.numpy() for name, value in self.generate(*arguments).items()}
        if self.vocabulary is None:
            texts = [text.decode("utf-8", "replace") for text in out["texts"]]
        else:
            each = zip(ids, out.pop("ids"), out["tokens"], strict=True)
            texts = [self._Text(prompt, new[:tokens]) for prompt, new, tokens in each]
        return NestedMap(out, texts=texts)

    def Stream(self, prompt: str | bytes, settings: Sampling) -> Iterator[tuple[str, bool | None]]:
        """Continues a prompt, and yields what text each step adds; and whether the model ended it, at the end, else
        None.

        Raises ValueError: as Generate, or options have a beam.
        """
        if self.options.beam_size > 1:
            raise ValueError("a beam search has no text before its end: it cannot be streamed")
        ids, arguments = self._Arguments([prompt], [settings])
        state, sent, over = self.begin(*arguments), "", False
        while not over:
            state, found, over, finished = self.more(*state)
            if self.vocabulary is None:
                whole = found.numpy().decode("utf-8", "replace")
            else:
                whole = self._Text(ids[0], found.numpy())
            # The first bytes of a character that is not whole yet read as U+FFFD.
            ready = whole if over else whole.rstrip("\ufffd")
            yield ready[len(sent) :], bool(finished) if over else None
            sent = ready if len(ready) > len(sent) else sent

    def Translate(
        self, lines: Sequence[bytes], settings: Sequence[Sampling] | None = None
    ) -> NestedMap:
        """Generate as the server calls it, in the form of Translator.Translate; without settings, to warm up."""
        if settings is None:
            settings = [Sampling(1)] * len(lines)
            if self.options.beam_size == 1:
                list(self.Stream(lines[0], settings[0]))
        out = self.Generate(lines, settings)
        out.translations = [[text] for text in out.texts]
        out.scores = [[0.0] for _ in out.texts]  # there are none
        return out

    def _Text(self, prompt: Sequence[int], new: Sequence[int]) -> str:
        """The text of new tokens: what the text of all has more than the prompt's."""
        assert self.vocabulary
        before = self.vocabulary.Decode(prompt)
        return self.vocabulary.Decode([*prompt, *new])[len(before) :]

    def _Arguments(
        self, prompts: Sequence[str | bytes], settings: Sequence[Sampling]
    ) -> tuple[list[list[int]], list]:
        """The ids that are read of each prompt, of a vocabulary; and what functions take."""
        values = [utf8_of(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        most = self.options.max_length
        for each in settings:
            if each.max_tokens > most:
                raise ValueError(
                    f"max_tokens={each.max_tokens} is more than the {most} that this generator was made for"
                )
            if self.options.beam_size > 1 and each.temperature:
                raise ValueError(
                    f"temperature={each.temperature} has no effect in a beam search; choose one of the two"
                )
        rows = [each.Values() for each in settings]
        tensors = [
            tf.constant([row[i] for row in rows], spec.dtype, [len(values), *spec.shape])
            for i, spec in enumerate(SETTINGS.values())
        ]
        if self.options.beam_size > 1:
            tensors = tensors[:1]
        if self.vocabulary is None:
            return [], [tf.constant(values, tf.string), *tensors]
        ids = self.vocabulary.EncodeBatch([value.decode("utf-8", "replace") for value in values])
        ragged = tf.ragged.constant(ids, tf.int32, ragged_rank=1)
        most = self.options.max_source_length
        given = [ragged.to_tensor(), tf.cast(ragged.row_lengths(), tf.int32)]
        return [one[-most:] for one in ids], [*given, *tensors]


class SavedGenerator(SavedFunctions, Texts):
    """An exported generator, used as a Generator; see SavedFunctions."""

    def __init__(self, path: str | os.PathLike):
        super().__init__(path)
        self.generate = self._loaded.generate
        if (file := local(path) / TOKENIZER).is_file():
            self.vocabulary = JsonVocabulary(file.read_bytes(), file)
            self.vocabulary.tidied = check_tidied(self.about.get("tidied", 0), path)
        if self.options.beam_size == 1:
            self.begin, self.more = self._loaded.begin, self._loaded.more

    def Inputs(self) -> list[str]:
        return [*SETTINGS][: 1 if self.options.beam_size > 1 else None]
