"""Draws texts token by token, in place of a search for the likeliest; with TensorFlow's kernels.

Letters: as in flat_beam_search.py.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_moe.core.decode.flat_beam_search import NEVER, FlatBeamSearch, StepFn
from lingvo_moe.core.decode.ranges import Sampling
from lingvo_moe.core.decode.sampling import sample
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.tensors import dim
from lingvo_moe.tasks.text.decoding.growing_beam_search import GrowingBeamSearch, log_sum_exp


class SampledSearch(GrowingBeamSearch):
    """The search with a beam of 1, for a token that is drawn at each step, of which it keeps the log-probability.

    `Run` takes a cache with `settings`, see `sampling.sample`, and their letters; without them the search is greedy.
    Scores and log_probs_BKT, float32, are the model's, whatever the settings are.
    """

    STATE_LETTERS = NestedMap(FlatBeamSearch.STATE_LETTERS, log_probs_BS="BS")

    def Start(self, max_lengths_B: tf.Tensor, steps: int | None = None) -> NestedMap:
        """See FlatBeamSearch."""
        state = super().Start(max_lengths_B, steps)
        return NestedMap(state, log_probs_BS=tf.zeros_like(state.ids_BS, tf.float32))

    def Step(self, step_fn: StepFn, state: NestedMap, cache: Any) -> tuple[NestedMap, Any]:
        """One step of the model, and a token for every row."""
        if "settings" not in cache:
            return super().Step(step_fn, state, cache)
        logits_B1V, cache = step_fn(self.Ids(state), cache, state.time, state.mask_BJS)
        logits_BV = tf.cast(logits_B1V[:, 0], tf.float32)
        length = state.time + 1
        tokens_B = self.Drawn(logits_BV, cache, state.time)
        tokens_B1 = tf.where(length < state.max_lengths_B, tokens_B, self.o.eos_id)[:, tf.newaxis]
        log_probs_B1 = log_probs_of(logits_BV, tokens_B1)
        now_S = tf.range(dim(state.ids_BS, 1)) == state.time
        newest_BS = tf.where(now_S, log_probs_B1, state.log_probs_BS)
        # The second candidate, which can never live, fills the place of one that ends.
        room = [[0, 0], [0, 1]]
        scores_BC = tf.maximum(state.live_BJ + log_probs_B1, NEVER)
        scores_BC = tf.pad(scores_BC, room, constant_values=float(NEVER))
        tokens_BC = tf.pad(tokens_B1, room, constant_values=self.o.pad_id)
        parents_BC, is_eos_BC = tf.zeros_like(tokens_BC), tokens_BC == self.o.eos_id
        state = NestedMap(state, log_probs_BS=newest_BS)
        state = self._finish(state, length, scores_BC, parents_BC, is_eos_BC)
        return self._continue(state, scores_BC, parents_BC, tokens_BC, is_eos_BC), cache

    def Drawn(self, logits_BV: tf.Tensor, cache: NestedMap, step: tf.Tensor) -> tf.Tensor:
        """The tokens [B] that are drawn from float32 logits by the settings of the cache at a step, int32 [] or [B]."""
        allowed = self._Allowed(logits_BV.shape[1])
        at_V = tf.minimum(tf.range(dim(logits_BV, 1)), allowed.size)
        may_BV = tf.where(tf.gather(np.append(allowed, True), at_V), logits_BV, float("-inf"))
        tokens_B = sample(self._Weighed(may_BV, cache), cache.settings, step)
        for end in self.o.other_ends:
            tokens_B = tf.where(tokens_B == end, self.o.eos_id, tokens_B)
        return tokens_B

    def Results(self, state: NestedMap) -> NestedMap:
        """See FlatBeamSearch."""
        return NestedMap(super().Results(state), log_probs_BKT=state.log_probs_BS[:, tf.newaxis])

    def _Weighed(self, logits_BV: tf.Tensor, cache: NestedMap) -> tf.Tensor:
        """The logits that tokens are drawn by, from those of the model; -inf for what may not be drawn."""
        del cache
        return logits_BV

    def _NothingFound(self, max_lengths_B: tf.Tensor) -> NestedMap:
        results = super()._NothingFound(max_lengths_B)
        return NestedMap(results, log_probs_BKT=tf.zeros_like(results.ids_BKT, tf.float32))


def log_probs_of(logits_BV: tf.Tensor, tokens_B1: tf.Tensor) -> tf.Tensor:
    """The log-probabilities [B,1] of tokens, by float32 logits."""
    partition_B1 = log_sum_exp(logits_BV, tf.reduce_max(logits_BV, 1))
    return tf.gather(logits_BV, tokens_B1, batch_dims=1) - partition_B1


def settings_of(sampling: Sampling, seeds_B: tf.Tensor) -> NestedMap:
    """The settings of each row for a cache, from those of all and an int32 that differs between rows."""
    shape = tf.shape(seeds_B)
    return NestedMap(
        temperature=tf.fill(shape, float(sampling.temperature)),
        top_k=tf.fill(shape, sampling.top_k),
        top_p=tf.fill(shape, float(sampling.top_p)),
        seed=tf.stack([tf.fill(shape, sampling.seed), seeds_B], 1),
    )
