"""Continuations of prompts, as ids: the prompt's tokens at once, then flat beam search or samples, a token a step.

Prompts of a batch have equally many tokens.

Letters: B row, P token of a prompt, J hypothesis, S place in the flat sequence, V vocabulary, T new token.
"""

from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.decode import sampling
from lingvo_moe.core.decode.flat_beam_search import SearchOptions, StepFn
from lingvo_moe.core.kernels import tensorflow
from lingvo_moe.core.kernels.weights import FEWEST_ROWS
from lingvo_moe.core.nested_map import NestedMap, map_structure
from lingvo_moe.core.sharding import single_device, use_mesh
from lingvo_moe.core.tensors import dim
from lingvo_moe.tasks.text.decoding.growing_beam_search import BLOCK, GrowingBeamSearch
from lingvo_moe.tasks.text.decoding.sampled_search import SampledSearch


class LanguageModel(Protocol):
    """The methods of a model that the search calls; `LmModel` documents them."""

    def InitCache(self, batch: int | tf.Tensor, length: int) -> Any: ...

    def CacheLetters(self) -> Any: ...

    def ExtendStep(
        self, theta: NestedMap, ids: tf.Tensor, cache: Any, time: tf.Tensor, mask: tf.Tensor
    ) -> tuple[tf.Tensor, Any]: ...


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


class PromptSearch:
    """A model and the search for continuations, in TensorFlow's own kernels; methods run inside of a tf.function.

    Args:
        model: an LmModel.
        options: of the search; its best result alone is returned.
        most: the largest number of new tokens.
        allowed_V: bool, which tokens may be emitted, besides EOS; never PAD and BOS. As long as the vocabulary.
    """

    def __init__(
        self, model: LanguageModel, options: SearchOptions, most: int, allowed_V: np.ndarray
    ):
        self._model, self._o, self._allowed_V = model, options, allowed_V
        # At the limit the search ends a text with EOS, which is not one of the new tokens.
        kind = PenalizedSearch if options.beam_size == 1 else GrowingBeamSearch
        self._search = kind(most + 1, options, allowed_V)

    def Search(
        self, theta: NestedMap, ids_BP: tf.Tensor, most_B: tf.Tensor, settings: NestedMap | None
    ) -> NestedMap:
        """Continues prompts.

        Args:
            ids_BP: int32, BOS and the prompts.
            most_B: int32, the largest number of new tokens of each row.
            settings: see `sampling.sample`, with min_p and repetition_penalty, float32 [B]; None, with a beam: the most
                likely texts.

        Returns:
            NestedMap of ids_BT, int32, PAD after the last; lengths_B, int32, without EOS; finished_B, bool: whether the
            model ended the text, not the limit; and of what is drawn log_probs_BT, float32.
        """
        with use_mesh(single_device()), kernels.using(tensorflow):
            most_B, cache, letters = self._Start(theta, ids_BP, most_B, settings)
            results = self._search.Run(self._StepFn(theta), cache, _steps(most_B), letters)
            num_rows = dim(ids_BP, 0)
            results = results.Transform(lambda x: x[:num_rows] if x.shape.rank else x)
            return self._Result(results, most_B[:num_rows])

    def _Result(self, results: NestedMap, most_B: tf.Tensor) -> NestedMap:
        lengths_B = results.lengths_BK[:, 0] - 1
        drawn = "log_probs_BKT" in results
        return NestedMap(
            {"log_probs_BT": results.log_probs_BKT[:, 0]} if drawn else {},
            ids_BT=results.ids_BKT[:, 0],
            lengths_B=tf.maximum(lengths_B, 0),
            finished_B=lengths_B < most_B,
        )

    def _Start(
        self, theta: NestedMap, ids_BP: tf.Tensor, most_B: tf.Tensor, settings: NestedMap | None
    ) -> tuple[tf.Tensor, NestedMap, NestedMap]:
        """The limits, the caches with all tokens of the prompts but the last, and the caches' letters.

        Rows that are asked for nothing fill the batch up, so that no product has fewer than FEWEST_ROWS rows.
        """
        rows, before = tf.shape(ids_BP)[0], tf.shape(ids_BP)[1] - 1
        fill = tf.maximum(-(-FEWEST_ROWS // tf.maximum(before, 1)) - rows, 0)

        def filled(x: tf.Tensor) -> tf.Tensor:
            return tf.pad(x, [[0, fill]] + [[0, 0]] * (x.shape.rank - 1))

        ids_BP, most_B = filled(ids_BP), filled(most_B)
        cache = self._model.InitCache(dim(ids_BP, 0), before + BLOCK)
        cache = tf.cond(
            before > 0, lambda: self._Prefilled(theta, ids_BP[:, :-1], cache), lambda: cache
        )
        letters = self._Letters(settings is not None)
        state = NestedMap(
            model=map_structure(self._ForAll, cache, letters.model),
            last=ids_BP[:, -1],
            before=tf.fill([dim(ids_BP, 0)], before),
        )
        if settings is not None:
            state.settings = settings.Transform(filled)
            rows_BP = tf.zeros_like(ids_BP) + tf.range(dim(ids_BP, 0))[:, tf.newaxis]
            at = tf.reshape(tf.stack([rows_BP, ids_BP], -1), [-1, 2])
            nothing_BV = tf.zeros([dim(ids_BP, 0), self._allowed_V.size], tf.bool)
            state.seen_BV = tf.tensor_scatter_nd_update(
                nothing_BV, at, tf.fill(tf.shape(at)[:1], True)
            )
        return most_B, state, letters

    def _Letters(self, samples: bool) -> NestedMap:
        settings = NestedMap(sampling.LETTERS, min_p="B", repetition_penalty="B")
        more = {"settings": settings, "seen_BV": "BV"} if samples else {}
        return NestedMap(model=self._model.CacheLetters(), last="B", before="B", **more)

    def _Prefilled(self, theta: NestedMap, ids_BP: tf.Tensor, cache: Any) -> Any:
        at_P = tf.range(dim(ids_BP, 1))
        mask_PS = tf.range(dim(ids_BP, 1) + BLOCK) <= at_P[:, tf.newaxis]
        mask = tf.tile(mask_PS[tf.newaxis], [dim(ids_BP, 0), 1, 1])
        return self._model.ExtendStep(theta, ids_BP, cache, at_P, mask)[1]

    def _ForAll(self, x: tf.Tensor, letters: str) -> tf.Tensor:
        """A cache of one hypothesis as one of all, of which the first has its keys and values (X = J K)."""
        more = (self._o.beam_size - 1) * x.shape[letters.index("X")]
        return tf.pad(x, [[0, more * (letter == "X")] for letter in letters]) if more else x

    def _StepFn(self, theta: NestedMap) -> StepFn:
        J, size = self._o.beam_size, self._allowed_V.size

        def step(ids: tf.Tensor, cache: Any, time: tf.Tensor, mask: tf.Tensor) -> tuple:
            ids = tf.where(time == 0, cache.last[:, tf.newaxis], ids)
            before = cache.before[0]
            first_S = tf.range(before * J) % J == 0
            seen = tf.tile(first_S[tf.newaxis, tf.newaxis], [dim(mask, 0), J, 1])
            mask = tf.concat([seen, mask], 2)
            logits, model = self._model.ExtendStep(theta, ids, cache.model, before + time, mask)
            logits, cache = logits[..., :size], NestedMap(cache, model=model)
            if "settings" in cache:
                cache.seen_BV |= tf.range(size) == ids
            return logits, cache

        return step


def _steps(most_B: tf.Tensor) -> tf.Tensor:
    """The steps of rows: one for EOS, and none for those that are asked for nothing."""
    return tf.where(most_B > 0, most_B + 1, 0)
