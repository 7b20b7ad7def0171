"""Strings to translations: tokenise, encode, flat beam search, detokenise.

Letters: N line, K result of a line, R row of a batch, S source token, T target token.

In TensorFlow alone, its own kernels run one search for any number and length of lines, lines of similar length
together; that can be exported. Over a mesh (MeshSearch) a line runs in the bucket of its length, in a batch of exactly
`rows` rows. Either way nothing is traced or compiled twice, and the translation of a line is bit-identical in a batch
of 1, 7 or 32 (docs/speed.md).
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from lingvo_moe.core.config import checks
from lingvo_moe.core.decode.flat_beam_search import SearchOptions
from lingvo_moe.core.decode.ranges import LENGTH, Sampling
from lingvo_moe.core.engine.base import Engine
from lingvo_moe.core.engine.checkpoints.run_weights import NEWEST, Chosen
from lingvo_moe.core.engine.kept_programs import text_of
from lingvo_moe.core.kernels.packed_weights import WEIGHTS
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.tensors import dim
from lingvo_moe.tasks.mt.decode_step import Decoder, TranslationModel
from lingvo_moe.tasks.mt.decoding.fast_decoder import FastDecoder
from lingvo_moe.tasks.mt.decoding.paged_decoder import SOURCE_STEP, PagedDecoder
from lingvo_moe.tasks.mt.decoding.running_translations import RunningTranslator, TranslationSteps
from lingvo_moe.tasks.mt.decoding.saved_translator import translations_of
from lingvo_moe.tasks.mt.decoding.shortlist import Shortlist
from lingvo_moe.tasks.mt.decoding.shortlist_columns import ShortlistColumns
from lingvo_moe.tasks.mt.mt_model import MtModel
from lingvo_moe.tasks.text.decoding.kept_graph import KeptGraph
from lingvo_moe.tasks.text.decoding.leading import PlacedWeights, rows_over
from lingvo_moe.tasks.text.decoding.mesh_search import MeshSearch
from lingvo_moe.tasks.text.decoding.saved_weights import PackedWeights
from lingvo_moe.tasks.text.decoding.tokenizer import tidy_strings, tokenizer
from lingvo_moe.tasks.text.runs.artifacts import language_codes_of, target_language_of
from lingvo_moe.tasks.text.runs.run_dir import TextRunDir
from lingvo_moe.tasks.text.runs.weights import load_theta
from lingvo_moe.tasks.text.vocabulary.language_codes import LanguageCodes
from lingvo_moe.tasks.text.vocabulary.vocabulary import Vocabulary

_LENGTH_ALPHA = 0.6  # for a model that says nothing
_SMALLEST_BUCKET = 8
_MOST_TOKENS = 2048  # of the sources of a batch, not under XLA
# What there may be of each line beside its tokens and their number.
_OF_LINES = ("tasks", "first", "seeds")
_LONGEST_PIECE = 64  # bytes of a SentencePiece: 16 characters of UTF-8
# Nothing that a reader of lines could take for the end of one: controls, NEL, line and paragraph separators.
_NOT_IN_A_LINE = "[\\x{00}-\\x{1f}\\x{7f}\\x{85}\\x{2028}\\x{2029}]+"

_Weights = NestedMap | PlacedWeights
_Parts = tuple[MtModel, _Weights, NestedMap, Sequence[str] | LanguageCodes]


@dataclass(frozen=True)
class TranslateOptions:
    """Settings of a Translator: its search, its limits of length, and the way it runs.

    Attributes:
        beam_size: hypotheses of the beam; 1 is greedy search.
        top_k: K, translations returned for a line, at most beam_size. With 1 the search stops soonest.
        length_alpha: exponent of the length normalisation; None: the model's, which a Translator fills in.
        max_source_length: tokens of a line, EOS included; the rest is cut off and reported.
        max_length: tokens of a translation, EOS included. A line of n tokens gets at most 2 n + 10.
        rows: R, the most lines translated at once, more take turns.
        weights: "float32", or "int8" for the weights of matrix products (not over a mesh).
        sampling: draws top_k translations of a line, by temperature, top_k, top_p and seed of these settings and the
            line alone, in place of the search; None: searches.
    """

    beam_size: int = 4
    top_k: int = 1
    length_alpha: float | None = None
    max_source_length: int = 256
    max_length: int = 256
    rows: int = 32
    weights: str = "float32"
    sampling: Sampling | None = None

    def __post_init__(self) -> None:
        self.Search()
        checks.check_fields(
            self, {"max_source_length": LENGTH, "max_length": LENGTH, "rows": checks.SIZE}
        )
        checks.check_one_of("weights", self.weights, WEIGHTS)

    def Search(self) -> SearchOptions:
        """The options of the beam search."""
        alpha = _LENGTH_ALPHA if self.length_alpha is None else self.length_alpha
        beam = (1, 1) if self.sampling else (self.beam_size, self.top_k)
        return SearchOptions(*beam, alpha)

    def Buckets(self) -> list[int]:
        """Source lengths for which there are programs over a mesh: powers of two, and the longest."""
        lengths = []
        length = _SMALLEST_BUCKET
        while length < self.max_source_length:
            lengths.append(length)
            length *= 2
        return [*lengths, self.max_source_length]

    def MaxTargetLength(self, source_length: Any) -> Any:
        """The most tokens of a translation of `source_length` tokens, for an int or an int32 tensor."""
        least = min if isinstance(source_length, int) else tf.minimum
        return least(2 * source_length + 10, self.max_length)


class Translator(RunningTranslator):
    """A model, its weights and its vocabularies as one function of strings, which can be exported.

    Args:
        model: e.g. an MtModel.
        theta: NestedMap of arrays or tensors; or weights over a mesh, where the search runs then (MeshSearch), so that
            it cannot be exported.
        vocabs: NestedMap(source, target) of serialised SentencePiece models; and `tidied`, the version of tidy_text
            that lines go through first, without which they do not.
        languages: source languages in the order of their task ids, for a model that routes by language; or the
            LanguageCodes of one that translates from any to any, where the language of a line is SOURCE-TARGET; else
            empty.
        shortlist: the tokens that each line is scored for; None: all.

    Raises:
        ValueError: a vocabulary with more pieces than the model has embeddings for, a shortlist for other
            vocabularies or over a mesh, or weights of 8 bits where they are not supported.
    """

    NAME = "translate"

    def __init__(
        self,
        model: TranslationModel,
        theta: _Weights,
        vocabs: NestedMap,
        options: TranslateOptions | None = None,
        languages: Sequence[str] | LanguageCodes = (),
        shortlist: Shortlist | None = None,
    ):
        super().__init__(name="translator")
        o = options or TranslateOptions()
        if o.length_alpha is None:
            length_alpha = model.p.length_alpha if "length_alpha" in model.p else _LENGTH_ALPHA
            o = replace(o, length_alpha=length_alpha)
        self.options = o
        self._codes: LanguageCodes | None = None
        if isinstance(languages, LanguageCodes):
            self._codes, languages = languages, list(languages.ids)
        self._languages = tuple(languages)
        names = ("first",) if self._codes else ("tasks",) if languages else ()
        self._of_rows = (*names, "seeds") if o.sampling else names  # see _Rows
        self.traces = 0  # of searches; grows no more once `translate` was traced
        self.mesh_search: MeshSearch | None = None
        self._tidied = vocabs.get("tidied", 0)
        self._source, self._target = tokenizer(vocabs.source), tokenizer(vocabs.target)
        sizes = {"source": int(self._source.vocab_size()), "target": int(self._target.vocab_size())}
        for side, size in sizes.items():
            room = getattr(model.p, f"{side}_vocab_size")
            if size > room:
                raise ValueError(
                    f"the {side} vocabulary has {size} pieces, the model's {side}_vocab_size is {room}"
                )
        self._target_size = sizes["target"]
        source, target = (Vocabulary(vocabs[side]) for side in sizes)
        self._pad_id, self._eos_id = source.pad_id, source.eos_id
        self._search_options = replace(
            o.Search(),
            bos_id=self._codes.start_id if self._codes else target.bos_id,
            **{f"{name}_id": getattr(target, f"{name}_id") for name in ("eos", "pad", "unk")},
        )
        self._shortlist = self._ColumnsOf(shortlist, vocabs) if shortlist else None
        self._model = lambda: model
        arguments = ("text", "language")[: 1 + bool(self._languages)]
        if isinstance(theta, PlacedWeights):
            self.translate: Any = self._Translate
            self._LieOver(theta.engine, theta.theta)
            return
        self._weights = PackedWeights(model, theta, o.weights, o.beam_size)
        self._search = self._Search()
        specs = [tf.TensorSpec([None], tf.string, name=name) for name in arguments]
        self.translate = tf.function(self._Translate, specs, autograph=False)

    def _ColumnsOf(self, shortlist: Shortlist, vocabs: NestedMap) -> ShortlistColumns:
        """A shortlist as the search takes it. Raises as the constructor."""
        if self._codes:
            raise ValueError("a model whose languages are tokens has no shortlist: leave it out")
        sizes = {side: int(getattr(self, f"_{side}").vocab_size()) for side in ("source", "target")}
        shortlist.Check(vocabs, sizes)
        return ShortlistColumns(
            shortlist, self._target_size, 2 * self._search_options.beam_size + 3
        )

    def _LieOver(self, engine: Engine, theta: NestedMap) -> None:
        """Makes the search over an engine's devices, on which weights lie. Raises as the constructor."""
        o, model = self.options, self._model()
        if self._shortlist or o.weights == "int8":
            what = "a shortlist is" if self._shortlist else "weights=int8 is"
            raise ValueError(f"{what} for the search on one host, not over a mesh: leave it out")
        self.mesh_search = MeshSearch(engine, theta, self._DecoderOf, self._Text())
        self.options = replace(o, rows=rows_over(engine, model.p.activation_split, o.rows))

    def Translate(
        self, lines: Sequence[str | bytes], languages: str | Sequence[str] | None = None
    ) -> NestedMap:
        """Translates lines; see `translations_of` for arguments and result."""
        return translations_of(self.translate, lines, languages, bool(self._languages))

    @property
    def languages(self) -> tuple[str, ...]:
        return tuple(self._languages)

    @property
    def by_direction(self) -> bool:
        return self._codes is not None

    def SetTheta(self, theta: NestedMap) -> None:
        """Assigns other weights of the same model, e.g. of another checkpoint; compiled programs stay as they are.

        Raises:
            ValueError: with weights of 8 bits, which TensorFlow packs when they are first used.
        """
        if self.mesh_search:
            self.mesh_search.theta = theta
        else:
            self._weights.Assign(theta)

    def _OfLines(self, *language: tf.Tensor) -> tuple[NestedMap, tf.Tensor | None]:
        """The numbers that the model needs of lines, see _Sources, from the language of each, string [N].

        Of a model that routes by language it is the source language; else SOURCE-TARGET.

        Raises tf.errors.InvalidArgumentError, where it runs: a language that the model does not know.
        """
        if not language:
            return NestedMap(), None
        (name,) = language
        if self._codes is None:
            return NestedMap(tasks=self._Numbers(name, "the model routes by it and")), None
        pairs = tf.strings.split(name, "-", maxsplit=1).to_tensor("", shape=[None, 2])
        ids = tf.constant(list(self._codes.ids.values()))
        why = "give SOURCE-TARGET; the model"
        code, first = (tf.gather(ids, self._Numbers(pairs[:, i], why)) for i in range(2))
        return NestedMap(first=first), code

    def _Numbers(self, language: tf.Tensor, why: str) -> tf.Tensor:
        """The place of each language, string [N], among those of the model: int32 [N]."""
        matches = tf.equal(language[:, tf.newaxis], tf.constant(self._languages))
        message = f"unknown source language; {why} knows {', '.join(self._languages)}"
        if self._codes:
            message = message.replace("source ", "")
        with tf.control_dependencies(
            [tf.debugging.Assert(tf.reduce_all(tf.reduce_any(matches, 1)), [message, language])]
        ):
            return tf.argmax(tf.cast(matches, tf.int32), 1, output_type=tf.int32)

    def _Sources(
        self, text: tf.Tensor, of_lines: NestedMap, code: tf.Tensor | None
    ) -> tuple[NestedMap, tf.Tensor]:
        """The tokens of lines, ragged, their number, 0 of a blank line, and `of_lines`; and whether each was cut off.

        Args:
            text: string [N], a line of UTF-8 each. Invalid bytes are read as U+FFFD.
            of_lines: what the model needs of each line, int32 [N] each: `tasks`, its task id; `first`, the token that
                its translation begins with.
            code: int32 [N], the token of each line's language, in a model that needs it.
        """
        o = self.options
        # The time of tokenising grows with the square of a line that has no spaces.
        longest = o.max_source_length * _LONGEST_PIECE
        is_cut = tf.strings.length(text) > longest
        tokens = self._source.tokenize(tf.strings.substr(text, 0, longest))
        lengths = tf.cast(tokens.row_lengths(), tf.int32)
        n, marks = tf.shape(text)[0], 1 if code is None else 2
        truncated = is_cut | (lengths + marks > o.max_source_length)
        tokens = tokens[:, : o.max_source_length - marks]
        end = tf.fill([n, 1], self._eos_id)
        parts = [tokens, end]
        if code is not None:
            parts.insert(2 if self._codes and self._codes.is_last else 0, code[:, tf.newaxis])
        tokens = tf.concat(parts, 1)
        lengths = tf.where(lengths == 0, 0, tf.minimum(lengths + marks, o.max_source_length))
        return NestedMap(of_lines, tokens=tokens, lengths=lengths), truncated

    def _Tidied(self, text: tf.Tensor) -> tf.Tensor:
        return tf.strings.strip(tidy_strings(text, self._tidied))

    def _Translate(self, text: tf.Tensor, *language: tf.Tensor) -> dict[str, tf.Tensor]:
        """The whole way, in graph: what `translate` is, of string [N] as of _Sources and _OfLines.

        Returns:
            translations: string [N,K], best first, free of line breaks and control characters; '' for a blank line.
            scores: float32 [N,K], log-probability / length_norm; 0 for a blank line.
            truncated: bool [N], whether the line was longer than max_source_length.
        """
        o, text = self.options, self._Tidied(text)
        source, truncated = self._Sources(text, *self._OfLines(*language))
        if o.sampling:
            source = self._Draws(source, text)
        shape = [tf.shape(source.lengths)[0], o.Search().top_k]
        results = tf.fill(shape, ""), tf.zeros(shape)
        if not self.mesh_search:
            lines = tf.argsort(source.lengths, direction="DESCENDING", stable=True)
            lines = lines[: tf.math.count_nonzero(source.lengths, dtype=tf.int32)]
            results = self._in_batches(source, lines, results)
        shorter = 0
        for length in o.Buckets() if self.mesh_search else ():
            at_length = (source.lengths > shorter) & (source.lengths <= length)
            lines = tf.where(at_length)[:, 0]
            results = self._in_batches(source, tf.cast(lines, tf.int32), results, length)
            shorter = length
        if o.sampling:
            texts, scores = (tf.reshape(x, [-1, o.top_k]) for x in results)
            best = tf.argsort(scores, direction="DESCENDING", stable=True)
            results = tuple(tf.gather(x, best, batch_dims=1) for x in (texts, scores))
        return {"translations": results[0], "scores": results[1], "truncated": truncated}

    def _Draws(self, source: NestedMap, text: tf.Tensor) -> NestedMap:
        """The lines, each K times, with `seeds`: int32 [N K], that differ between lines and between draws of a line."""
        K = self.options.top_k
        draws = tf.range(tf.size(text) * K)
        source = source.Transform(lambda x: tf.gather(x, draws // K))
        names = tf.strings.join([tf.repeat(text, K), tf.strings.as_string(draws % K)], "\n")
        seeds = tf.cast(tf.strings.to_hash_bucket_fast(names, 1 << 30), tf.int32)
        return NestedMap(source, seeds=seeds)

    def _in_batches(
        self, source: NestedMap, lines: tf.Tensor, results: tuple, length: int | None = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Translates the given lines in their order, and puts them into `results`: texts [N,K] and scores [N,K].

        With a `length` there is a program for it, for batches of exactly `rows` rows, and no line is longer. Otherwise
        the longest lines come first, and rows are padded to the longest of their batch, at a multiple of 16.
        """
        o, n = self.options, tf.shape(lines)[0]
        search = self._SearchOverMesh(length) if length else self._search

        def one(start: tf.Tensor, texts: tf.Tensor, scores: tf.Tensor) -> tuple:
            size, rows = length, o.rows
            if size is None:
                longest = source.lengths[lines[start]]
                size = (longest + (SOURCE_STEP - 1)) // SOURCE_STEP * SOURCE_STEP
                rows = tf.clip_by_value(_MOST_TOKENS // size, 1, o.rows)
            batch = at = lines[start : tf.minimum(start + rows, n)]
            filled = tf.shape(batch)[0]
            n_at = tf.gather(source.lengths, at)
            shape = tf.stack([filled, size])
            if length is not None:  # filled up with line 0 at length 0, which costs no step
                shape, missing = [rows, length], [[0, rows - filled]]
                at, n_at = (tf.ensure_shape(tf.pad(x, missing), [rows]) for x in (at, n_at))
            ids = tf.gather(source.tokens, at).to_tensor(self._pad_id, shape=shape)
            of_lines = [tf.gather(source[x], at) for x in _OF_LINES if x in source]
            results = search(ids, n_at, *of_lines)
            text, best = self._texts(*map(results.get, ("ids_BKT", "lengths_BK", "scores_BK")))
            texts, scores = (
                tf.tensor_scatter_nd_update(x, batch[:, tf.newaxis], y[:filled])
                for x, y in ((texts, text), (scores, best))
            )
            return start + filled, texts, scores

        start = tf.constant(0)
        _, texts, scores = tf.while_loop(
            lambda start, *_: start < n, one, (start, *results), parallel_iterations=1
        )
        return texts, scores

    def _texts(
        self, ids_RKT: tf.Tensor, lengths_RK: tf.Tensor, scores_RK: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Detokenizes the translations of a search into strings [R,K]; returns them with their scores."""
        flat = tf.reshape(ids_RKT, [-1, tf.shape(ids_RKT)[2]])
        without_eos = tf.maximum(tf.reshape(lengths_RK, [-1]) - 1, 0)
        text = self._target.detokenize(tf.RaggedTensor.from_tensor(flat, without_eos))
        text = tf.strings.strip(tf.strings.regex_replace(text, _NOT_IN_A_LINE, " "))
        return tf.reshape(text, [-1, self.options.Search().top_k]), scores_RK

    @property
    def joins(self) -> bool:
        """See RunningTranslator."""
        return not (self.mesh_search or self._shortlist or self.options.sampling)

    def _MakeSteps(self) -> TranslationSteps:
        """See RunningTranslator."""
        names = ["first"] if self._codes else []
        limits = self._search_options, self.options.max_length, self._target_size
        decoder = PagedDecoder(self._weights, *limits, names)

        def sources(text: tf.Tensor, *language: tf.Tensor) -> dict[str, tf.Tensor]:
            source, truncated = self._Sources(self._Tidied(text), *self._OfLines(*language))
            return {**source, "tokens": source.tokens.to_tensor(), "truncated": truncated}

        return TranslationSteps(decoder, sources, self._Rows, self._texts, bool(self._languages))

    def _Text(self) -> str:
        """A text that says what the model and the programs of its search are."""
        parts = self.options, self._search_options, self._target_size, self._pad_id, self._of_rows
        return "\n".join([text_of(self._model()), *map(str, parts)])

    def _Search(self) -> KeptGraph:
        """int32 ids [R,S], lengths [R] (and _OF_LINES, [R]) to the results of a search."""
        o, is_known = self.options, isinstance(self._model(), MtModel)
        limits = self._search_options, o.max_length, self._target_size
        decoder = FastDecoder(self._weights, *limits, self._shortlist, o.sampling)

        def rows(*arguments: tf.Tensor) -> tuple[NestedMap, tf.Tensor]:
            self.traces += 1
            return self._Rows(*arguments)

        of_rows = [tf.TensorSpec([None], tf.int32)] * (1 + len(self._of_rows))
        specs = [tf.TensorSpec([None, None], tf.int32), *of_rows]
        return decoder.Kept(rows, specs, self._Text() if is_known else "")

    def _SearchOverMesh(self, length: int) -> Any:
        """The search of _Search for S = `length`, called with tensors that have values."""
        mesh_search = self.mesh_search
        assert mesh_search

        def search(*arguments: tf.Tensor) -> NestedMap:
            src, max_lengths = self._Rows(*arguments)
            inputs = NestedMap(src, max_lengths=max_lengths).Transform(lambda x: x.numpy())
            return mesh_search.Run((length,), inputs)

        return search

    def _DecoderOf(self, kind: tuple[int, ...]) -> Decoder:
        """The search of sources of so many tokens."""
        limits = self.options.MaxTargetLength(kind[0]), self._target_size
        return Decoder(self._model(), self._search_options, *limits, self.options.sampling)

    def _Rows(
        self, ids_RS: tf.Tensor, lengths_R: tf.Tensor, *of_rows: tf.Tensor
    ) -> tuple[NestedMap, tf.Tensor]:
        """The sources of a search, see `Decoder`, and the most tokens of each translation."""
        rows, size = (dim(ids_RS, axis) for axis in (0, 1))
        at_S = tf.tile(tf.range(size)[tf.newaxis], [rows, 1])
        real_RS = at_S < lengths_R[:, tf.newaxis]
        src = NestedMap(
            ids=tf.where(real_RS, ids_RS, self._pad_id),
            segment_ids=tf.cast(real_RS, tf.int32),
            segment_pos=tf.where(real_RS, at_S, 0),
        )
        src.update(zip(self._of_rows, of_rows, strict=True))
        if "tasks" in src:
            src.task_ids = tf.where(real_RS, src.pop("tasks")[:, tf.newaxis], 0)
        return src, tf.where(lengths_R > 0, self.options.MaxTargetLength(lengths_R), 0)


def load_translator(
    logdir: str | os.PathLike,
    options: TranslateOptions | None = None,
    chosen: Chosen = NEWEST,
    shortlist: str | os.PathLike | None = None,
    trust_run: bool = False,
    engine: Engine | None = None,
) -> tuple[Translator, dict[str, Any]]:
    """The model of a run at a checkpoint.

    Args:
        logdir: a trainer's.
        options, chosen: how to translate, and with which weights.
        shortlist: a file of tools.shortlist; None to score all tokens.
        engine: over whose devices the model lies, see Translator.

    Returns:
        The translator, and what it is: what load_theta says, weights, shortlist, the source languages of its data, and
        target_language.

    Raises:
        RunDirError: no run there, or a damaged one, or one that names a class outside lingvo_moe.
        DataError: no shortlist there, or one for other vocabularies.
        CheckpointError: as load_theta.
        ValueError: as Translator.
    """
    parts, about = read_parts(logdir, chosen, trust_run, engine)
    some = Shortlist.Load(shortlist) if shortlist else None
    about["weights"] = options.weights if options else "float32"
    if some:
        about["shortlist"] = some.About()
    return Translator(*parts[:3], options, parts[3], some), about


def read_parts(
    logdir: str | os.PathLike, chosen: Chosen, trust_run: bool, engine: Engine | None = None
) -> tuple[_Parts, dict[str, Any]]:
    """The model of a run, its weights, vocabularies, and languages (of one that routes by them); and what it is.

    Raises as load_translator.
    """
    run = TextRunDir(logdir, trust_run=trust_run)
    model = run.Task(MtModel, engine.mesh if engine else None)
    vocabs = NestedMap(run.vocabs, tidied=run.tidied)
    theta, about = load_theta(run, model, chosen, engine)
    placed = PlacedWeights(engine, theta) if engine else theta
    about["trained_languages"] = run.languages or []
    if language := target_language_of(run.artifacts):
        about["target_language"] = language
    languages = about["trained_languages"] if model.RoutesByTask(model.p) else ()
    return (model, placed, vocabs, language_codes_of(run.artifacts) or languages), about
