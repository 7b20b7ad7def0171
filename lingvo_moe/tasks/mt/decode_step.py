"""Decoding of translations for XLA: the complete search, or one step of the flat beam search.

The step is the body of the search's loop as a function of tensors. So it can be lowered as a separate
program, run by another loop, and planned for machines that you do not have.

Letters: B row, S source token, J hypothesis, V vocabulary.
"""

from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.decode.flat_beam_search import (
    NEVER,
    FlatBeamSearch,
    SearchOptions,
    StepFn,
)
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.task.step import Step
from lingvo_moe.tasks.text.decoding.programs import decoding_programs
from lingvo_moe.tasks.text.vocabulary.special_ids import BOS_ID, EOS_ID, PAD_ID


class TranslationModel(Protocol):
    """The methods of a model that a search calls. `MtModel` documents their arguments and results."""

    @property
    def p(self) -> Params:
        """Parameters that include `source_vocab_size` and `target_vocab_size`."""

    def Encode(self, theta: NestedMap, src: NestedMap) -> NestedMap: ...

    def InitCache(
        self, theta: NestedMap, encoded: NestedMap, beam_size: int, max_length: int
    ) -> NestedMap: ...

    def CacheLetters(self) -> NestedMap: ...

    def ExtendStep(
        self, theta: NestedMap, ids: tf.Tensor, cache: NestedMap, time: tf.Tensor, mask: tf.Tensor
    ) -> tuple[tf.Tensor, NestedMap]: ...


class Decoder:
    """A model and a search over its translations.

    Args:
        max_length: the most tokens of a translation, EOS included.
        vocab_size: translations contain only the first vocab_size of the model's V tokens, for a vocabulary with fewer
            pieces than the model has embeddings; None: all V. PAD, BOS and UNK never occur in translations.
    """

    def __init__(
        self,
        model: TranslationModel,
        options: SearchOptions,
        max_length: int,
        vocab_size: int | None = None,
    ):
        self.model, self.max_length = model, max_length
        self._beam_size = options.beam_size
        self._vocab_size = vocab_size or model.p.target_vocab_size
        allowed_V = np.arange(self._vocab_size) != options.unk_id
        self.search = FlatBeamSearch(max_length, options, allowed_V)

    def Search(self, theta: NestedMap, src: NestedMap, max_lengths_B: tf.Tensor) -> NestedMap:
        """Encodes the sources and runs the complete beam search over their translations.

        Equivalent to `Start`, then `Step` until every row is done.

        Args:
            src: int32 `ids`, `segment_ids` (1, or 0 at padding) and `segment_pos`, [B,S] each; and `first` [B], if the
                first token of each row's translations is given.
            max_lengths_B: int32, the maximum length of each row's translations, EOS included; 0 skips the row.

        Returns:
            NestedMap(ids_BKT, lengths_BK, scores_BK, steps); see `FlatBeamSearch.Run`.
        """
        cache = self.InitCache(theta, self.model.Encode(theta, src))
        if "first" in src:
            cache.first = src.first
        return self.search.Run(self._StepFn(theta), cache, max_lengths_B)

    def Start(
        self, theta: NestedMap, src: NestedMap, max_lengths_B: tf.Tensor
    ) -> tuple[NestedMap, NestedMap]:
        """The state and the caches before the first step; arguments as for `Search`."""
        encoded = self.model.Encode(theta, src)
        return self.search.Start(max_lengths_B), self.InitCache(theta, encoded)

    def Step(
        self, state: NestedMap, cache: NestedMap, theta: NestedMap
    ) -> tuple[NestedMap, NestedMap]:
        """One step: embeds the newest tokens, extends the decoder by them, expands the beams.

        Pure. State and caches come out as they go in, so that their memory can be donated.
        """
        return self.search.Step(self._StepFn(theta), state, cache)

    def InitCache(self, theta: NestedMap, encoded: NestedMap) -> NestedMap:
        """The caches before the first step, from the results of the model's `Encode`."""
        return self.model.InitCache(theta, encoded, self._beam_size, self.max_length)

    def Caches(self, theta: NestedMap, shape: tuple[int, int]) -> NestedMap:
        """See SearchInSteps."""
        model: Any = self.model
        memory = tf.zeros([*shape, model.p.model_dim], model.fprop_dtype)
        encoded = NestedMap(memory=memory, segment_ids=tf.zeros(shape, tf.int32))
        if "task_ids" in self.CacheLetters():
            encoded.task_ids = encoded.segment_ids[:, 0]
        return self.InitCache(theta, encoded)

    def CacheLetters(self) -> NestedMap:
        """The letters of the caches' tensors."""
        return self.model.CacheLetters()

    def _StepFn(self, theta: NestedMap) -> StepFn:
        def step(ids: tf.Tensor, cache: Any, time: tf.Tensor, mask: tf.Tensor) -> tuple:
            logits, cache = self.model.ExtendStep(theta, ids, cache, time, mask)
            return with_first(logits[..., : self._vocab_size], cache, time), cache

        return step


def with_first(logits_BJV: tf.Tensor, cache: NestedMap, time: tf.Tensor) -> tf.Tensor:
    """The logits of a step; of the first one, where `cache.first`, int32 [B], gives its token, of that token alone.

    Its log-probability is 0 then.
    """
    if "first" not in cache:
        return logits_BJV
    only = tf.equal(tf.range(tf.shape(logits_BJV)[-1]), cache.first[:, tf.newaxis, tf.newaxis])
    return tf.where((time > 0) | only, logits_BJV, NEVER)


def decode_programs(
    task: Any, rows: int, source_length: int, beam_size: int = 4, max_length: int = 0
) -> tuple[Step, Step]:
    """The programs that translate: to encode sources, and one step of the beam search; see `decoding_programs`.

    Args:
        task: an MtModel.
        rows: B, of all devices together.
        source_length: S.
        beam_size: J.
        max_length: the longest translation, for which the caches are made; 0: 2 S + 10, as the
            translator does it up to its own limit.
    """
    options = SearchOptions(beam_size, 1, bos_id=BOS_ID, eos_id=EOS_ID, pad_id=PAD_ID)
    decoder = Decoder(task, options, max_length or 2 * source_length + 10)
    names = ["ids", "segment_ids", "segment_pos"] + ["task_ids"] * task.RoutesByTask(task.p)
    src = NestedMap.fromkeys(names)
    return decoding_programs("encode", decoder, src, (rows, source_length))


def decode_step(
    task: Any, rows: int, source_length: int, beam_size: int = 4, max_length: int = 0
) -> Step:
    """The second of `decode_programs`, one step of the beam search: (state, cache, theta) -> (state, cache)."""
    return decode_programs(task, rows, source_length, beam_size, max_length)[1]
