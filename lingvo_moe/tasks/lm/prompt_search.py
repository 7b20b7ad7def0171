"""Continuations of prompts, as ids, with TensorFlow's own kernels. Prompts of a batch have equally many tokens.

Letters: B row, P token of a prompt, V vocabulary, T new token.
"""

import numpy as np
import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.decode import sampling
from lingvo_moe.core.decode.flat_beam_search import SearchOptions
from lingvo_moe.core.kernels import tensorflow
from lingvo_moe.core.kernels.weights import FEWEST_ROWS
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import single_device, use_mesh
from lingvo_moe.core.tensors import dim
from lingvo_moe.tasks.lm.prompt_decoder import LanguageModel, PromptDecoder
from lingvo_moe.tasks.text.decoding.growing_beam_search import BLOCK, GrowingBeamSearch
from lingvo_moe.tasks.text.decoding.sampled_search import SampledSearch


class PenalizedSearch(SampledSearch):
    """Draws by min_p and repetition_penalty of the settings too, and by `seen_BV` of caches: the tokens before."""

    def _Weighed(self, logits_BV: tf.Tensor, cache: NestedMap) -> tf.Tensor:
        settings = cache.settings
        penalty_B = settings.repetition_penalty
        return tf.cond(
            tf.reduce_any((penalty_B != 1.0) | (settings.min_p > 0)),
            lambda: sampling.above(
                sampling.penalized(logits_BV, cache.seen_BV, penalty_B),
                settings.min_p,
                settings.temperature,
            ),
            lambda: logits_BV,
        )


class PromptSearch(PromptDecoder):
    """A model and the search for continuations, in TensorFlow's own kernels; methods run inside of a tf.function.

    Args:
        model: an LmModel.
        options: of the search; its best result alone is returned.
        most: the largest number of new tokens.
        allowed_V: bool, which tokens may be emitted, besides EOS; never PAD and BOS. As long as the vocabulary.
        fewest_rows: of a product, see PackedWeights.
    """

    def __init__(
        self,
        model: LanguageModel,
        options: SearchOptions,
        most: int,
        allowed_V: np.ndarray,
        fewest_rows: int = FEWEST_ROWS,
    ):
        # At the limit the search ends a text with EOS, which is not one of the new tokens.
        kind = PenalizedSearch if options.beam_size == 1 else GrowingBeamSearch
        super().__init__(model, kind(most + 1, options, allowed_V), allowed_V.size)
        self.search.fewest_rows = fewest_rows

    def Search(
        self, theta: NestedMap, ids_BP: tf.Tensor, most_B: tf.Tensor, settings: NestedMap | None
    ) -> NestedMap:
        """Continues prompts.

        Args:
            ids_BP: int32, BOS and the prompts.
            most_B: int32, the largest number of new tokens of each row.
            settings: see PromptDecoder.Start; None, with a beam: the most likely texts.

        Returns:
            See `continuations`.
        """
        rows, before = tf.shape(ids_BP)[0], tf.shape(ids_BP)[1] - 1
        # Rows that are asked for nothing, so that no product has fewer than `fewest_rows` rows.
        fill = tf.maximum(-(-self.search.fewest_rows // tf.maximum(before, 1)) - rows, 0)
        inputs = NestedMap(ids=ids_BP, **({"settings": settings} if settings else {}))
        with use_mesh(single_device()), kernels.using(tensorflow):
            filled = NestedMap(inputs, most=most_B).Transform(
                lambda x: tf.pad(x, [[0, fill]] + [[0, 0]] * (x.shape.rank - 1))
            )
            steps_B = steps_of(filled.pop("most"))
            cache = self._Read(theta, filled, BLOCK)
            letters = self.CacheLetters(cache)
            results = self.search.Run(self._StepFn(theta), cache, steps_B, letters)
            num_rows = dim(ids_BP, 0)
            results = results.Transform(lambda x: x[:num_rows] if x.shape.rank else x)
            return continuations(results, most_B)


def continuations(results: NestedMap, most_B: tf.Tensor) -> NestedMap:
    """The new tokens that a search for at most so many has found.

    Returns:
        NestedMap of ids_BT, int32, PAD after the last; lengths_B, int32, without EOS; finished_B, bool: whether the
        model ended the text, not the limit; and of what is drawn log_probs_BT, float32.
    """
    lengths_B = results.lengths_BK[:, 0] - 1
    drawn = "log_probs_BKT" in results
    return NestedMap(
        {"log_probs_BT": results.log_probs_BKT[:, 0]} if drawn else {},
        ids_BT=results.ids_BKT[:, 0],
        lengths_B=tf.maximum(lengths_B, 0),
        finished_B=lengths_B < most_B,
    )


def steps_of(most_B: tf.Tensor) -> tf.Tensor:
    """The steps of rows: one for EOS, and none for those that are asked for nothing."""
    return tf.where(most_B > 0, most_B + 1, 0)
