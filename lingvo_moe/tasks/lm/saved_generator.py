"""Continuations of prompts by a Generator or by an exported one, called with Python values; the latter needs no JAX."""

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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

PROMPT = "prompt_ids"  # the input of such functions: ids of prompts, the first of each begins it
# A text, or the ids of a conversation with all marks, see Chat.
Prompt = str | bytes | Sequence[int]

# The inputs of a generating function beside `text`: of each prompt a number, or two.
SETTINGS = {
    "max_tokens": tf.TensorSpec([], tf.int32),
    "temperature": tf.TensorSpec([], tf.float32),
    "top_k": tf.TensorSpec([], tf.int32),
    "top_p": tf.TensorSpec([], tf.float32),
    "min_p": tf.TensorSpec([], tf.float32),
    "repetition_penalty": tf.TensorSpec([], tf.float32),
    "seed": tf.TensorSpec([2], tf.int32),
}


@dataclass(frozen=True)
class Continuation:
    """A text that continues a prompt.

    Attributes:
        text: without the prompt, and without what stopped it.
        tokens: of how many tokens, those of what stopped it too.
        prompt_tokens: of how many tokens the prompt was read.
        finish_reason: 'stop' where the model ended the text, or one of `stop` did; 'length' after max_tokens.
        truncated: whether the beginning of the prompt was left out.
        logprobs: each token's piece and log-probability; None where they are not asked for.
    """

    text: str
    tokens: int
    prompt_tokens: int
    finish_reason: str
    truncated: bool
    logprobs: list[tuple[str, float | None]] | None

    def About(self) -> dict[str, Any]:
        """All but the text and `truncated`, as JSON has it; logprobs where they are asked for."""
        about: dict[str, Any] = {"tokens": self.tokens, "finished": self.finish_reason == "stop"}
        about |= {"finish_reason": self.finish_reason, "prompt_tokens": self.prompt_tokens}
        return about if self.logprobs is None else {**about, "logprobs": self.logprobs}


class Texts:
    """Calls the functions `generate`, `begin` and `more` of a generator with Python values."""

    NAME = "generate"
    options: Any
    generate: Any
    begin: Any = None
    more: Any = None
    pieces: Any = None  # from ids, where functions are of strings
    vocabulary: JsonVocabulary | None = None  # None: the functions are of strings

    def Prepare(self) -> None:
        """Makes `begin` and `more`, where they are not there yet."""

    def Call(self, arguments: Sequence[Any]) -> dict[str, tf.Tensor]:
        """Returns the tensors of `generate`."""
        return self.generate(*arguments)

    def Begin(self, arguments: Sequence[Any]) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Returns what `begin` does."""
        self.Prepare()
        return self.begin(*arguments)

    def More(self, state: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], dict, tf.Tensor]:
        """Returns what `more` does."""
        return self.more(*state)

    def Generate(
        self, prompts: Sequence[Prompt], settings: Sequence[Sampling]
    ) -> list[Continuation]:
        """Continues N prompts, each with its own settings; those with stop strings one after the other.

        Raises ValueError: a setting that a beam search does not have, or more tokens than options.max_length.
        """
        self._Check(settings)
        whole = [i for i, sampling in enumerate(settings) if not sampling.stop]
        rows = self._Together([prompts[i] for i in whole], [settings[i] for i in whole])
        by_prompt = dict(zip(whole, rows, strict=True))
        for i in sorted({*range(len(settings))} - {*whole}):
            *_, (_, end) = self.Stream(prompts[i], settings[i])
            assert end is not None
            by_prompt[i] = end
        return [by_prompt[i] for i in range(len(settings))]

    def Stream(
        self, prompt: Prompt, settings: Sampling
    ) -> Iterator[tuple[str, Continuation | None]]:
        """Continues a prompt, and yields what text each step adds; and at the end the whole, else None.

        Text that may be the beginning of a stop string comes when it is known to be none.

        Raises ValueError: as Generate, or options have a beam.
        """
        self._Check([settings])
        if self.options.beam_size > 1:
            raise ValueError("a beam search has no text before its end: it cannot be streamed")
        ids, arguments = self._Arguments([prompt], [settings])
        (state, truncated), sent, ends = self.Begin(arguments), 0, False
        prompt_tokens = int(state[0].shape[1]) - 1
        while not ends:
            state, tensors, over = self.More(state)
            columns = {name: value.numpy() for name, value in tensors.items()}
            columns |= {"truncated": [bool(truncated)], "prompt_tokens": [prompt_tokens]}
            row = self._Row(ids[0] if ids else [], columns, 0, settings)
            at = min((i for i in map(row.text.find, settings.stop) if i >= 0), default=-1)
            ends = at >= 0 or bool(over)
            if at >= 0:
                row = dataclasses.replace(row, text=row.text[:at], finish_reason="stop")
            # The first bytes of a character that is not whole yet read as U+FFFD.
            ready = row.text if ends else _before_a_stop(row.text.rstrip("\ufffd"), settings.stop)
            yield ready[sent:], row if ends else None
            sent = max(sent, len(ready))

    def Translate(
        self, lines: Sequence[Prompt], settings: Sequence[Sampling] | None = None
    ) -> NestedMap:
        """Generate as the server calls it, in the form of Translator.Translate; without settings, to warm up."""
        if settings is None:
            settings = [Sampling(1)] * len(lines)
            if self.options.beam_size == 1:
                list(self.Stream(lines[0], settings[0]))
        rows = self.Generate(lines, settings)
        return NestedMap(
            translations=[[row.text] for row in rows],
            scores=[[0.0] for _ in rows],  # there are none
            truncated=[row.truncated for row in rows],
            about=[row.About() for row in rows],
        )

    def _Together(
        self, prompts: Sequence[Prompt], settings: Sequence[Sampling]
    ) -> list[Continuation]:
        """Generate, without stop strings."""
        ids, arguments = self._Arguments(prompts, settings)
        if not prompts:
            return []
        out = {name: value.numpy() for name, value in self.Call(arguments).items()}
        return [self._Row(ids[i] if ids else [], out, i, one) for i, one in enumerate(settings)]

    def _Row(
        self, prompt: Sequence[int], columns: Mapping[str, Any], i: int, settings: Sampling
    ) -> Continuation:
        """The continuation of the ids of a prompt, from row i of what `generate` returns."""
        tokens, logprobs = int(columns["tokens"][i]), None
        new = columns["ids"][i][:tokens].tolist()
        if self.vocabulary is None:
            text = columns["texts"][i].decode("utf-8", "replace")
        else:
            text = self._Text(prompt, new)
        if settings.logprobs:
            if self.vocabulary is None:
                pieces = [
                    piece.decode() for piece in self.pieces(tf.constant(new, tf.int32)).numpy()
                ]
            else:
                pieces = self.vocabulary.Pieces(new)
            scored = zip(pieces, columns["log_probs"][i][:tokens].tolist())
            logprobs = [(p, round(x, 6) if math.isfinite(x) else None) for p, x in scored]
        reason = "stop" if columns["finished"][i] else "length"
        prompt_tokens, truncated = int(columns["prompt_tokens"][i]), bool(columns["truncated"][i])
        return Continuation(text, tokens, prompt_tokens, reason, truncated, logprobs)

    def _Text(self, prompt: Sequence[int], new: Sequence[int]) -> str:
        """The text of new tokens: what the text of all has more than the prompt's, after the last mark of an end."""
        assert self.vocabulary
        end = self.vocabulary.eos_id
        prompt = prompt[max((i + 1 for i, one in enumerate(prompt) if one == end), default=0) :]
        before = self.vocabulary.Decode(prompt)
        return self.vocabulary.Decode([*prompt, *new])[len(before) :]

    def _Check(self, settings: Sequence[Sampling]) -> None:
        """Raises ValueError as Generate."""
        most = self.options.max_length
        for sampling in settings:
            if sampling.max_tokens > most:
                raise ValueError(
                    f"max_tokens={sampling.max_tokens} is more than the {most} that this generator was made for"
                )
            if self.options.beam_size > 1 and (names := sampling.NotOfABeam()):
                value = getattr(sampling, names[0])
                raise ValueError(f"{names[0]}={value} has no effect in a beam search; leave it out")

    def _Arguments(
        self, prompts: Sequence[Prompt], settings: Sequence[Sampling]
    ) -> tuple[list[list[int]], list]:
        """The ids that are read of each prompt, of a vocabulary; and what functions take."""
        values = [utf8_of(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        rows = [sampling.Values() for sampling in settings]
        tensors = [
            tf.constant([row[i] for row in rows], spec.dtype, [len(values), *spec.shape])
            for i, spec in enumerate(SETTINGS.values())
        ]
        if self.options.beam_size > 1:
            tensors = tensors[:1]
        if self.vocabulary is None:
            return [], [tf.constant(values, tf.string), *tensors]
        texts = [value.decode("utf-8", "replace") for value in values if isinstance(value, bytes)]
        of_texts, begin = iter(self.vocabulary.EncodeBatch(texts)), self.vocabulary.bos_id
        ids = [
            [begin, *next(of_texts)] if isinstance(value, bytes) else [*value] for value in values
        ]
        ragged = tf.ragged.constant(ids, tf.int32, ragged_rank=1)
        most = self.options.max_source_length
        arguments = [ragged.to_tensor(), tf.cast(ragged.row_lengths(), tf.int32)]
        return [one[1:][-most:] for one in ids], [*arguments, *tensors]


class SavedGenerator(SavedFunctions, Texts):
    """An exported generator, used as a Generator; see SavedFunctions."""

    def __init__(self, path: str | os.PathLike):
        super().__init__(path)
        self.generate = self._loaded.generate
        if (file := local(path) / TOKENIZER).is_file():
            tidied = check_tidied(self.about.get("tidied", 0), path)
            self.vocabulary = JsonVocabulary(file.read_bytes(), file, tidied)
            self._CheckNames([PROMPT])
        if self.options.beam_size == 1:
            self.begin, self.more = self._loaded.begin, self._loaded.more
        if self.vocabulary is None:
            self.pieces = self._loaded.pieces

    def Names(self) -> list[str]:
        return ["prompt_tokens", *[*SETTINGS][: 1 if self.options.beam_size > 1 else None]]


def _before_a_stop(text: str, stops: Sequence[str]) -> str:
    """The text without the longest end that is the beginning of a stop string."""
    for start in range(max(0, len(text) + 1 - max(map(len, stops), default=0)), len(text)):
        if any(stop.startswith(text[start:]) for stop in stops):
            return text[:start]
    return text
