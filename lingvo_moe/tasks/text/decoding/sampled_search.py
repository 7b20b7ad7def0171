"""Draws texts token by token, in place of a search for the likeliest; with TensorFlow's kernels.

Letters: as in flat_beam_search.py; R = B J.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_moe.core import randomness
from lingvo_moe.core.decode.flat_beam_search import NEVER, StepFn
from lingvo_moe.core.decode.ranges import Sampling
from lingvo_moe.core.decode.sampling import sample
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.tensors import dim
from lingvo_moe.tasks.text.decoding.growing_beam_search import GrowingBeamSearch, log_sum_exp


class SampledSearch(GrowingBeamSearch):
    """J texts of each row, each drawn by itself; what they have is that of a search, with the model's probabilities.

    `Run` takes a cache with `sampling`, from `settings_of`, and the letters SETTINGS beside it.
    """

    def Start(self, max_lengths_B: tf.Tensor, steps: int | None = None) -> NestedMap:
        """See FlatBeamSearch; all hypotheses are live, since copies are drawn differently."""
        state = super().Start(max_lengths_B, steps)
        state.live_BJ = tf.zeros_like(state.live_BJ)
        return state

    def Step(self, step_fn: StepFn, state: NestedMap, cache: Any) -> tuple[NestedMap, Any]:
        """One step of the model, and a token for every hypothesis."""
        logits_BJV, cache = step_fn(self.Ids(state), cache, state.time, state.mask_BJS)
        B, J, V = dim(logits_BJV, 0), self.J, dim(logits_BJV, 2)
        logits_RV = tf.reshape(tf.cast(logits_BJV, tf.float32), [-1, V])
        allowed = self._Allowed(logits_BJV.shape[2])
        may_V = tf.gather(np.append(allowed, True), tf.minimum(tf.range(V), allowed.size))
        settings = cache.sampling.Transform(lambda x: tf.repeat(x, J, axis=0))
        settings.seed = randomness.fold_in(settings.seed, tf.tile(tf.range(J), [B]))
        tokens_R = sample(tf.where(may_V, logits_RV, float("-inf")), settings, state.time)
        length = state.time + 1
        last_B1 = (length >= state.max_lengths_B)[:, tf.newaxis]
        tokens_BJ = tf.where(last_B1, self.o.eos_id, tf.reshape(tokens_R, [B, J]))

        of_tokens_R1 = tf.gather(logits_RV, tf.reshape(tokens_BJ, [-1, 1]), batch_dims=1)
        log_probs_R1 = of_tokens_R1 - log_sum_exp(logits_RV, tf.reduce_max(logits_RV, 1))
        scores_BJ = state.live_BJ + tf.reshape(log_probs_R1, [B, J])
        # J candidates that can never live fill the places of those that end.
        scores_BC = tf.pad(
            tf.maximum(scores_BJ, NEVER), [[0, 0], [0, J]], constant_values=float(NEVER)
        )
        parents_BC = tf.tile(tf.range(2 * J)[tf.newaxis] % J, [B, 1])
        tokens_BC = tf.pad(tokens_BJ, [[0, 0], [0, J]], constant_values=self.o.pad_id)
        is_eos_BC = tokens_BC == self.o.eos_id
        state = self._finish(state, length, scores_BC, parents_BC, is_eos_BC)
        return self._continue(state, scores_BC, parents_BC, tokens_BC, is_eos_BC), cache


def settings_of(sampling: Sampling, seeds_B: tf.Tensor) -> NestedMap:
    """The settings of each row for a cache, from those of all and an int32 that differs between rows."""
    shape = tf.shape(seeds_B)
    return NestedMap(
        temperature=tf.fill(shape, float(sampling.temperature)),
        top_k=tf.fill(shape, sampling.top_k),
        top_p=tf.fill(shape, float(sampling.top_p)),
        seed=tf.stack([tf.fill(shape, sampling.seed), seeds_B], 1),
    )
