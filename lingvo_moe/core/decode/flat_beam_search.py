"""Flat beam search: hypotheses interleaved in one sequence under 0/1 masks (GShard, appendix A.1).

Letters: B batch row, J hypothesis of the beam, T time, V vocabulary, C candidate,
S = T * J position in the flat sequence; the token fed to hypothesis j at time t lies at t * J + j.

A model caches keys and values by position s and never moves them. When hypothesis j continues
parent p, it takes over p's row of the mask (whose ones are the positions of p's tokens) and adds
its own new position. So an expansion reorders [B, J, S] bits instead of the caches of every layer;
in return, self-attention spans J times as many positions.

The search, row by row:
  * the 2J best continuations of the live hypotheses are the candidates; ties go to the lower
    (hypothesis, token);
  * a candidate among the first J that ends in EOS is finished, and the first J others live on, so
    a beam of 1 is greedy search;
  * a row is done with J finished hypotheses, or once no live one can enter the `top_k` returned;
  * at a row's length limit only EOS may follow, so that every result is a complete sentence with its
    full probability.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.config import checks
from lingvo_moe.core.decode.ranges import BEAM_SIZE, LENGTH_ALPHA
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.tensors import dim

# The score of what must not be chosen. Finite, because inf - inf and 0 * inf are NaN.
NEVER = -1e9

# (ids_BJ int32, cache, time int32 scalar, mask_BJS bool) -> (logits_BJV float32, cache).
StepFn = Callable[[tf.Tensor, Any, tf.Tensor, tf.Tensor], tuple[tf.Tensor, Any]]


@dataclass(frozen=True)
class SearchOptions:
    """The options of a beam search."""

    beam_size: int = 4  # J, live hypotheses a row; 1 is greedy search
    top_k: int = 1  # results a row, at most J
    length_alpha: float = 0.6  # the exponent of the length normalisation, 0 for none
    bos_id: int = 1  # what the search feeds first; never emitted
    eos_id: int = 2  # what ends a hypothesis
    pad_id: int = 0  # what fills the results after EOS; never emitted
    other_ends: tuple[int, ...] = ()  # stand for EOS where they are drawn; plain for a beam
    unk_id: int = 3  # what a vocabulary has no piece for; never emitted

    def __post_init__(self) -> None:
        # Alpha is not negative: the stopping rule holds because a longer hypothesis is never normalised by less.
        checks.check_fields(self, {"beam_size": BEAM_SIZE, "length_alpha": LENGTH_ALPHA})
        checks.check_fields(self, {"top_k": checks.Integer(1, self.beam_size)})


def _beside(x: tf.Tensor, dims: int) -> tf.Tensor:
    """A number of all rows as it is, or the number of each row [B] with so many dimensions behind it."""
    return tf.reshape(x, [-1] + [1] * dims) if x.shape.rank else x


def length_norm(length: tf.Tensor, alpha: float) -> tf.Tensor:
    """((5 + length) / 6) ** alpha, which divides a log-probability (Wu et al. 2016, section 7)."""
    base = ((5.0 + tf.cast(length, tf.float32)) / 6.0)[..., tf.newaxis]
    return kernels.current().batch_independent(lambda x: tf.pow(x, alpha), base)[..., 0]


class FlatBeamSearch:
    """The parts of the search: `Start`, then `Step` while `Unfinished`, then `Results`; `Run` is all of it.

    The state between two steps is a NestedMap of tensors, so a step is a program of its own as well as the
    body of a loop. `STATE_LETTERS` has the letters of each tensor, in the structure of the state. Its `time` may
    also be [B], a time for each row, for which `Ids` is another.

    Args:
        max_length: T, static, at least every max_lengths_B. Flat sequences have S = T * J places.
        allowed_V: bool, which tokens may be emitted besides EOS (None: all but PAD and BOS).
    """

    STATE_LETTERS: ClassVar[NestedMap] = NestedMap(
        time="",
        max_lengths_B="B",
        ids_BS="BS",
        mask_BJS="BJS",
        live_BJ="BJ",
        done_B="B",
        ended_mask_BJS="BJS",
        ended_lengths_BJ="BJ",
        ended_scores_BJ="BJ",
    )

    def __init__(self, max_length: int, options: SearchOptions, allowed_V: tf.Tensor | None = None):
        self.o = options
        self.J, self.T = options.beam_size, max_length
        self.allowed_V = allowed_V

    def Run(self, step_fn: StepFn, cache: Any, max_lengths_B: tf.Tensor) -> NestedMap:
        """Searches for the best sequences of every row: pure, of static shapes, fit for `jit_compile`.

        Args:
            step_fn: at time t writes the J tokens `ids_BJ` at flat positions t*J .. t*J+J-1 of its
                cache and returns the logits of the tokens that follow; `mask_BJS` is true where
                hypothesis j may look, its newest position included.
            cache: any nest of tensors; handed to step_fn and back, never looked into.
            max_lengths_B: int32, the most tokens of a row's results, EOS included; 0 for a row to
                leave alone.

        Returns:
            NestedMap of, K = top_k, best first:
                ids_BKT: int32, ends in EOS, then PAD.
                lengths_BK: int32, EOS included; 0 where there are fewer than K hypotheses (all PAD
                    then, score NEVER).
                scores_BK: float32, log-probability / length_norm.
                steps: int32 scalar, calls of step_fn.
        """

        def unfinished(state: NestedMap, cache: Any) -> tf.Tensor:
            del cache
            return self.Unfinished(state)

        def body(state: NestedMap, cache: Any) -> tuple[NestedMap, Any]:
            return self.Step(step_fn, state, cache)

        if max_lengths_B.shape[0] is None:
            raise ValueError("the flat beam search needs a static batch size: pad the batch")
        state, _ = tf.while_loop(unfinished, body, (self.Start(max_lengths_B), cache))
        return self.Results(state)

    def Unfinished(self, state: NestedMap) -> tf.Tensor:
        """Whether some row needs another step, a bool scalar."""
        return (state.time < self.T) & ~tf.reduce_all(state.done_B)

    def Step(self, step_fn: StepFn, state: NestedMap, cache: Any) -> tuple[NestedMap, Any]:
        """One step of the model, and one expansion of every row that is not done."""
        logits_BJV, cache = step_fn(self.Ids(state), cache, state.time, state.mask_BJS)
        with tf.name_scope("beam_search/"):
            return self.Advance(state, logits_BJV), cache

    def Start(self, max_lengths_B: tf.Tensor, steps: int | None = None) -> NestedMap:
        """All hypotheses hold BOS; the first alone is live, or the beam would fill with copies.

        Args:
            steps: how many there are places for; None: T.
        """
        J = self.J
        B, S = dim(max_lengths_B, 0), (steps or self.T) * J
        at_j = tf.range(S) == tf.range(J)[:, tf.newaxis]
        return NestedMap(
            time=tf.constant(0),
            max_lengths_B=tf.minimum(max_lengths_B, self.T),
            ids_BS=tf.where(tf.range(S)[tf.newaxis] < J, self.o.bos_id, self.o.pad_id)
            + tf.zeros([B, 1], tf.int32),
            mask_BJS=tf.tile(at_j[tf.newaxis], [B, 1, 1]),
            live_BJ=tf.tile(tf.constant([[0.0] + [NEVER] * (J - 1)]), [B, 1]),
            done_B=max_lengths_B <= 0,
            # The finished, best first.
            ended_mask_BJS=tf.zeros([B, J, S], tf.bool),
            ended_lengths_BJ=tf.zeros([B, J], tf.int32),
            ended_scores_BJ=tf.fill([B, J], NEVER),
        )

    def Ids(self, state: NestedMap) -> tf.Tensor:
        """The newest token of each hypothesis, int32 [B, J]."""
        B = dim(state.ids_BS, 0)
        return tf.slice(state.ids_BS, [0, state.time * self.J], [B, self.J])

    def Advance(self, state: NestedMap, logits_BJV: tf.Tensor) -> NestedMap:
        """One expansion of every row that is not done."""
        length = state.time + 1  # of what this step makes
        last_B = length >= state.max_lengths_B
        scores_BC, parents_BC, tokens_BC = self._candidates(state.live_BJ, logits_BJV, last_B)
        is_eos_BC = tokens_BC == self.o.eos_id
        state = self._finish(state, length, scores_BC, parents_BC, is_eos_BC)
        return self._continue(state, scores_BC, parents_BC, tokens_BC, is_eos_BC)

    def _candidates(
        self, live_BJ: tf.Tensor, logits_BJV: tf.Tensor, last_B: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """The 2J best continuations, best first: scores, parents (j), tokens, each [B, C]."""
        B, _, V = logits_BJV.shape
        token_V = tf.range(V)
        is_eos_V = token_V == self.o.eos_id
        allowed_V = (token_V != self.o.pad_id) & (token_V != self.o.bos_id)
        if self.allowed_V is not None:
            allowed_V &= self.allowed_V
        allowed_B1V = (allowed_V & ~last_B[:, tf.newaxis] | is_eos_V)[:, tf.newaxis]

        log_probs_BJV = tf.nn.log_softmax(tf.cast(logits_BJV, tf.float32))
        total_BJV = live_BJ[:, :, tf.newaxis] + log_probs_BJV
        # The comparison also turns NaN to NEVER.
        total_BJV = tf.where(allowed_B1V & (total_BJV > NEVER), total_BJV, NEVER)

        # First within a hypothesis, then among all: the same order as of [J * V], less to sort.
        best_BJc, tokens_BJc = tf.math.top_k(total_BJV, min(2 * self.J, V))
        per_hypothesis = best_BJc.shape[-1]
        scores_BC, at_BC = tf.math.top_k(
            tf.reshape(best_BJc, [B, self.J * per_hypothesis]),
            min(2 * self.J, self.J * per_hypothesis),
        )
        tokens_BC = tf.gather(tf.reshape(tokens_BJc, [B, -1]), at_BC, batch_dims=1)
        return scores_BC, at_BC // per_hypothesis, tokens_BC

    def _finish(
        self,
        state: NestedMap,
        length: tf.Tensor,
        scores_BC: tf.Tensor,
        parents_BC: tf.Tensor,
        is_eos_BC: tf.Tensor,
    ) -> NestedMap:
        """Takes up what ended among the first J candidates, and sees which rows are done."""
        J = self.J
        parents_BJ, scores_BJ = parents_BC[:, :J], scores_BC[:, :J]
        ends_BJ = is_eos_BC[:, :J] & (scores_BJ > NEVER) & ~state.done_B[:, tf.newaxis]
        length_B1 = _beside(length, 1)
        ended_BJ = tf.where(ends_BJ, scores_BJ / length_norm(length_B1, self.o.length_alpha), NEVER)

        # The old come first, so that they win ties.
        all_scores = tf.concat([state.ended_scores_BJ, ended_BJ], 1)
        best_BJ, at_BJ = tf.math.top_k(all_scores, J)
        all_lengths = tf.concat([state.ended_lengths_BJ, tf.where(ends_BJ, length_B1, 0)], 1)
        new_mask = tf.gather(state.mask_BJS, parents_BJ, batch_dims=1)
        all_masks = tf.concat([state.ended_mask_BJS, new_mask], 1)
        state = state.copy()
        state.ended_scores_BJ = best_BJ
        state.ended_lengths_BJ = tf.gather(all_lengths, at_BJ, batch_dims=1)
        state.ended_mask_BJS = tf.gather(all_masks, at_BJ, batch_dims=1)

        # Log-probabilities only fall and divisors grow: this is the best that a live one can reach.
        live_B = tf.reduce_max(tf.where(is_eos_BC, NEVER, scores_BC), 1)
        reach_B = live_B / length_norm(state.max_lengths_B, self.o.length_alpha)
        last_B = best_BJ[:, self.o.top_k - 1]
        settled_B = (last_B > NEVER) & (last_B >= reach_B)
        full_B = best_BJ[:, J - 1] > NEVER
        none_live_B = live_B <= NEVER
        state.done_B |= settled_B | full_B | none_live_B | (length >= state.max_lengths_B)
        return state

    def _continue(
        self,
        state: NestedMap,
        scores_BC: tf.Tensor,
        parents_BC: tf.Tensor,
        tokens_BC: tf.Tensor,
        is_eos_BC: tf.Tensor,
    ) -> NestedMap:
        """The first J candidates that go on become the live ones: masks move, caches stay."""
        # At most J candidates end, one a hypothesis, so J others are always there.
        _, go_on_BJ = tf.math.top_k(tf.where(is_eos_BC, NEVER * 2, scores_BC), self.J)
        parents_BJ = tf.gather(parents_BC, go_on_BJ, batch_dims=1)
        tokens_BJ = tf.gather(tokens_BC, go_on_BJ, batch_dims=1)
        start = (state.time + 1) * self.J
        S = dim(state.ids_BS, 1)
        at_S = tf.range(S)
        at_JS = _beside(start, 2) + tf.range(self.J)[:, tf.newaxis]
        own_JS = at_S == at_JS  # nothing, past the end
        state = state.copy()
        state.live_BJ = tf.gather(scores_BC, go_on_BJ, batch_dims=1)
        state.mask_BJS = tf.gather(state.mask_BJS, parents_BJ, batch_dims=1) | own_JS
        new_BS = tf.tile(tokens_BJ, [1, S // self.J])  # position t * J + j holds the token of j
        start = _beside(start, 1)
        state.ids_BS = tf.where((at_S >= start) & (at_S < start + self.J), new_BS, state.ids_BS)
        state.time += 1
        return state

    def Results(self, state: NestedMap) -> NestedMap:
        """Reads the finished out of the flat sequence: a mask has one of a time's J positions."""
        B, K = dim(state.ids_BS, 0), self.o.top_k
        steps = dim(state.ids_BS, 1) // self.J
        mask = tf.reshape(state.ended_mask_BJS[:, :K], [B, K, steps, self.J])
        ids = tf.reshape(state.ids_BS, [B, 1, steps, self.J])
        fed_BKT = tf.reduce_sum(tf.cast(mask, tf.int32) * ids, -1)  # BOS, then the tokens
        lengths_BK = state.ended_lengths_BJ[:, :K, tf.newaxis]
        # Times 1.. hold the tokens but EOS, which was never fed.
        fed_BKT = tf.concat([fed_BKT[:, :, 1:], tf.zeros_like(fed_BKT[:, :, :1])], 2)
        at_T = tf.range(1, steps + 1)
        ids_BKT = tf.where(at_T == lengths_BK, self.o.eos_id, fed_BKT)
        return NestedMap(
            ids_BKT=tf.where(at_T <= lengths_BK, ids_BKT, self.o.pad_id),
            lengths_BK=lengths_BK[:, :, 0],
            scores_BK=state.ended_scores_BJ[:, :K],
            steps=state.time,
        )
