"""Decoding of translations: the complete search, or its beginning and one step of it.

The step is the body of the search's loop as a function of tensors. So it can be lowered as a separate program, run by
another loop (tasks/text/decoding/mesh_search.py), and planned for machines that you do not have.

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
from lingvo_moe.core.decode.ranges import Sampling
from lingvo_moe.core.decode.sampling import LETTERS as SETTINGS
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.task.step import Step
from lingvo_moe.tasks.text.decoding.programs import decoding_programs
from lingvo_moe.tasks.text.decoding.sampled_search import SampledSearch, settings_of
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
        sampling: draws the translations, with what `src.seeds` adds to the seed; None: searches for them.
    """

    def __init__(
        self,
        model: TranslationModel,
        options: SearchOptions,
        max_length: int,
        vocab_size: int | None = None,
        sampling: Sampling | None = None,
    ):
        self.model: Any = model
        self.max_length, self._sampling = max_length, sampling
        self._beam_size = options.beam_size
        self._vocab_size = vocab_size or model.p.target_vocab_size
        allowed_V = np.arange(self._vocab_size) != options.unk_id
        kind = SampledSearch if sampling else FlatBeamSearch
        self.search: Any = kind(max_length, options, allowed_V)

    def Search(self, theta: NestedMap, src: NestedMap, max_lengths_B: tf.Tensor) -> NestedMap:
        """Encodes the sources and runs the complete search over their translations.

        Equivalent to `Start`, then `Step` until every row is done.

        Args:
            src: int32 `ids`, `segment_ids` (1, or 0 at padding) and `segment_pos`, [B,S] each; `task_ids`, if the model
                routes by them; `seeds` [B], if translations are drawn; `first` [B], their first token, if given.
            max_lengths_B: int32, the maximum length of each row's translations, EOS included; 0 skips the row.

        Returns:
            NestedMap(ids_BKT, lengths_BK, scores_BK, steps); see `FlatBeamSearch.Run`.
        """
        cache = self._InitCache(theta, src, self.model.Encode(theta, src))
        results: NestedMap = self.search.Run(self._StepFn(theta), cache, max_lengths_B)
        return results

    def Start(
        self, theta: NestedMap, src: NestedMap, max_lengths_B: tf.Tensor
    ) -> tuple[NestedMap, NestedMap]:
        """The state and the caches before the first step; arguments as for `Search`."""
        cache = self._InitCache(theta, src, self.model.Encode(theta, src))
        return self.search.Start(max_lengths_B), cache

    def Step(
        self, state: NestedMap, cache: NestedMap, theta: NestedMap
    ) -> tuple[NestedMap, NestedMap]:
        """One step: embeds the newest tokens, extends the decoder by them, expands the beams.

        Pure. State and caches come out as they go in, so that their memory can be donated.
        """
        return self.search.Step(self._StepFn(theta), state, cache)

    def Caches(self, theta: NestedMap, src: NestedMap) -> NestedMap:
        """See SearchInSteps."""
        model = self.model
        memory = tf.zeros([*src.ids.shape, model.p.model_dim], model.fprop_dtype)
        encoded = NestedMap(memory=memory, segment_ids=src.segment_ids)
        if "task_ids" in model.CacheLetters():
            encoded.task_ids = src.segment_ids[:, 0]
        return self._InitCache(theta, src, encoded)

    def CacheLetters(self, cache: NestedMap) -> NestedMap:
        """See SearchInSteps."""
        of_rows = {"first": "B", "settings": SETTINGS}
        more = {name: letters for name, letters in of_rows.items() if name in cache}
        return NestedMap(self.model.CacheLetters(), **more)

    def _InitCache(
        self, theta: NestedMap, src: NestedMap, encoded: NestedMap, steps: int | None = None
    ) -> NestedMap:
        """Caches with room for so many steps, from sources and the results of the model's `Encode`."""
        cache = self.model.InitCache(theta, encoded, self._beam_size, steps or self.max_length)
        if "first" in src:
            cache.first = src.first
        if self._sampling:
            cache.settings = settings_of(self._sampling, src.seeds)
        return cache

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
    begun = time > 0 if time.shape.rank == 0 else time[:, :, tf.newaxis] > 0
    return tf.where(begun | only, logits_BJV, NEVER)


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
    src = NestedMap(dict.fromkeys(names, TensorSpec((rows, source_length), "int32")))
    return decoding_programs("encode", decoder, src)
