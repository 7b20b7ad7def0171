"""Continuations of prompts by a language model that lies over a mesh.

With a beam a prompt runs in the bucket of its length and of the new tokens that it asks for, in a batch of exactly
`rows` rows, for which there are programs (MeshSearch). Without one all prompts are in a running batch (mesh_batch.py).

Letters: N prompt, R row of a batch, P token of a prompt, T new token.
"""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_moe.core.decode.flat_beam_search import FlatBeamSearch
from lingvo_moe.core.decode.ranges import Sampling
from lingvo_moe.core.engine.base import Engine
from lingvo_moe.core.engine.checkpoints.run_weights import NEWEST, Chosen
from lingvo_moe.core.engine.kept_programs import text_of
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.lm.generator import GenerateOptions, Generator, read_parts
from lingvo_moe.tasks.lm.lm_model import LmModel
from lingvo_moe.tasks.lm.mesh_batch import MeshBatch
from lingvo_moe.tasks.lm.mesh_pages import MeshPagedSearch, MeshPages
from lingvo_moe.tasks.lm.prompt_decoder import PromptDecoder
from lingvo_moe.tasks.lm.prompt_search import continuations, steps_of
from lingvo_moe.tasks.text.decoding.leading import Kind, LedPrograms, rows_over
from lingvo_moe.tasks.text.decoding.mesh_search import MeshSearch
from lingvo_moe.tasks.text.decoding.text_batch import RunningText, TextBatch, pages_of

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
        self._rows = rows_over(self._engine, model.p.activation_split, o.rows)
        self.mesh_search: LedPrograms
        if o.beam_size == 1:
            search = MeshPagedSearch(model, self._search_options, self._allowed)
            self.mesh_search = MeshPages(self._engine, theta, search, text)
        else:
            self.mesh_search = MeshSearch(self._engine, theta, self._DecoderOf, text)
            self._kept: Any = self._ContinuedOverMesh

    def Batch(self, rows: int, cache_bytes: int) -> TextBatch[RunningText]:
        """See Texts; the bytes are those of all devices together."""
        programs, longest = self._Pages(), pages_of(self._most)
        rows = programs.RowsOf(-(-rows // programs.parts))
        pool = programs.Specs(0).Flatten()
        one = sum(np.prod(x.shape) * np.dtype(x.dtype).itemsize for x in pool) // programs.parts
        return MeshBatch(programs, rows, int(min(cache_bytes // one, rows * longest)), longest)

    def _BatchOf(self, texts: Sequence[RunningText]) -> TextBatch[RunningText]:
        """See Texts; of the generator's rows and of some numbers of pages, so that there are few programs."""
        tokens = max(text.prompt + text.settings.max_tokens for text in texts)
        longest = pages_of(_bucket(tokens, self._most))
        return MeshBatch(self._Pages(), self._rows, self._rows * longest, longest)

    @property
    def _most(self) -> int:
        """The most tokens of a text, those of its prompt and BOS included."""
        return 1 + self.options.max_source_length + self.options.max_length

    def _Pages(self) -> MeshPages:
        assert isinstance(self.mesh_search, MeshPages)
        return self.mesh_search

    def _RunsWhole(self, settings: Sampling) -> bool:
        """See Texts."""
        return self.options.beam_size > 1 and super()._RunsWhole(settings)

    def _DecoderOf(self, kind: Kind) -> PromptDecoder:
        """The search for prompts of P tokens and texts of T, EOS included."""
        prompt, steps = kind
        search = FlatBeamSearch(steps, self._search_options, self._allowed)
        return PromptDecoder(self._model(), search, self._allowed.size, prompt)

    def _ContinuedOverMesh(
        self, ids_NP: tf.Tensor, lengths_N: tf.Tensor, *settings: tf.Tensor
    ) -> dict[str, np.ndarray]:
        """See Generator._Continued."""
        most, ids, lengths = self._Settings(settings)[0].numpy(), ids_NP.numpy(), lengths_N.numpy()
        rows = [(ids[i, : lengths[i]].tolist(), int(most[i])) for i in range(len(ids))]
        longest = max(most.tolist(), default=0)
        columns = {
            name: tf.fill([len(ids), longest][:rank], tf.constant(empty)).numpy()
            for name, (rank, empty) in self._columns.items()
        }
        kinds = [self._Kind(len(prompt), count) for prompt, count in rows]
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

    def _Inputs(self, kind: Kind, rows: Sequence[tuple[list[int], int]]) -> NestedMap:
        """The inputs of MeshSearch for (prompt, most new tokens) of rows; empty rows fill the batch up."""
        ids_RP = np.full([self._rows, kind[0]], self._marks[0], np.int32)
        lengths_R, most_R = np.ones([self._rows], np.int32), np.zeros([self._rows], np.int32)
        for r, (prompt, most) in enumerate(rows):
            ids_RP[r, kind[0] - len(prompt) :] = prompt
            lengths_R[r], most_R[r] = len(prompt), most
        return NestedMap(ids=ids_RP, lengths=lengths_R, max_lengths=steps_of(most_R).numpy())


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


def _bucket(length: int, most: int) -> int:
    """The least power of two from _SMALLEST_BUCKET on that is not below the length; at most `most`."""
    bucket = _SMALLEST_BUCKET
    while bucket < length:
        bucket *= 2
    return min(bucket, most)
