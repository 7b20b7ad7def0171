"""A batch of translations that runs all the time: lines join it and leave it between two blocks of steps.

Letters: R row, S source token, W page of a row's table, K result.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_moe.core.decode.pages import PagePool
from lingvo_moe.core.decode.ranges import Sampling
from lingvo_moe.tasks.mt.decoding.paged_decoder import SOURCE_STEP, PagedDecoder
from lingvo_moe.tasks.mt.decoding.saved_translator import called_with
from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.decoding.export import Exportable
from lingvo_moe.tasks.text.decoding.line_stream import one_line
from lingvo_moe.tasks.text.decoding.text_batch import RunningText, TextBatch, pages_of

_STEPS = 8  # of a block


class TranslationSteps:
    """The functions of a PagedDecoder: `sources`, `enter`, `pool`, `keep`, `join`, `block` and `read`.

    Args:
        sources: string [N] (and string [N], the languages) to a dict of the `tokens` [N,S] of lines, the `lengths` [N],
            0 of a blank line, `truncated` [N], and what the model needs of each line.
        rows: int32 ids [R,S], lengths [R] and what the model needs of each row, to a source and the most tokens of each
            translation, as Decoder.Search takes them.
        texts: ids [R,K,T], lengths and scores [R,K] to strings [R,K] and scores [R,K].
        by_language: whether lines have languages, of which `rows` takes one more argument.
    """

    def __init__(
        self,
        decoder: PagedDecoder,
        sources: Callable,
        rows: Callable,
        texts: Callable,
        by_language: bool = False,
    ):
        extra = int(by_language)
        self.sources = _function(sources, [tf.TensorSpec([None], tf.string)] * (1 + extra))
        numbers = tf.TensorSpec([None], tf.int32)
        source = [tf.TensorSpec([None, None], tf.int32), *[numbers] * (1 + extra)]
        self.enter = _function(lambda *source: decoder.Enter(*rows(*source)), source)

        def pool(pages: tf.Tensor) -> list[tf.Tensor]:
            one = tf.ones([1], tf.int32)
            src, _ = rows(one[:, tf.newaxis], one, *[one - 1] * extra)
            return decoder.Pool(src, pages)

        self.pool = _function(pool, [tf.TensorSpec([], tf.int32)])
        some = _specs(self.enter, decoder.row_letters)
        pages = _specs(self.pool)
        table = tf.TensorSpec([None, None], tf.int32)
        self.keep = _function(decoder.Keep, [some, numbers])
        self.join = _function(decoder.Join, [some, some])

        def block(rows: list[tf.Tensor], pool: list[tf.Tensor], table: tf.Tensor) -> tuple:
            rows, pool, count = decoder.Block(rows, pool, table, _STEPS)
            return rows, pool, count, decoder.Done(rows)

        self.block = _function(block, [some, pages, table])

        def read(rows: list[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
            results = decoder.Results(rows)
            return texts(results.ids_BKT, results.lengths_BK, results.scores_BK)

        self.read = _function(read, [some])


@dataclass(eq=False)
class RunningTranslation(RunningText):
    """A line and its translations.

    Attributes:
        source: int32 [S], its tokens.
        of_row: what the model needs of it beside them.
        most: the most places of its hypotheses that have keys and values; `filled` is how many have some.
        texts, scores: the translations, best first, once they are there.
    """

    source: Sequence[int] = ()
    of_row: Sequence[int] = ()
    most: int = 0
    texts: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)

    def Ended(self, texts: Sequence[bytes], scores: list[float]) -> None:
        """Notes the translations, UTF-8, and their scores: the line is done."""
        self.texts = [one_line(text.decode("utf-8", "replace")) for text in texts]
        self.scores, self.reason = scores, "stop"

    @property
    def left(self) -> int:
        """See RunningText: the line is read when it joins."""
        return 0


class TranslationBatch(TextBatch[RunningTranslation]):
    """A batch of translations; its texts are RunningTranslations.

    Args:
        steps: of a model, those of TranslationSteps.
        rows, pages: as of TextBatch.
        beam_size: J.
    """

    def __init__(self, steps: Any, rows: int, pages: int, beam_size: int):
        super().__init__(rows, [PagePool(pages)])
        self._steps, self._beam_size = steps, beam_size
        self._pool = steps.pool(tf.constant(pages + 1))
        self._there: list[RunningTranslation] = []  # those of the rows, in their order
        self._tensors: list[tf.Tensor] = []  # the rows

    def Join(self, text: RunningTranslation) -> None:
        """See TextBatch."""
        if pages_of(text.most) > self.pages:
            raise DataError(
                f"a line of {len(text.source)} tokens needs {pages_of(text.most)} pages, and there are {self.pages}: "
                "raise --cache_mib"
            )
        self.waiting.append(text)

    def _Fill(self, parts: Sequence[tuple[RunningTranslation, int]]) -> None:
        raise AssertionError("a line is read when it joins")

    def _Longest(self, text: RunningTranslation) -> int:
        return min(text.filled + _STEPS * self._beam_size, text.most)

    def _Draw(self, texts: Sequence[RunningTranslation]) -> None:
        texts = [text for text in texts if not text.reason]  # there is nothing in the others
        if texts:
            self._Block(texts)

    def _Block(self, texts: Sequence[RunningTranslation]) -> None:
        """Takes the steps of a block with these texts, of which some may be new."""
        self._Keep([i for i, one in enumerate(self._there) if one in texts and one.filled])
        self._Enter([text for text in texts if not text.filled])
        table = np.zeros([len(texts), max(len(text.pages) for text in texts)], np.int32)
        for row, text in zip(table, self._there):
            row[: len(text.pages)] = text.pages
        self._tensors, self._pool, count, done = self._steps.block(
            self._tensors, self._pool, tf.constant(table)
        )
        taken = int(count)
        self.tokens += taken * len(texts)
        for text in self._there:
            text.filled += taken * self._beam_size
        if (ended := np.flatnonzero(done)).size:
            rows = self._steps.keep(self._tensors, tf.constant(ended, tf.int32))
            results = (x.numpy().tolist() for x in self._steps.read(rows))
            for number, *row in zip(ended, *results):
                self._there[number].Ended(*row)

    def _Keep(self, rows: Sequence[int]) -> None:
        """Drops all rows but some."""
        if len(rows) < len(self._there):
            self._there = [self._there[i] for i in rows]
            self._tensors = self._steps.keep(self._tensors, tf.constant(rows, tf.int32))

    def _Enter(self, texts: Sequence[RunningTranslation]) -> None:
        """Adds rows, lines of similar length together."""
        for _, group in itertools.groupby(sorted(texts, key=_size), _size):
            new = [*group]
            ids = np.zeros([len(new), max(map(_places, new))], np.int32)
            for row, text in zip(ids, new):
                row[: len(text.source)] = text.source
            lengths = [len(text.source) for text in new]
            columns = [lengths, *zip(*(text.of_row for text in new))]
            arguments = [tf.constant(ids), *(tf.constant(x, tf.int32) for x in columns)]
            tensors = self._steps.enter(*arguments)
            self._tensors = self._steps.join(self._tensors, tensors) if self._there else tensors
            self._there += new


class RunningTranslator(Exportable):
    """A translator whose lines can join a batch that runs."""

    @property
    def joins(self) -> bool:
        """Whether lines can join a batch."""
        raise NotImplementedError

    @functools.cached_property
    def _steps(self) -> TranslationSteps:
        return self._MakeSteps()

    def Begin(self, line: str | bytes, language: str | None = None) -> "RunningLine":
        """A line, which can join a batch. Raises ValueError: as Translator.Translate."""
        out = called_with(self._steps.sources, [line], language, bool(self.languages))
        length = int(out.pop("lengths")[0])
        tokens, truncated = out.pop("tokens")[0, :length].numpy(), bool(out.pop("truncated")[0])
        places = self.options.MaxTargetLength(length) * self.options.beam_size
        of_row = [int(x[0]) for x in out.values()]
        text = RunningTranslation([0], Sampling(), source=tokens, of_row=of_row, most=places)
        if not length:
            results = self.options.Search().top_k
            text.Ended([b""] * results, [0.0] * results)
        return RunningLine(text, truncated)

    def Batch(self, rows: int, cache_bytes: int) -> TranslationBatch:
        """A batch of so many rows, whose pages have at most so many bytes; of no more pages than rows can use."""
        o, steps = self.options, self._steps
        one = sum(np.prod(x.shape) * x.dtype.size for x in steps.pool(tf.constant(1)))
        longest = rows * pages_of(o.max_length * o.beam_size)
        return TranslationBatch(steps, rows, int(min(cache_bytes // one, longest)), o.beam_size)

    def Read(self, texts: Sequence[RunningText]) -> list[None]:
        """Nothing, which RunningLine.News takes of each; see DecodeLoop."""
        return [None] * len(texts)

    def _MakeSteps(self) -> TranslationSteps:
        """The functions of the model."""
        raise NotImplementedError


@dataclass
class RunningLine:
    """A line of a batch: its `text`, whether it was `truncated`, and its translations once they are there."""

    text: RunningTranslation
    truncated: bool

    @property
    def texts(self) -> list[str]:
        """The translations, best first."""
        return self.text.texts

    @property
    def scores(self) -> list[float]:
        """Their scores."""
        return self.text.scores

    def News(self, read: None) -> tuple[str, "RunningLine | None"]:
        """No text, and itself when the translations are there; see DecodeLoop."""
        return "", self if self.text.reason else None

    def About(self) -> None:
        """There is nothing else to say of translations."""


def _places(text: RunningTranslation) -> int:
    """The number of places for a source."""
    return -(-len(text.source) // SOURCE_STEP) * SOURCE_STEP


def _size(text: RunningTranslation) -> int:
    """The class of a source's length: lengths of a class differ by less than a factor of two."""
    return _places(text).bit_length()


def _specs(function: Any, letters: Sequence[str] = ()) -> list[tf.TensorSpec]:
    """The tensors that a function returns, with any number of rows and places where letters are given."""
    specs = [
        tf.TensorSpec(x.shape, x.dtype) for x in function.get_concrete_function().structured_outputs
    ]
    sizes = [zip(one, spec.shape) for one, spec in zip(letters, specs)]
    opened = [[None if letter in "BPS" else n for letter, n in one] for one in sizes]
    return [tf.TensorSpec(shape, spec.dtype) for shape, spec in zip(opened, specs)] or specs


def _function(fn: Callable, specs: Sequence[Any]) -> Any:
    return tf.function(fn, input_signature=specs, autograph=False)
