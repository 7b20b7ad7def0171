"""Forced decoding: the log-probability of each token of a given target, given its source; or of a text.

Letters: R row of a batch, S source token, T target token.

A pair runs in the bucket of its longer side, in a batch of exactly `rows` rows, so a score does not depend on the other
pairs of the batch. TensorFlow's own kernels run one program for all buckets. Over a mesh there is a program for each,
and compiling them takes longer than scoring thousands of pairs on one host.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.config import checks
from lingvo_moe.core.console.collection import paused_collection
from lingvo_moe.core.decode.ranges import LENGTH
from lingvo_moe.core.engine.base import Compiled, Engine
from lingvo_moe.core.engine.checkpoints.run_weights import NEWEST, Chosen
from lingvo_moe.core.engine.kept_programs import text_of
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.kernels import tensorflow as tensorflow_kernels
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import dims_mapping, single_device, use_mesh
from lingvo_moe.core.task.step import Step
from lingvo_moe.tasks.text.batches.rows_of_pairs import Marks, Shape
from lingvo_moe.tasks.text.decoding.leading import Kind, LedPrograms, rows_over
from lingvo_moe.tasks.text.runs.artifacts import language_codes_of, task_numbers
from lingvo_moe.tasks.text.runs.run_dir import TextRunDir
from lingvo_moe.tasks.text.runs.weights import load_theta
from lingvo_moe.tasks.transformer.task import TransformerTask

_SMALLEST_BUCKET = 8
_LONGEST_PIECE = 64  # bytes of a SentencePiece: 16 characters of UTF-8


@dataclass(frozen=True)
class ScoreOptions:
    """Settings of a scorer."""

    # `max_source_length`, `max_length`: tokens of a source and of a target, EOS included; the rest is cut off.
    max_source_length: int = 256
    max_length: int = 256
    rows: int = 8  # R, pairs scored at once. Fewer are padded, more run in several batches
    experts: bool = False  # whether scores have the experts that the model chose

    def __post_init__(self) -> None:
        checks.check_fields(
            self, {"max_source_length": LENGTH, "max_length": LENGTH, "rows": checks.SIZE}
        )

    def Bucket(self, source_tokens: int, target_tokens: int) -> tuple[int, int]:
        """S and T of the program that a pair runs in: both sides in the next power of two of the longer one."""
        length = _SMALLEST_BUCKET
        while length < max(source_tokens, target_tokens):
            length *= 2
        return min(length, self.max_source_length), min(length, self.max_length)


@dataclass(frozen=True)
class Score:
    """The score of one pair."""

    # float32 [T], of each token of the target given those before it, EOS the last; nats.
    token_log_probs: np.ndarray
    pieces: list[str]  # these tokens, as the vocabulary spells them
    truncated: bool  # whether a side was truncated
    # int32 [T,L,k], where the options ask for them: of the place that predicts each token, the experts in the MoE
    # layers of the last stack, as batches take them (`experts` [B,T,L,k]).
    experts: np.ndarray | None = None

    @property
    def log_prob(self) -> float:
        """The log-probability of the complete target, in nats."""
        return float(self.token_log_probs.sum(dtype=np.float64))


class MeshScores(LedPrograms):
    """LogProbs of batches on the devices of an engine; a kind of program is S and T."""

    def __init__(
        self,
        engine: Engine,
        theta: NestedMap,
        task: TransformerTask,
        vocab_size: int,
        with_experts: bool,
    ):
        super().__init__(engine, theta)
        self._task, self._vocab_size, self._with_experts = task, vocab_size, with_experts
        self._programs: dict[Kind, Compiled] = {}

    def Run(self, kind: Kind, inputs: NestedMap) -> tuple[np.ndarray, ...]:
        """Returns the results of LogProbs; see LedPrograms."""
        self.Tell(kind, inputs)
        if kind not in self._programs:
            row = dims_mapping("BT", self._task.p.activation_split)
            batch = inputs.Transform(lambda x: TensorSpec(x.shape, x.dtype.name, row))
            specs = [self._task.VariableSpecs(), batch]
            text = f"{text_of(self._task)}\n{self._vocab_size}" + "\nexperts" * self._with_experts
            step = Step("log_probs", self._LogProbs, specs, text=text)
            self._programs[kind] = self.engine.BuildStep(step)
        return tuple(self.engine.Get(self._programs[kind](self.theta, inputs)))

    def _LogProbs(self, theta: NestedMap, batch: NestedMap) -> tuple[tf.Tensor, ...]:
        return self._task.LogProbs(theta, batch, self._vocab_size, self._with_experts)


class Scorer:
    """A run's model at a checkpoint; texts of a language model are targets without a source.

    Args:
        options, chosen: how to score, and with which weights.
        engine: over whose devices the model lies; None: TensorFlow's kernels here.

    Attributes:
        about: what the model is: model, params_override, step.
        mesh_scores: the programs over an engine's mesh, if there is one.
        scores_texts: whether it is a language model.

    Raises:
        RunDirError, CheckpointError: as load_theta. ValueError: experts of a model that has none.
    """

    def __init__(
        self,
        logdir: str | os.PathLike,
        options: ScoreOptions | None = None,
        chosen: Chosen = NEWEST,
        trust_run: bool = False,
        engine: Engine | None = None,
    ):
        run = TextRunDir(logdir, trust_run=trust_run)
        self._options = options or ScoreOptions()
        self._task = run.Task(TransformerTask, engine.mesh if engine else None)
        if self._options.experts and not self._task.p.num_experts:
            raise ValueError(f"experts=True: {run.path} has none (task.num_experts=0)")
        self._input = run.Params().input.cls
        self.scores_texts = len(self._task.STACKS) == 1
        self._by_language = self._task.RoutesByTask(self._task.p)
        self._languages, self._codes = run.languages, language_codes_of(run.artifacts)
        self._more = int(self._codes is not None)  # codes on each side
        self._vocabs = run.OpenVocabularies()
        theta, self.about = load_theta(run, self._task, chosen, engine)
        self.mesh_scores: MeshScores | None = None
        if engine is not None:
            rows = rows_over(engine, self._task.p.activation_split, self._options.rows)
            self._options = replace(self._options, rows=rows)
            sizes = self._vocabs.target.size, self._options.experts
            self.mesh_scores = MeshScores(engine, theta, self._task, *sizes)
            return
        self._theta = theta.Transform(tf.constant)
        self._program = tf.function(self._log_probs, autograph=False)

    @property
    def programs(self) -> int:
        """The number of programs traced so far."""
        return self._program.experimental_get_tracing_count()

    def Score(
        self,
        sources: Sequence[str],
        targets: Sequence[str],
        languages: str | Sequence[str] | None = None,
    ) -> list[Score]:
        """Scores each target as the translation of its source.

        Args:
            sources, targets: N texts each. A text may be empty: the end of the sentence is a token, too.
            languages: the source language of each pair, or of all; needed by models that route by it. SOURCE-TARGET,
                of a model between any languages; the code that begins each target is not scored.

        Raises:
            ValueError: no language where it is needed. DataError: one that the run does not know.
        """
        o = self._options
        src = self._encode("source", sources, o.max_source_length)
        tgt = self._encode("target", targets, o.max_length)
        about = self._of_languages(languages, len(src))
        rows = [(s, t, one) for (s, _), (t, _), one in zip(src, tgt, about, strict=True)]
        scores = []
        for (log_probs, _, *experts), (_, source_cut), (ids, cut) in zip(
            self._score(rows), src, tgt
        ):
            pieces = self._vocabs.target.Pieces([*ids, self._vocabs.target.eos_id])
            scores.append(Score(log_probs, pieces, cut or source_cut, *experts))
        return scores

    @property
    def most_ids(self) -> int:
        """The number of ids of a text that ScoreIds takes at most."""
        return self._options.max_length - 1

    def Encode(self, text: str) -> list[int]:
        """The ids of a text of a language model, without marks, as it stands."""
        return self._vocabs.target.Encode(text)

    def ScoreIds(self, texts: Sequence[Sequence[int]]) -> list[tuple[np.ndarray, ...]]:
        """Returns for each text of a language model its ids' log-probabilities, float32 [T], and whether no other token
        was likelier there, bool [T]; the end is not scored. With `options.experts` these come third, see Score."""
        rows = self._score([([], list(ids), ()) for ids in texts])
        return [tuple(values[:-1] for values in row) for row in rows]

    def _score(self, rows: Sequence[tuple]) -> list[tuple[np.ndarray, ...]]:
        """Returns the results of LogProbs for the ids of each target and EOS; `rows` are arguments of Whole."""
        o, more = self._options, 1 + self._more
        buckets: dict[tuple[int, int], list[int]] = {}
        for i, (source, target, _) in enumerate(rows):
            buckets.setdefault(o.Bucket(len(source) + more, len(target) + more), []).append(i)
        scores: dict[int, tuple[np.ndarray, ...]] = {}
        for bucket, members in buckets.items():
            for at in range(0, len(members), o.rows):
                batch = members[at : at + o.rows]
                values = self._run(bucket, [rows[i] for i in batch])
                for r, i in enumerate(batch):
                    ids = slice(self._more, len(rows[i][1]) + more)  # without the target's code
                    scores[i] = tuple(value_R[r, ids] for value_R in values)
        return [scores[i] for i in range(len(rows))]

    def _encode(self, side: str, texts: Sequence[str], most: int) -> list[tuple[list[int], bool]]:
        """The ids of each text without EOS, and whether they were truncated to leave space for it."""
        # The time of tokenising grows with the square of a line that has no spaces.
        longest, less = most * _LONGEST_PIECE, 1 + self._more
        texts = [text.strip() for text in texts]
        ids = self._vocabs[side].EncodeBatch([text[:longest] for text in texts])
        return [
            (one[: most - less], len(text) > longest or len(one) > most - less)
            for text, one in zip(texts, ids)
        ]

    def _of_languages(
        self, languages: str | Sequence[str] | None, number: int
    ) -> list[tuple[Any, ...]]:
        """The rest that rows need of each pair; see LanguagePairs."""
        if not self._by_language and not self._codes:
            return [(0,)] * number
        if languages is None:
            why = "needs SOURCE-TARGET" if self._codes else "routes by the source language"
            raise ValueError(f"the model {why}: give it (--language)")
        by_text = [languages] * number if isinstance(languages, str) else list(languages)
        if self._codes:
            marks = {d: Marks(self._vocabs, self._codes, d) for d in dict.fromkeys(by_text)}
            return [(0, marks[direction]) for direction in by_text]
        return [(task,) for task in task_numbers(by_text, self._languages)]

    def _run(self, bucket: tuple[int, int], pairs: list[tuple]) -> tuple[np.ndarray, ...]:
        """LogProbs of at most `rows` pairs."""
        shape = Shape(self._options.rows, *bucket, pack=False, task_ids=self._by_language)
        rows = [[self._input.Whole(*pair, self._vocabs)] for pair in pairs]
        batch = self._input.ToBatch(rows, shape)
        if self.mesh_scores:
            return self.mesh_scores.Run(bucket, batch)
        batch = batch.Transform(tf.constant)
        if not self.programs:
            self._trace(batch)
        return tuple(values.numpy() for values in self._program(self._theta, batch))

    def _trace(self, batch: NestedMap) -> None:
        """Traces the program for batches of any S and T."""
        specs = self._theta.Transform(lambda x: tf.TensorSpec(x.shape, x.dtype))
        any_length = batch.Transform(lambda x: tf.TensorSpec([x.shape[0], None], x.dtype))
        with paused_collection(), kernels.using(tensorflow_kernels):
            self._program.get_concrete_function(specs, any_length)

    def _log_probs(self, theta: NestedMap, batch: NestedMap) -> tuple[tf.Tensor, ...]:
        with use_mesh(single_device()):
            size, experts = self._vocabs.target.size, self._options.experts
            return self._task.LogProbs(theta, batch, size, experts)
