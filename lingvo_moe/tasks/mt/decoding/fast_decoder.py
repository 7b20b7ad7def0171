"""The search of translations with TensorFlow's kernels: any number and length of rows, with or without a shortlist.

Letters: B row, S source token, J hypothesis, U place in the union of the rows' shortlists.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.decode.flat_beam_search import SearchOptions, StepFn
from lingvo_moe.core.decode.ranges import Sampling
from lingvo_moe.core.kernels import tensorflow
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.private.tensorflow import unoptimized
from lingvo_moe.core.sharding import single_device, use_mesh
from lingvo_moe.tasks.mt.decode_step import Decoder
from lingvo_moe.tasks.mt.decoding.shortlist_columns import (
    ALLOWED,
    LETTERS,
    ShortlistColumns,
    logits_of_lists,
    tokens_of_places,
)
from lingvo_moe.tasks.text.decoding.growing_beam_search import BLOCK, GrowingBeamSearch
from lingvo_moe.tasks.text.decoding.kept_graph import KeptGraph, key_of
from lingvo_moe.tasks.text.decoding.sampled_search import SampledSearch
from lingvo_moe.tasks.text.decoding.saved_weights import PackedWeights


class FastDecoder(Decoder):
    """A model on a CPU and a search over its translations, whose caches grow.

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
        super().__init__(weights.model, options, max_length, vocab_size, sampling)
        self._weights, self._shortlist = weights, shortlist
        kind = SampledSearch if sampling else GrowingBeamSearch
        allowed_V = self.search.allowed_V if shortlist is None else ALLOWED
        self.search = kind(max_length, options, allowed_V)
        if shortlist is None:
            self.search.fewest_rows = weights.fewest_rows

    def Find(self, src: NestedMap, max_lengths_B: tf.Tensor) -> NestedMap:
        """Search with the weights, inside of a tf.function; B and S may be unknown."""
        results = NestedMap()

        # A function of its own, so that TensorFlow runs it as it is, also where it is exported and loaded.
        @tf.function(autograph=False, experimental_attributes={"_noinline": True})
        def find(*inputs: tf.Tensor) -> list[tf.Tensor]:
            with use_mesh(single_device()), kernels.using(tensorflow):
                rows = src.Pack(list(inputs[1:]))
                results.update(self.Search(self._weights.Theta(), rows, inputs[0]))
            return results.Flatten()

        with unoptimized():
            return results.Pack(find(max_lengths_B, *src.Flatten()))

    def Kept(self, rows: Callable, specs: Sequence[tf.TensorSpec], text: str) -> KeptGraph:
        """A function of what `rows` makes Find's arguments of, to its results, kept for the next start.

        Args:
            text: what determines it beside code and specs, see `key_of`.
        """
        parts = (self._weights, self._shortlist)
        variables = [x for part in parts if part is not None for x in part.variables]

        def search(*arguments: tf.Tensor) -> dict[str, tf.Tensor]:
            return dict(self.Find(*rows(*arguments)))

        return KeptGraph(search, specs, variables, key_of("translate", text, variables))

    def Search(self, theta: NestedMap, src: NestedMap, max_lengths_B: tf.Tensor) -> NestedMap:
        """See Decoder."""
        model = self.model
        cache = self._InitCache(theta, src, model.Encode(theta, src), BLOCK)
        letters = self.CacheLetters(cache)
        if self._shortlist is None:
            return self.search.Run(self._StepFn(theta), cache, max_lengths_B, letters)
        cache.shortlist, union_U = self._shortlist.Lists(src.ids)
        letters.shortlist = LETTERS
        table = model.softmax.OfTokens(theta[model.softmax_table], union_U)
        step = self._ShortlistStepFn(NestedMap(theta, **{model.softmax_table: table}))
        results = self.search.Run(step, cache, max_lengths_B, letters)
        return NestedMap(results, ids_BKT=tokens_of_places(cache.shortlist, results.ids_BKT))

    def _ShortlistStepFn(self, weights: NestedMap) -> StepFn:
        """A step over places in each row's list, with the weights of the tokens of all lists."""

        def step(places: tf.Tensor, cache: Any, time: tf.Tensor, mask: tf.Tensor) -> tuple:
            ids = tokens_of_places(cache.shortlist, places)
            logits, cache = self.model.ExtendStep(weights, ids, cache, time, mask)
            return logits_of_lists(cache.shortlist, logits), cache

        return step
