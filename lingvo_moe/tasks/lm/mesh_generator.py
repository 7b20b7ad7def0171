"""Continuations of prompts by a language model that lies over a mesh.

A prompt runs in the bucket of its length and of the new tokens that it asks for, in a batch of exactly `rows` rows, for
which there are programs (MeshSearch). Texts of a batch begin together; their news come a block of steps at a time.

Letters: N prompt, R row of a batch, P token of a prompt, T new token.
"""

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_moe.core.decode.flat_beam_search import FlatBeamSearch
from lingvo_moe.core.engine.base import Engine
from lingvo_moe.core.engine.checkpoints.run_weights import NEWEST, Chosen
from lingvo_moe.core.engine.kept_programs import text_of
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.lm.generator import GenerateOptions, Generator, read_parts
from lingvo_moe.tasks.lm.lm_model import LmModel
from lingvo_moe.tasks.lm.prompt_decoder import PromptDecoder
from lingvo_moe.tasks.lm.prompt_search import PenalizedSearch, continuations, steps_of
from lingvo_moe.tasks.lm.running_batch import RunningText, TextBatch
from lingvo_moe.tasks.lm.saved_generator import SETTINGS
from lingvo_moe.tasks.text.decoding.leading import Kind, rows_over
from lingvo_moe.tasks.text.decoding.mesh_search import MeshSearch

_SMALLEST_BUCKET = 16


class MeshGenerator(Generator):
    """A Generator over the devices of an engine, which cannot be exported.

    Args:
        engine: whose devices hold theta.
        Others: as of Generator.
    """

    def __init__(
        self,
        engine: Engine,
        model: LmModel,
        theta: NestedMap,
        vocab: bytes,
        options: GenerateOptions | None = None,
        tidied: int = 0,
    ):
        self._engine = engine
        super().__init__(model, theta, vocab, options, tidied)

    def _Load(
        self, model: LmModel, theta: NestedMap, prompt: Sequence[tf.TensorSpec], text: str
    ) -> None:
        """See Generator."""
        del prompt, text
        o = self.options
        if o.weights == "int8":
            raise ValueError("weights=int8 is for one host, not over a mesh: leave it out")
        self._model = lambda: model  # tf.Module would track it
        allowed = self._allowed.size, np.flatnonzero(~self._allowed).tolist()
        text = f"{text_of(model)}\n{o}\n{self._search_options}\n{allowed}"
        self.mesh_search = MeshSearch(self._engine, theta, self._DecoderOf, text)
        self._rows = rows_over(self._engine, model.p.activation_split, o.rows)
        self._kept: Any = self._ContinuedOverMesh

    def Batch(self, rows: int, cache_bytes: int) -> TextBatch:
        """See Texts; caches are as large as their buckets."""
        del rows, cache_bytes
        return _MeshBatch(self, self._rows)

    def _BatchOf(self, texts: Sequence[RunningText]) -> TextBatch:
        """See Texts."""
        del texts
        return _MeshBatch(self, self._rows)

    def _DecoderOf(self, kind: Kind) -> PromptDecoder:
        """The search for prompts of P tokens and texts of T, EOS included."""
        prompt, steps = kind
        draws = self.options.beam_size == 1
        search = (PenalizedSearch if draws else FlatBeamSearch)(
            steps, self._search_options, self._allowed
        )
        return PromptDecoder(self._model(), search, self._allowed.size, prompt)

    def _ContinuedOverMesh(
        self, ids_NP: tf.Tensor, lengths_N: tf.Tensor, *settings: tf.Tensor
    ) -> dict[str, np.ndarray]:
        """See Generator._Continued."""
        most, rest = self._Settings(settings)
        most, ids, lengths = most.numpy(), ids_NP.numpy(), lengths_N.numpy()
        rows = [
            (ids[i, : lengths[i]].tolist(), int(most[i]), _row_of(rest, i)) for i in range(len(ids))
        ]
        longest = max(most.tolist(), default=0)
        columns = {
            name: tf.fill([len(ids), longest][:rank], tf.constant(empty)).numpy()
            for name, (rank, empty) in self._columns.items()
        }
        kinds = [self._Kind(len(prompt), count) for prompt, count, _ in rows]
        for kind in sorted({*kinds}):
            members = [i for i, one in enumerate(kinds) if one == kind]
            for at in range(0, len(members), self._rows):
                batch = members[at : at + self._rows]
                inputs = self._Inputs(kind, [rows[i] for i in batch])
                results = self.mesh_search.Run(kind, inputs)
                new = continuations(results, inputs.max_lengths - 1)
                values = self._ColumnsOf(new, tf.constant(longest))
                for name, column in columns.items():
                    column[batch] = np.asarray(values[name])[: len(batch)]
        return {name: tf.constant(column) for name, column in columns.items()}

    def _Kind(self, prompt: int, new: int) -> Kind:
        """P and T of the program for a prompt of so many tokens and so many new ones."""
        o = self.options
        return _bucket(prompt, o.max_source_length + 1), _bucket(new + 1, o.max_length + 1)

    def _Inputs(self, kind: Kind, rows: Sequence[tuple[list[int], int, Any]]) -> NestedMap:
        """The inputs of MeshSearch for (prompt, most new tokens, settings) of rows; empty rows fill the batch up."""
        ids_RP = np.full([self._rows, kind[0]], self._marks[0], np.int32)
        lengths_R, most_R = np.ones([self._rows], np.int32), np.zeros([self._rows], np.int32)
        for r, (prompt, most, _) in enumerate(rows):
            ids_RP[r, kind[0] - len(prompt) :] = prompt
            lengths_R[r], most_R[r] = len(prompt), most
        inputs = NestedMap(ids=ids_RP, lengths=lengths_R, max_lengths=steps_of(most_R).numpy())
        if self.options.beam_size == 1:
            values = [row[2] for row in rows] + [rows[0][2]] * (self._rows - len(rows))
            inputs.settings = NestedMap({
                name: np.asarray([value[name] for value in values], spec.dtype.as_numpy_dtype)
                for name, spec in list(SETTINGS.items())[1:]
            })  # fmt: skip
        return inputs


def load_mesh_generator(
    engine: Engine,
    logdir: str | os.PathLike,
    options: GenerateOptions | None = None,
    chosen: Chosen = NEWEST,
    trust_run: bool = False,
) -> tuple[MeshGenerator, dict[str, Any]]:
    """The language model of a run over an engine's devices; see load_generator."""
    (model, theta, vocab, tidied), about = read_parts(logdir, chosen, trust_run, engine)
    return MeshGenerator(engine, model, theta, vocab, options, tidied), about


class _MeshBatch(TextBatch):
    """A batch over a mesh: the texts that wait begin together, once all that run have ended. It has no pages."""

    def __init__(self, generator: MeshGenerator, rows: int):
        super().__init__(rows, pages=0)
        self._generator = generator
        self._blocks: Iterator[list[RunningText]] = iter(())

    def Step(self) -> list[RunningText]:
        """See TextBatch; a block of steps."""
        news = next(self._blocks, None)
        if news is not None:
            return news
        self.running = [self.waiting.popleft() for _ in range(min(len(self.waiting), self._rows))]
        self._blocks = self._Run([*self.running]) if self.running else iter(())
        return []

    def _Run(self, rows: Sequence[RunningText]) -> Iterator[list[RunningText]]:
        """Yields after each block those of the texts that have new tokens or ended."""
        generator = self._generator
        most = max(text.settings.max_tokens for text in rows)
        kind = generator._Kind(max(text.prompt for text in rows), most)
        names = list(SETTINGS)
        inputs = generator._Inputs(
            kind,
            [
                (text.ids, text.settings.max_tokens, dict(zip(names, text.settings.Values())))
                for text in rows
            ],
        )
        for report in generator.mesh_search.Blocks(kind, inputs):
            yield [text for r, text in enumerate(rows) if self._Read(text, report, r)]

    def _Read(self, text: RunningText, report: NestedMap, row: int) -> bool:
        """Takes a text's new tokens from the report of a search; whether it is news."""
        if text not in self.running:
            return False
        done = bool(report.done_B[row])
        count = int(report.lengths_BK[row, 0]) - 1 if done else int(report.steps)
        self.tokens += count - len(text.new)
        text.ids[text.prompt :] = report.ids_BS[row, 1 : 1 + count].tolist()
        text.log_probs[:] = report.log_probs_BKT[row, 0, :count].tolist()
        if done:
            text.reason = "stop" if count < text.settings.max_tokens else "length"
            self.running.remove(text)
        return True


def _row_of(settings: NestedMap | None, row: int) -> dict[str, Any]:
    return {name: value[row].numpy() for name, value in (settings or {}).items()}


def _bucket(length: int, most: int) -> int:
    """The least power of two from _SMALLEST_BUCKET on that is not below the length; at most `most`."""
    bucket = _SMALLEST_BUCKET
    while bucket < length:
        bucket *= 2
    return min(bucket, most)
