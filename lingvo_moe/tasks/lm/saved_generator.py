"""Continuations of prompts by a Generator or by an exported one, called with Python values; the latter needs no JAX."""

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_moe.core.decode.ranges import Sampling
from lingvo_moe.core.files.copies import local
from lingvo_moe.core.kernels.weights import FEWEST_ROWS
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.lm.running_batch import RunningBatch
from lingvo_moe.tasks.text.data.file_list import check_tidied
from lingvo_moe.tasks.text.decoding.line_stream import utf8_of
from lingvo_moe.tasks.text.decoding.saved_functions import SavedFunctions
from lingvo_moe.tasks.text.decoding.text_batch import RunningText, TextBatch, pages_of
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
        draft: how many tokens a draft proposed, and how many of these the model took; None without a draft.
    """

    text: str
    tokens: int
    prompt_tokens: int
    finish_reason: str
    truncated: bool
    logprobs: list[tuple[str, float | None]] | None
    draft: tuple[int, int] | None = None

    @property
    def texts(self) -> list[str]:
        """The text alone, as of a search for several."""
        return [self.text]

    @property
    def scores(self) -> list[float]:
        """A number for it, which says nothing."""
        return [0.0]

    def About(self) -> dict[str, Any]:
        """All but the text and `truncated`, as JSON has it; logprobs where they are asked for."""
        about: dict[str, Any] = {"tokens": self.tokens, "finished": self.finish_reason == "stop"}
        about |= {"finish_reason": self.finish_reason, "prompt_tokens": self.prompt_tokens}
        about |= dict(zip(("draft_tokens", "draft_tokens_taken"), self.draft or ()))
        return about if self.logprobs is None else {**about, "logprobs": self.logprobs}


class Texts:
    """Calls the functions of a generator with Python values: `generate`; and without a beam `pool`, `fill` and `step`,
    which a RunningBatch calls. Where functions are of strings: `pieces` and `texts_of` of ids, `ids_of` of strings.

    Attributes:
        fewest_rows: of a step, see PackedWeights.
    """

    NAME = "generate"
    fewest_rows = FEWEST_ROWS
    _draft: Callable[[], "Texts | None"] = staticmethod(lambda: None)  # tf.Module would track it
    options: Any
    generate: Any
    pieces: Any = None
    ids_of: Any = None
    texts_of: Any = None
    vocabulary: JsonVocabulary | None = None  # None: the functions are of strings

    def Call(self, arguments: Sequence[Any]) -> dict[str, tf.Tensor]:
        """Returns the tensors of `generate`."""
        return self.generate(*arguments)

    def CallPaged(self, name: str, arguments: Sequence[Any]) -> dict[str, tf.Tensor]:
        """Returns the tensors of `pool`, `fill` or `step`."""
        return getattr(self, name)(*arguments)

    @property
    def joins(self) -> bool:
        """Whether texts can join a batch."""
        return int(self.options.beam_size) == 1

    @property
    def draft(self) -> "Texts | None":
        """The model that proposes tokens."""
        return self._draft()

    def Pool(self, pages: int) -> list[tf.Tensor]:
        """See PagedFunctions."""
        return _pool_of(self.CallPaged("pool", [tf.constant(pages)]))

    def Batch(self, rows: int, cache_bytes: int) -> TextBatch[RunningText]:
        """A batch of so many rows, whose pages have at most so many bytes; of no more pages than rows can use."""
        o, models = self.options, [self, self.draft] if self.draft else [self]
        pools = [x for model in models for x in model.Pool(1)]
        one = sum(np.prod(x.shape) * x.dtype.size for x in pools)
        longest = pages_of(1 + o.max_source_length + o.max_length)
        return RunningBatch(self, rows, int(min(cache_bytes // one, rows * longest)), self.draft)

    def Fill(self, places: Sequence[Any], pool: list[tf.Tensor]) -> list[tf.Tensor]:
        """See PagedFunctions."""
        return _pool_of(self.CallPaged("fill", [*map(tf.constant, places), *pool]))

    def Step(
        self, places: Sequence[Any], more: Sequence[Any], pool: list[tf.Tensor]
    ) -> tuple[list[tf.Tensor], np.ndarray, np.ndarray, Mapping[str, tf.Tensor]]:
        """See PagedFunctions."""
        before, step, *values = more
        specs = list(SETTINGS.values())[1:]
        settings = [tf.constant(value, spec.dtype) for value, spec in zip(values, specs)]
        arguments = [*map(tf.constant, (*places, before, step)), *settings, *pool]
        shape = places[0].shape
        out = self.CallPaged("step" if shape[1] == 1 else "verify", arguments)
        tokens, log_probs = (out[name].numpy().reshape(shape) for name in ("tokens", "log_probs"))
        return _pool_of(out), tokens, log_probs, out

    def Generate(
        self, prompts: Sequence[Prompt], settings: Sequence[Sampling]
    ) -> list[Continuation]:
        """Continues N prompts, each with its own settings.

        Raises ValueError: a setting that a beam search does not have, or more tokens than options.max_length.
        """
        self._Check(settings)
        whole = [i for i, sampling in enumerate(settings) if self._RunsWhole(sampling)]
        rows = self._Together([prompts[i] for i in whole], [settings[i] for i in whole])
        by_prompt = dict(zip(whole, rows, strict=True))
        rest = sorted({*range(len(settings))} - {*whole})
        answers = [self.Begin(prompts[i], settings[i]) for i in rest]
        for number, (_, end) in self._Running(answers):
            if end:
                by_prompt[rest[number]] = end
        return [by_prompt[i] for i in range(len(settings))]

    def Stream(
        self, prompt: Prompt, settings: Sampling
    ) -> Iterator[tuple[str, Continuation | None]]:
        """Continues a prompt, and yields what text each step adds; and at the end the whole, else None.

        Text that may be the beginning of a stop string comes when it is known to be none.

        Raises ValueError: as Generate, or options have a beam.
        """
        for _, news in self._Running([self.Begin(prompt, settings)]):
            yield news

    def Begin(self, prompt: Prompt, settings: Sampling) -> "Answer":
        """The answer to a prompt, which can join a RunningBatch. Raises ValueError: as Stream."""
        self._Check([settings])
        if self.options.beam_size > 1:
            raise ValueError("a beam search has no text before its end: it cannot be streamed")
        ids, most = self._PromptIds([prompt])[0], self.options.max_source_length
        text = RunningText([ids[0], *ids[1:][-most:]], settings)
        return Answer(self, text, len(ids) > most + 1)

    def _RunsWhole(self, settings: Sampling) -> bool:
        """Whether a prompt is one of those that `generate` continues together, and not of a batch of steps."""
        return not (settings.stop or self.draft)

    def _Running(self, answers: Sequence["Answer"]) -> Iterator[tuple[int, tuple]]:
        """Runs answers in a batch of their own; yields their numbers and news."""
        numbers = {answer.text: i for i, answer in enumerate(answers)}
        if not answers:
            return
        batch = self._BatchOf([*numbers])
        for text in numbers:
            batch.Join(text)
        while batch.running or batch.waiting:
            texts = batch.Step()
            for text, read in zip(texts, self.Read(texts)):
                news = answers[numbers[text]].News(read)
                if news[1]:
                    batch.Leave(text)
                yield numbers[text], news

    def _BatchOf(self, texts: Sequence[RunningText]) -> TextBatch[RunningText]:
        """A batch for these texts alone."""
        rows = min(len(texts), self.options.rows)
        longest = max(pages_of(len(text.ids) + text.settings.max_tokens) for text in texts)
        return RunningBatch(self, rows, rows * longest, self.draft)

    def Read(self, texts: Sequence[RunningText]) -> list[bytes | None]:
        """The new tokens of each as text, where a function of all of them does that; see Answer.News."""
        if self.vocabulary or not texts:
            return [None] * len(texts)
        columns = [text.ids[1 : text.prompt] for text in texts], [text.new for text in texts]
        arguments = []
        for rows in columns:
            arguments += [
                np.concatenate(rows).astype(np.int32),
                np.array([*map(len, rows)], np.int32),
            ]
        return self.texts_of(*map(tf.constant, arguments)).numpy().tolist()

    def Translate(
        self, lines: Sequence[Prompt], settings: Sequence[Sampling] | None = None
    ) -> NestedMap:
        """Generate as the server calls it, in the form of Translator.Translate; without settings, to warm up."""
        if settings is None:
            settings = [Sampling(1)] * len(lines)
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
            scored = zip(self._Pieces(new), columns["log_probs"][i][:tokens].tolist())
            logprobs = [(p, round(x, 6) if math.isfinite(x) else None) for p, x in scored]
        reason = "stop" if columns["finished"][i] else "length"
        prompt_tokens, truncated = int(columns["prompt_tokens"][i]), bool(columns["truncated"][i])
        return Continuation(text, tokens, prompt_tokens, reason, truncated, logprobs)

    def _Pieces(self, ids: Sequence[int]) -> list[str]:
        """The piece that each id stands for."""
        if self.vocabulary is not None:
            return self.vocabulary.Pieces(ids)
        return [piece.decode() for piece in self.pieces(tf.constant(ids, tf.int32)).numpy()]

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
        ids = self._PromptIds(values)
        ragged = tf.ragged.constant(ids, tf.int32, ragged_rank=1)
        most = self.options.max_source_length
        arguments = [ragged.to_tensor(), tf.cast(ragged.row_lengths(), tf.int32)]
        return [one[1:][-most:] for one in ids], [*arguments, *tensors]

    def _PromptIds(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """The ids of each prompt, of all its tokens, after the mark that begins it."""
        values = [utf8_of(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        if self.vocabulary is None:
            return [self.ids_of(tf.constant(value)).numpy().tolist() for value in values]
        texts = [value.decode("utf-8", "replace") for value in values if isinstance(value, bytes)]
        of_texts, begin = iter(self.vocabulary.EncodeBatch(texts)), self.vocabulary.bos_id
        return [
            [begin, *next(of_texts)] if isinstance(value, bytes) else [*value] for value in values
        ]


class SavedGenerator(SavedFunctions, Texts):
    """An exported generator, used as a Generator; see SavedFunctions."""

    def __init__(self, path: str | os.PathLike):
        super().__init__(path)
        self.generate = self._loaded.generate
        if (file := local(path) / TOKENIZER).is_file():
            tidied = check_tidied(self.about.get("tidied", 0), path)
            self.vocabulary = JsonVocabulary(file.read_bytes(), file, tidied)
            self._CheckNames([PROMPT])
        names = ["pool", "fill", "step"] if self.options.beam_size == 1 else []
        names += ["pieces", "ids_of", "texts_of"] if self.vocabulary is None else []
        self._CheckThere(names, dir(self._loaded))
        vars(self).update({name: getattr(self._loaded, name) for name in names})

    def Names(self) -> list[str]:
        return ["prompt_tokens", *[*SETTINGS][: 1 if self.options.beam_size > 1 else None]]


class Answer:
    """An answer that comes token by token: the text that a RunningBatch continues, read."""

    def __init__(self, texts: Texts, text: RunningText, truncated: bool):
        self._texts, self.text, self._truncated, self._sent = texts, text, truncated, 0

    def News(self, read: bytes | None) -> tuple[str, Continuation | None]:
        """The text that the last tokens add; and at the end the whole, else None.

        Text that may be the beginning of a stop string comes when it is known to be none.

        Args:
            read: from Texts.Read.
        """
        text, row = self.text, self._Row(read)
        stops, at = text.settings.stop, self._StopOf(row)
        # Of tokens that came together, some may be behind a stop.
        while at >= 0 and len(text.new) > 1:
            last = text.ids.pop(), text.log_probs.pop()
            shorter = self._Row(self._texts.Read([text])[0])
            if self._StopOf(shorter) < 0:
                text.ids.append(last[0])
                text.log_probs.append(last[1])
                break
            row, at = shorter, self._StopOf(shorter)
        if at >= 0:
            row = dataclasses.replace(row, text=row.text[:at], finish_reason="stop")
        ends = at >= 0 or bool(text.reason)
        # The first bytes of a character that is not whole yet read as U+FFFD.
        ready = row.text if ends else _before_a_stop(row.text.rstrip("\ufffd"), stops)
        news = ready[self._sent :], row if ends else None
        self._sent = max(self._sent, len(ready))
        return news

    def _StopOf(self, row: Continuation) -> int:
        """The place of the first stop string in a text; -1 where there is none."""
        return min((i for i in map(row.text.find, self.text.settings.stop) if i >= 0), default=-1)

    def _Row(self, read: bytes | None) -> Continuation:
        """The continuation so far."""
        text, prompt = self.text, self.text.ids[: self.text.prompt]
        columns = {
            "ids": [np.asarray(text.new, np.int32)],
            "tokens": [len(text.new)],
            "finished": [text.reason == "stop"],
            "log_probs": [np.asarray(text.log_probs, np.float32)],
            "truncated": [self._truncated],
            "prompt_tokens": [text.prompt - 1],
            "texts": [read],
        }
        row = self._texts._Row(prompt[1:], columns, 0, text.settings)
        draft = (text.drafted, text.taken) if self._texts.draft else None
        return dataclasses.replace(row, draft=draft)


def _pool_of(tensors: Mapping[str, tf.Tensor]) -> list[tf.Tensor]:
    """The tensors of a pool, among others."""
    return [tensors[name] for name in sorted(tensors) if name.isdigit()]


def _before_a_stop(text: str, stops: Sequence[str]) -> str:
    """The text without the longest end that is the beginning of a stop string."""
    for start in range(max(0, len(text) + 1 - max(map(len, stops), default=0)), len(text)):
        if any(stop.startswith(text[start:]) for stop in stops):
            return text[:start]
    return text
