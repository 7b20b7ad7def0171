"""The search of translations with TensorFlow's kernels: any number and length of rows, with or without a shortlist.

Letters: B row, S source token, J hypothesis, U place in the union of the rows' shortlists.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.decode.flat_beam_search import SearchOptions, StepFn
from lingvo_moe.core.decode.ranges import Sampling
from lingvo_moe.core.decode.sampling import LETTERS as SETTINGS
from lingvo_moe.core.kernels import tensorflow
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import single_device, use_mesh
from lingvo_moe.tasks.mt.decode_step import with_first
from lingvo_moe.tasks.mt.decoding.shortlist_columns import (
    ALLOWED,
    LETTERS,
    ShortlistColumns,
    logits_of_lists,
    tokens_of_places,
)
from lingvo_moe.tasks.text.decoding.growing_beam_search import BLOCK, GrowingBeamSearch
from lingvo_moe.tasks.text.decoding.sampled_search import SampledSearch, settings_of
from lingvo_moe.tasks.text.decoding.saved_weights import PackedWeights


class FastDecoder:
    """A model on a CPU and a search over its translations.

    Args:
        weights: of an MtModel, or of another TranslationModel.
        max_length: the most tokens of a translation, EOS included.
        vocab_size: translations contain only the first vocab_size of the model's V tokens, never PAD, BOS and UNK.
        shortlist: the tokens that a row is scored for, by its source; None: all.
        sampling: draws the translations, with what `src.seeds` adds to the seed; None: searches for them.

    Raises ValueError: a shortlist for a model that packs no weights.
    """

    def __init__(
        self,
        weights: PackedWeights,
        options: SearchOptions,
        max_length: int,
        vocab_size: int,
        shortlist: ShortlistColumns | None = None,
        sampling: Sampling | None = None,
    ):
        if shortlist and not weights.are_packed:
            raise ValueError(
                f"a shortlist is for models that pack their weights; {type(weights.model).__name__} scores all tokens"
            )
        self._weights, self._shortlist, self._sampling = weights, shortlist, sampling
        self._beam_size, self._vocab_size = options.beam_size, vocab_size
        allowed_V = np.arange(vocab_size) != options.unk_id if shortlist is None else ALLOWED
        search = SampledSearch if sampling else GrowingBeamSearch
        self._search = search(max_length, options, allowed_V)

    def Search(self, src: NestedMap, max_lengths_B: tf.Tensor) -> NestedMap:
        """Encodes the sources and runs the complete search, inside of a tf.function; B and S may be unknown.

        Args:
            src: int32 `ids`, `segment_ids` (1, or 0 at padding) and `segment_pos`, [B,S] each; and `task_ids`, if the
                model routes by them; `seeds` [B], if translations are drawn; `first` [B], their first token, if given.
            max_lengths_B: int32, the maximum length of each row's translations, EOS included; 0 skips the row.

        Returns:
            NestedMap(ids_BKT, lengths_BK, scores_BK, steps); see `GrowingBeamSearch.Run`.
        """
        with use_mesh(single_device()), kernels.using(tensorflow):
            return self._Search(src, max_lengths_B)

    def _Search(self, src: NestedMap, max_lengths_B: tf.Tensor) -> NestedMap:
        model, weights = self._weights.model, self._weights.Tensors()
        cache = model.InitCache(weights, model.Encode(weights, src), self._beam_size, BLOCK)
        letters = model.CacheLetters()
        if "first" in src:
            cache.first, letters.first = src.first, "B"
        if self._sampling:
            cache.settings, letters.settings = settings_of(self._sampling, src.seeds), SETTINGS
        if self._shortlist is None:
            return self._search.Run(self._StepFn(weights), cache, max_lengths_B, letters)
        cache.shortlist, union_U = self._shortlist.Lists(src.ids)
        letters.shortlist = LETTERS
        table = model.softmax.OfTokens(weights[model.softmax_table], union_U)
        step = self._ShortlistStepFn(NestedMap(weights, **{model.softmax_table: table}))
        results = self._search.Run(step, cache, max_lengths_B, letters)
        return NestedMap(results, ids_BKT=tokens_of_places(cache.shortlist, results.ids_BKT))

    def _StepFn(self, weights: NestedMap) -> StepFn:
        def step(ids: tf.Tensor, cache: Any, time: tf.Tensor, mask: tf.Tensor) -> tuple:
            logits, cache = self._weights.model.ExtendStep(weights, ids, cache, time, mask)
            return with_first(logits[..., : self._vocab_size], cache, time), cache

        return step

    def _ShortlistStepFn(self, weights: NestedMap) -> StepFn:
        """A step over places in each row's list, with the weights of the tokens of all lists."""

        def step(places: tf.Tensor, cache: Any, time: tf.Tensor, mask: tf.Tensor) -> tuple:
            ids = tokens_of_places(cache.shortlist, places)
            logits, cache = self._weights.model.ExtendStep(weights, ids, cache, time, mask)
            return logits_of_lists(cache.shortlist, logits), cache

        return step
