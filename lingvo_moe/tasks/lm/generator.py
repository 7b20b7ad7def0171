"""Prompts to texts, in TensorFlow alone: tokenise, search or sample, detokenise.

TensorFlow has no tokenizer.json: with one, functions are of ids, and Texts makes ids of prompts and texts of ids.

Letters: N prompt, R row of a batch, P token of a prompt, T new token.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_moe.core.config import checks
from lingvo_moe.core.decode.flat_beam_search import SearchOptions
from lingvo_moe.core.decode.ranges import LENGTH
from lingvo_moe.core.engine import kept_programs
from lingvo_moe.core.engine.base import Engine
from lingvo_moe.core.engine.checkpoints.run_weights import NEWEST, Chosen
from lingvo_moe.core.kernels import eight_bit
from lingvo_moe.core.kernels.packed_weights import WEIGHTS
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.lm.lm_model import LmModel
from lingvo_moe.tasks.lm.paged_search import PLACES, PagedSearch
from lingvo_moe.tasks.lm.prompt_search import PromptSearch
from lingvo_moe.tasks.lm.saved_generator import PROMPT, SETTINGS, TOKENIZER, Texts
from lingvo_moe.tasks.text.decoding.export import Exportable
from lingvo_moe.tasks.text.decoding.kept_graph import KeptGraph, key_of
from lingvo_moe.tasks.text.decoding.saved_weights import PackedWeights
from lingvo_moe.tasks.text.decoding.tokenizer import tidy_strings, tokenizer
from lingvo_moe.tasks.text.runs.run_dir import TextRunDir
from lingvo_moe.tasks.text.runs.weights import load_theta
from lingvo_moe.tasks.text.vocabulary.tokenizer_json import JsonVocabulary
from lingvo_moe.tasks.text.vocabulary.vocabulary import open_vocabulary


@dataclass(frozen=True)
class GenerateOptions:
    """Settings of a Generator that no request can change.

    Attributes:
        beam_size: hypotheses of a beam search; 1: samples, or greedy search.
        length_alpha: exponent of the length normalisation of a beam search.
        max_source_length: tokens of a prompt; the beginning of a longer one is left out, and reported.
        max_length: new tokens that a request may ask for at most.
        rows: R, the most prompts continued at once.
        weights: "float32", or "int8" for the weights of matrix products.
    """

    beam_size: int = 1
    length_alpha: float = 0.6
    max_source_length: int = 256
    max_length: int = 256
    rows: int = 32
    weights: str = "float32"

    def __post_init__(self) -> None:
        self.Search()
        checks.check_fields(
            self, {"max_source_length": LENGTH, "max_length": LENGTH, "rows": checks.SIZE}
        )
        checks.check_one_of("weights", self.weights, WEIGHTS)

    def Search(self, **marks: Any) -> SearchOptions:
        """The options of the search; `marks` are those of SearchOptions."""
        return SearchOptions(self.beam_size, 1, self.length_alpha, **marks)


# The ids of prompts, and how many are of each.
_IDS = [
    tf.TensorSpec([None, None], tf.int32, PROMPT),
    tf.TensorSpec([None], tf.int32, "lengths"),
]


class Generator(Exportable, Texts):
    """A model, its weights and its vocabulary as functions of strings, or of ids, which can be exported.

    Args:
        model: an LmModel.
        theta: NestedMap of arrays or tensors.
        vocab: a serialised vocabulary, see open_vocabulary.
        options: see GenerateOptions.
        tidied: the version of tidy_text that prompts go through first; 0: none.
        text: determines the model, with its classes: where a command keeps programs, that of the search is one.

    Raises:
        ValueError: a vocabulary with more pieces than the model has embeddings for, or weights of 8 bits where they are
            not supported.
    """

    def __init__(
        self,
        model: LmModel,
        theta: NestedMap,
        vocab: bytes,
        options: GenerateOptions | None = None,
        tidied: int = 0,
        text: str = "",
    ):
        tf.Module.__init__(self, name="generator")
        self.options = o = options or GenerateOptions()
        self._tidied, vocabulary = tidied, open_vocabulary(vocab, tidied=tidied)
        self._marks = (vocabulary.bos_id, vocabulary.eos_id, vocabulary.pad_id)
        size = vocabulary.size
        other_ends: tuple[int, ...] = ()
        prompt = _IDS
        if isinstance(vocabulary, JsonVocabulary):
            self.vocabulary, other_ends = vocabulary, vocabulary.other_ends
        else:
            self._tokenizer = tokenizer(vocab)
            ids = [tf.TensorSpec([None], tf.int32)]
            self.pieces = _function(self._tokenizer.id_to_string, ids)
            prompt = [tf.TensorSpec([None], tf.string, "text")]
            self.ids_of = _function(self._IdsOfOne, [tf.TensorSpec([], tf.string, "text")])
            self.texts_of = _function(self._TextsOf, ids * 4)
        self._takes = len(prompt)
        if size > model.p.vocab_size:
            raise ValueError(
                f"the vocabulary has {size} pieces, the model's vocab_size is {model.p.vocab_size}"
            )
        self._allowed = np.arange(size) != vocabulary.unk_id
        self._num_experts = model.p.num_experts
        marks = dict(zip(("bos_id", "eos_id", "pad_id"), self._marks))
        self._search_options = o.Search(**marks, other_ends=other_ends)
        self._Load(model, theta, prompt, text)

    def _Load(
        self, model: LmModel, theta: NestedMap, prompt: Sequence[tf.TensorSpec], text: str
    ) -> None:
        """Makes the functions, of a `prompt`, and the variables of the weights; the rest is as in the constructor."""
        o, allowed, options = self.options, self._allowed, self._search_options
        self._weights = PackedWeights(model, theta, o.weights, o.beam_size)
        self.fewest_rows = self._weights.fewest_rows
        search = PromptSearch(model, options, o.max_length, allowed, self.fewest_rows)
        self._search = lambda: search  # tf.Module would track it
        samples = o.beam_size == 1
        names = list(SETTINGS) if samples else ["max_tokens"]
        specs = [tf.TensorSpec([None, *SETTINGS[n].shape], SETTINGS[n].dtype, n) for n in names]
        self.generate = _function(self._Generate, [*prompt, *specs])
        parts = (vars(o), allowed.size, np.flatnonzero(~allowed).tolist(), vars(options))
        variables = self._weights.variables

        def kept(kind: str, function: Callable, specs: Any) -> KeptGraph:
            return KeptGraph(function, specs, variables, key_of(kind, text, variables, *parts))

        self._kept: Any = kept("generate", self._Continued, [*_IDS, *specs])
        if samples:
            paged = PagedSearch(model, options, allowed)
            self._paged, empty = lambda: paged, paged.Pool(1)
            self._structure = lambda: empty
            pools = [tf.TensorSpec([None, *x.shape[1:]], x.dtype) for x in empty.Flatten()]
            drawn = [tf.TensorSpec([None, None], tf.int32), tf.TensorSpec([None], tf.int32)]
            of_run = [*PLACES, *drawn, *specs[1:], *pools]
            of_step = [*map(_one_token, PLACES[:3]), *of_run[3:]]
            self.pool = _function(
                lambda pages: _named(paged.Pool(pages).Flatten()), [tf.TensorSpec([], tf.int32)]
            )
            self.fill = _function(self._Fill, [*PLACES, *pools])
            self.step = _function(self._Step, of_step)
            graphs = {
                "fill": kept("fill", self._Fill, [*PLACES, *pools]),
                "step": kept("step", self._Step, of_step),
                "verify": kept("verify", self._Step, of_run),
            }
            self._graphs = lambda: graphs

    def Call(self, arguments: Sequence[Any]) -> dict[str, tf.Tensor]:
        """See Texts: text becomes tokens outside of graphs, so that the search alone is traced."""
        return self._With(self._kept, arguments)

    def CallPaged(self, name: str, arguments: Sequence[Any]) -> dict[str, tf.Tensor]:
        """See Texts; graphs that take time to trace are kept."""
        graph = self._graphs().get(name)
        return graph(*arguments) if graph else super().CallPaged(name, arguments)

    def DraftBy(self, draft: "Generator") -> None:
        """Has another model propose tokens, which this one verifies, several at once: texts stay the same.

        Raises ValueError: the draft has other pieces.
        """
        ours, others = self._AllPieces(), draft._AllPieces()
        if ours != others:
            at = next((i for i, (x, y) in enumerate(zip(ours, others)) if x != y), None)
            what = f"{len(others)} pieces, the model {len(ours)}"
            if at is not None:
                what = f"{others[at]!r} as piece {at}, the model {ours[at]!r}"
            raise ValueError(f"the draft has {what}: it must have the same vocabulary")
        self._draft = lambda: draft

    def _AllPieces(self) -> list[str]:
        """The pieces of the vocabulary, in the order of ids."""
        return self._Pieces(range(self._allowed.size))

    def Assets(self) -> dict[str, bytes]:
        """See Exportable."""
        return {TOKENIZER: self.vocabulary.model_bytes} if self.vocabulary else {}

    def _Generate(self, *arguments: tf.Tensor) -> dict[str, tf.Tensor]:
        """The whole way, in graph: what `generate` is.

        Args:
            arguments: string [N], a prompt of UTF-8 each, whose invalid bytes are read as U+FFFD; with a tokenizer.json
                int32 [N,P] and [N] instead, the ids of prompts with the mark of their begin, and how many are of each.
                Then the settings of each prompt, in the order of SETTINGS; only max_tokens with a beam.

        Returns:
            texts: string [N], the continuations, unless there is a tokenizer.json; ids: int32 [N,T], their tokens;
            tokens: int32 [N], how many; finished: bool [N], whether the model ended the text, not max_tokens;
            truncated: bool [N], whether the prompt was too long; prompt_tokens: int32 [N], of how many tokens it was
            read; without a beam log_probs: float32 [N,T], of each token.
        """
        return self._With(self._Continued, arguments)

    def _With(
        self, continued: Callable[..., dict[str, tf.Tensor]], arguments: Sequence[Any]
    ) -> dict[str, tf.Tensor]:
        """`_Generate` with what continues ids."""
        ids, truncated = self._Ids(*arguments[: self._takes])
        lengths = tf.cast(ids.row_lengths(), tf.int32)
        results = dict(continued(ids.to_tensor(), lengths, *arguments[self._takes :]))
        if not self.vocabulary:
            results["texts"] = self._TextOf(ids, results)
        return {**results, "truncated": truncated, "prompt_tokens": lengths - 1}

    def _Continued(
        self, ids_NP: tf.Tensor, lengths: tf.Tensor, *settings: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        """The `_columns` of prompts' ids, BOS and as many as `lengths` says in all."""
        ids = tf.RaggedTensor.from_tensor(ids_NP, lengths)
        order = tf.argsort(lengths, direction="DESCENDING", stable=True)
        n = tf.shape(lengths)[0]
        longest = tf.reduce_max(tf.concat([self._Settings(settings)[0], [0]], 0))

        def one(start: tf.Tensor, *results: tf.Tensor) -> tuple:
            batch = order[start : start + self.options.rows]
            alike = tf.equal(tf.gather(lengths, batch), lengths[order[start]])
            batch = batch[: tf.math.count_nonzero(alike, dtype=tf.int32)]
            ids_RP = tf.gather(ids, batch).to_tensor()
            most, of_batch = self._Settings([tf.gather(x, batch) for x in settings])
            new = self._search().Search(self._weights.Theta(), ids_RP, most, of_batch)
            values = self._ColumnsOf(new, longest)
            at = batch[:, tf.newaxis]
            columns = zip(results, values.values(), strict=True)
            return start + tf.shape(batch)[0], *(
                tf.tensor_scatter_nd_update(x, at, y) for x, y in columns
            )

        nothing = {
            name: tf.fill([n, longest][:rank], tf.constant(empty))
            for name, (rank, empty) in self._columns.items()
        }
        _, *results = tf.while_loop(
            lambda start, *_: start < n,
            one,
            (tf.constant(0), *nothing.values()),
            parallel_iterations=1,
        )
        return dict(zip(nothing, results, strict=True))

    @property
    def _columns(self) -> dict[str, tuple[int, Any]]:
        """The names of what is found of each prompt, with the rank of the tensor and its empty value."""
        log_probs = {"log_probs": (2, 0.0)} if self.options.beam_size == 1 else {}
        return {"ids": (2, 0), "tokens": (1, 0), "finished": (1, False), **log_probs}

    def _Ids(self, prompt: tf.Tensor, *lengths: tf.Tensor) -> tuple[tf.RaggedTensor, tf.Tensor]:
        """The mark that begins each prompt and its tokens, and whether the first of these were left out."""
        if lengths:
            tokens = tf.RaggedTensor.from_tensor(prompt, *lengths)
            begin, tokens = prompt[:, :1], tokens[:, 1:]
        else:
            tokens = self._tokenizer.tokenize(tidy_strings(prompt, self._tidied))
        most = self.options.max_source_length
        truncated = tokens.row_lengths() > most
        if not lengths:
            begin = tf.fill([tf.shape(prompt)[0], 1], self._marks[0])
        return tf.concat([begin, tokens[:, -most:]], 1), truncated

    def _Settings(self, values: Sequence[tf.Tensor]) -> tuple[tf.Tensor, NestedMap | None]:
        """The new tokens at most, and what samples go by."""
        most = tf.clip_by_value(values[0], 1, self.options.max_length)
        rest = dict(zip(list(SETTINGS)[1:], values[1:]))
        return most, NestedMap(rest) if rest else None

    def _ColumnsOf(self, new: NestedMap, longest: tf.Tensor) -> dict[str, tf.Tensor]:
        """The `_columns` of the new tokens, of T = longest."""

        def wide(x: tf.Tensor) -> tf.Tensor:
            missing = tf.maximum(longest - tf.shape(x)[1], 0)
            return tf.pad(x, [[0, 0], [0, missing]])[:, :longest]

        columns = {"ids": wide(new.ids_BT), "tokens": new.lengths_B, "finished": new.finished_B}
        if "log_probs_BT" in new:
            columns["log_probs"] = wide(new.log_probs_BT)
        return columns

    def _TextOf(self, ids: tf.RaggedTensor, columns: dict[str, tf.Tensor]) -> tf.Tensor:
        """The text of the new tokens of prompts with BOS: what the text of all has more than the prompt's."""
        tokens = tf.RaggedTensor.from_tensor(columns["ids"], columns["tokens"])
        return self._Added(ids[:, 1:], tokens)

    def _Added(self, prompt: tf.Tensor, new: tf.Tensor) -> tf.Tensor:
        """The text that new tokens add to the prompt's, of ragged ids."""
        before = self._tokenizer.detokenize(prompt)
        whole = self._tokenizer.detokenize(tf.concat([prompt, new], 1))
        start = tf.strings.length(before)
        return tf.strings.substr(whole, start, tf.strings.length(whole) - start)

    def _TextsOf(
        self, prompts: tf.Tensor, of_prompt: tf.Tensor, new: tf.Tensor, of_new: tf.Tensor
    ) -> tf.Tensor:
        """`_Added` of all prompts' ids and all new ones, one after the other, and of how many each has."""
        rows = tf.RaggedTensor.from_row_lengths
        return self._Added(rows(prompts, of_prompt), rows(new, of_new))

    def _IdsOfOne(self, prompt: tf.Tensor) -> tf.Tensor:
        """BOS and all tokens of one prompt."""
        tokens = self._tokenizer.tokenize(tidy_strings(prompt, self._tidied))
        return tf.concat([[self._marks[0]], tokens], 0)

    def _Fill(self, *arguments: tf.Tensor) -> dict[str, tf.Tensor]:
        """The pool after the tokens of PLACES; the pool's tensors come last."""
        places, pool = arguments[: len(PLACES)], arguments[len(PLACES) :]
        structured = self._structure().Pack(list(pool))
        _, after = self._paged().Extend(self._weights.Theta(), places, structured)
        return _named(after.Flatten())

    def _Step(self, *arguments: tf.Tensor) -> dict[str, tf.Tensor]:
        """The pool after tokens of each text, the `tokens` that follow and their `log_probs`, [R,T]; with
        experts also those of each text's first token, `experts` int32 [L,R,k], and `num_experts`.

        Args:
            arguments: PLACES; the ids before and the step of PagedSearch.Step; SETTINGS but max_tokens; the pool.
        """
        places, rest = arguments[: len(PLACES)], arguments[len(PLACES) :]
        before, step, *values = rest
        names = list(SETTINGS)[1:]
        settings = NestedMap(zip(names, values), step=step)
        pool = self._structure().Pack(values[len(names) :])
        theta = self._weights.Theta()
        pool, tokens, log_probs, experts = self._paged().Step(theta, places, before, settings, pool)
        out = {**_named(pool.Flatten()), "tokens": tokens, "log_probs": log_probs}
        if experts:
            out["experts"] = tf.stack([one[:, 0] for one in experts])
            out["num_experts"] = tf.constant(self._num_experts)
        return out


def load_generator(
    logdir: str | os.PathLike,
    options: GenerateOptions | None = None,
    chosen: Chosen = NEWEST,
    trust_run: bool = False,
) -> tuple[Generator, dict[str, Any]]:
    """The language model of a run at a checkpoint; arguments, result and errors as load_theta."""
    (model, theta, vocab, tidied), about = read_parts(logdir, chosen, trust_run)
    about["weights"] = options.weights if options else "float32"
    text = kept_programs.text_of(model)
    return Generator(model, theta, vocab, options, tidied, text), about


def load_draft(logdir: str | os.PathLike, options: GenerateOptions, trust_run: bool) -> Generator:
    """The language model of a run as a draft of another; errors as load_theta.

    Its weights are of 8 bits where this processor has products of these: what a draft rounds changes no text.
    """
    try:
        eight_bit.check_supported()
    except ValueError:
        return load_generator(logdir, options, trust_run=trust_run)[0]
    return load_generator(logdir, replace(options, weights="int8"), trust_run=trust_run)[0]


def read_parts(
    logdir: str | os.PathLike, chosen: Chosen, trust_run: bool, engine: Engine | None = None
) -> tuple[tuple[LmModel, NestedMap, bytes, int], dict[str, Any]]:
    """The model of a run, its weights, its vocabulary and the version of its tidied texts; and what it is.

    Raises as load_theta.
    """
    run = TextRunDir(logdir, trust_run=trust_run)
    model = run.Task(LmModel, engine.mesh if engine else None)
    theta, about = load_theta(run, model, chosen, engine)
    about["tidied"] = run.tidied
    return (model, theta, run.vocabs.target, run.tidied), about


def _named(state: Sequence[tf.Tensor]) -> dict[str, tf.Tensor]:
    return {f"{i:04}": x for i, x in enumerate(state)}


def _one_token(spec: tf.TensorSpec) -> tf.TensorSpec:
    return tf.TensorSpec([None, 1], spec.dtype, spec.name)


def _function(fn: Callable, specs: list[tf.TensorSpec]) -> Any:
    return tf.function(fn, input_signature=specs, autograph=False)
