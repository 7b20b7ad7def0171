"""Flat beam search with TensorFlow's kernels, whose shapes may change while the search runs.

It finds the hypotheses and scores of `FlatBeamSearch` at a lower cost:

  * the flat sequence and the caches begin with a capacity of one block of steps and grow by a block at a time
    ("growing"), so that attention spans little more than what was written;
  * at the end of a block the rows that are done leave the batch: they cost nothing from then on;
  * padding rows, or rows that are done, fill the batch up to products of `fewest_rows` rows;
  * candidates come from the raw logits, which are read three times: by the softmax, by the maximum of each group of
    tokens, and by the top-k over the groups that can hold one of the best.

Letters: as in flat_beam_search.py; L step of the caches' capacity, n candidate of one hypothesis, R = B J, G group of
tokens, W token of a group.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_moe.core.decode.flat_beam_search import NEVER, FlatBeamSearch, StepFn
from lingvo_moe.core.kernels.tensorflow import batch_independent
from lingvo_moe.core.kernels.weights import FEWEST_ROWS
from lingvo_moe.core.nested_map import NestedMap, map_structure, zip_leaves
from lingvo_moe.core.tensors import dim

BLOCK = 16  # steps
_GROUP = 64  # tokens
_FEW_FORBIDDEN = 16


class GrowingBeamSearch(FlatBeamSearch):
    """`FlatBeamSearch` in blocks; see the file's top. The number of rows need not be known."""

    fewest_rows = FEWEST_ROWS  # the rows of a product at least

    def Run(
        self,
        step_fn: StepFn,
        cache: NestedMap,
        max_lengths_B: tf.Tensor,
        letters: NestedMap | None = None,
    ) -> NestedMap:
        """Runs the complete search, like `FlatBeamSearch`, over caches that grow.

        Args:
            step_fn: must accept caches of any number of rows and steps. V may be unknown while tracing. Then V must be
                at least 2 J plus the number of tokens that may not be emitted (PAD, BOS and those that `allowed_V`
                forbids), and tokens beyond the end of `allowed_V` are allowed.
            cache: with a capacity of BLOCK steps.
            max_lengths_B: int32 [B], the maximum length of each row's results, EOS included; 0 skips the row.
            letters: a string for each tensor of the cache, in the cache's structure, with a letter for each dimension:
                B is the row, L the step.

        Returns:
            NestedMap(ids_BKT, lengths_BK, scores_BK, steps) as of `FlatBeamSearch`; T is the largest of
            max_lengths_B.

        Raises:
            ValueError: no letters, or letters of another structure than the cache's.
        """
        if letters is None:
            raise ValueError("a search whose caches grow needs the letters of their dimensions")
        num_rows = dim(max_lengths_B, 0)
        max_lengths_B, cache = self.Filled(max_lengths_B, cache, letters)
        state = self.Start(max_lengths_B, BLOCK)
        rows_B = tf.range(dim(max_lengths_B, 0))

        def unfinished(rows_B: tf.Tensor, state: NestedMap, *_: NestedMap) -> tf.Tensor:
            del rows_B
            return self.Unfinished(state)

        def block(rows_B: tf.Tensor, state: NestedMap, cache: NestedMap, best: NestedMap) -> tuple:
            state, cache = self._Block(step_fn, state, cache)
            best = self._Noted(best, rows_B, state)
            with tf.name_scope("beam_search/"):
                rows_B, state, cache = self.Regrown(rows_B, state, cache, letters)
            return rows_B, state, cache, best

        best = self._NothingFound(max_lengths_B)
        start = (rows_B, state, cache, best)
        shapes = (
            tf.TensorShape([None]),
            map_structure(open_shape, state, self.STATE_LETTERS),
            map_structure(open_shape, cache, letters),
            best.Transform(lambda x: x.shape),
        )
        _, state, _, best = tf.while_loop(
            unfinished, block, start, shape_invariants=shapes, parallel_iterations=1
        )
        return NestedMap(best.Transform(lambda x: x[:num_rows]), steps=state.time)

    def Filled(self, max_lengths_B: tf.Tensor, cache: NestedMap, letters: NestedMap) -> tuple:
        """Adds padding rows at the end where there are too few rows: see `_least`."""
        fill = tf.maximum(self._least - dim(max_lengths_B, 0), 0)

        def filled(x: tf.Tensor, letters: str) -> tf.Tensor:
            return tf.pad(x, [[0, fill * (letter == "B")] for letter in letters])

        if self._least == 1:
            return max_lengths_B, cache
        return _changed_if(fill > 0, filled, (max_lengths_B, cache), ("B", letters))

    @property
    def _least(self) -> int:
        """The fewest rows of the batch, done or not."""
        return -(-self.fewest_rows // self.J)

    def _Block(self, step_fn: StepFn, state: NestedMap, cache: NestedMap) -> tuple:
        """Steps until the capacity is used up, or all rows are done."""
        places = tf.shape(state.ids_BS)[1] // self.J

        def unfinished(state: NestedMap, cache: NestedMap) -> tf.Tensor:
            del cache
            # A step writes where the next one finds its tokens.
            return self.Unfinished(state) & (state.time + 1 < places)

        def step(before: NestedMap, cache: NestedMap) -> tuple:
            state, after = self.Step(step_fn, before, cache)
            return _shaped_as(state, before), _shaped_as(after, cache)

        return tf.while_loop(unfinished, step, (state, cache), parallel_iterations=1)

    def Regrown(
        self, rows_B: tf.Tensor, state: NestedMap, cache: NestedMap, letters: NestedMap
    ) -> tuple:
        """Drops the rows that are done, and gives the rest the capacity of another block."""
        stay_B = self._Staying(state.done_B)
        at = tf.where(stay_B)[:, 0]

        def staying(x: tf.Tensor, letters: str) -> tf.Tensor:
            return tf.gather(x, at, axis=letters.index("B"))

        def grown(x: tf.Tensor, letters: str, grow: str, by: int) -> tf.Tensor:
            if grow not in letters:
                return x
            y = tf.pad(x, [[0, by * (letter == grow)] for letter in letters])
            y.set_shape(x.shape)
            return y

        all_letters = ("B", self.STATE_LETTERS, letters)
        rows_B, state, cache = _changed_if(
            ~tf.reduce_all(stay_B), staying, (rows_B, state, cache), all_letters
        )
        flat = BLOCK * self.J
        state = map_structure(lambda x, dims: grown(x, dims, "S", flat), state, self.STATE_LETTERS)
        cache = map_structure(lambda x, dims: grown(x, dims, "L", BLOCK), cache, letters)
        return rows_B, state, cache

    def _Staying(self, done_B: tf.Tensor) -> tf.Tensor:
        """The rows that go on: those that are not done, and the first of the others, up to `_least` rows."""
        missing = self._least - tf.math.count_nonzero(~done_B, dtype=tf.int32)
        return ~done_B | (tf.cumsum(tf.cast(done_B, tf.int32)) <= missing)

    def _NothingFound(self, max_lengths_B: tf.Tensor) -> NestedMap:
        B, K = dim(max_lengths_B, 0), self.o.top_k
        longest = tf.minimum(tf.reduce_max(max_lengths_B), self.T)
        results = NestedMap(
            ids_BKT=tf.fill([B, K, longest], self.o.pad_id),
            lengths_BK=tf.zeros([B, K], tf.int32),
            scores_BK=tf.fill([B, K], NEVER),
        )
        return results

    def _Noted(self, results: NestedMap, rows_B: tf.Tensor, state: NestedMap) -> NestedMap:
        """`results` with the rows' results so far."""
        latest = self.Results(state)
        longest, steps = tf.shape(results.ids_BKT)[2], tf.shape(latest.ids_BKT)[2]
        room = [[0, 0], [0, 0], [0, tf.maximum(longest - steps, 0)]]
        for name in [name for name in results if name.endswith("_BKT")]:
            padding = self.o.pad_id if name == "ids_BKT" else 0
            latest[name] = tf.pad(latest[name][:, :, :longest], room, constant_values=padding)
        at = rows_B[:, tf.newaxis]
        noted = NestedMap(
            {name: tf.tensor_scatter_nd_update(x, at, latest[name]) for name, x in results.items()}
        )
        return _shaped_as(noted, results)

    def _candidates(
        self, live_BJ: tf.Tensor, logits_BJV: tf.Tensor, last_B: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        B, J, V = dim(logits_BJV, 0), self.J, dim(logits_BJV, 2)
        logits_RV = tf.reshape(tf.cast(logits_BJV, tf.float32), [-1, V])
        allowed = self._Allowed(logits_BJV.shape[2])
        forbidden = int((~allowed).sum())
        if forbidden <= _FEW_FORBIDDEN:  # then those allowed are among a few more
            best_Rn, tokens_Rn = largest(logits_RV, 2 * J + forbidden)
            best_R = best_Rn[:, 0]
        else:
            only_RV = tf.where(allowed, logits_RV, -np.inf)
            best_Rn, tokens_Rn = largest(only_RV, 2 * J)
            best_R = tf.reduce_max(logits_RV, 1)
        partition_R1 = log_sum_exp(logits_RV, best_R)
        eos_R1 = logits_RV[:, self.o.eos_id : self.o.eos_id + 1] - partition_R1
        n = best_Rn.shape[1]
        log_probs_BJn = tf.reshape(best_Rn - partition_R1, [B, J, n])
        tokens_BJn = tf.reshape(tokens_Rn, [B, J, n])
        may_BJn = tf.gather(np.append(allowed, True), tf.minimum(tokens_BJn, allowed.size))
        # In a last step only EOS may follow.
        last_B11 = last_B[:, tf.newaxis, tf.newaxis]
        only_BJn = tf.pad(tf.reshape(eos_R1, [B, J, 1]), [[0, 0], [0, 0], [0, n - 1]])
        first_n = np.arange(n) == 0
        eos_n = np.where(first_n, self.o.eos_id, self.o.pad_id).astype(np.int32)
        log_probs_BJn = tf.where(last_B11, only_BJn, log_probs_BJn)
        tokens_BJn = tf.where(last_B11, eos_n, tokens_BJn)
        may_BJn = tf.where(last_B11, first_n, may_BJn)
        total_BJn = live_BJ[:, :, tf.newaxis] + log_probs_BJn
        # The comparison also turns NaN to NEVER.
        total_BJn = tf.where(may_BJn & (total_BJn > NEVER), total_BJn, NEVER)
        scores_BC, at_BC = tf.math.top_k(tf.reshape(total_BJn, [B, J * n]), min(2 * J, J * n))
        tokens_BC = tf.gather(tf.reshape(tokens_BJn, [B, J * n]), at_BC, batch_dims=1)
        return scores_BC, at_BC // n, tokens_BC

    def _Allowed(self, V: int | None) -> np.ndarray:
        """Returns bool [V], true for tokens that may be emitted: EOS always; PAD and BOS never.

        `allowed_V`, if given, forbids further tokens. If V is unknown (None), the result is as long as `allowed_V`, and
        callers take all tokens beyond its end to be allowed.
        """
        token_V = np.arange(np.asarray(self.allowed_V).size if V is None else V)
        allowed_V = (token_V != self.o.pad_id) & (token_V != self.o.bos_id)
        if self.allowed_V is not None:
            allowed_V &= np.asarray(self.allowed_V)
        return allowed_V | (token_V == self.o.eos_id)


def log_sum_exp(logits_RV: tf.Tensor, best_R: tf.Tensor) -> tf.Tensor:
    """The log-sum-exp of logits, [R,1], bit-identical in every batch; `best_R` are the largest logits."""
    # The probability of the largest logit is never too small to be one.
    largest_R = tf.reduce_max(tf.nn.softmax(logits_RV), 1)
    return best_R[:, tf.newaxis] - batch_independent(tf.math.log, largest_R[:, tf.newaxis])


def largest(x_RV: tf.Tensor, count: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Computes tf.math.top_k(x_RV, count), faster if V is large.

    One pass finds the maximum of each group of 64 tokens. The `count` largest values are in the `count` groups with the
    largest maxima, so that only these are sorted.

    Returns:
        Values, float32, and their indices in V, int32, [R, count] each, the largest value first; among equal values the
        one with the smallest index first. [R, V] each if V is known and smaller than `count`.
    """
    V = x_RV.shape[1]
    if V is None:
        return tf.math.top_k(x_RV, count)
    count, groups = min(count, V), V // _GROUP
    if V % _GROUP or groups < 4 * count:
        return tf.math.top_k(x_RV, count)
    x_RGW = tf.reshape(x_RV, [-1, groups, _GROUP])
    _, at_Rn = tf.math.top_k(tf.reduce_max(x_RGW, 2), count)
    at_Rn = tf.sort(at_Rn)  # so that of equals the first comes first below too
    best_Rn, place_Rn = tf.math.top_k(
        tf.reshape(tf.gather(x_RGW, at_Rn, batch_dims=1), [-1, count * _GROUP]), count
    )
    group_Rn = tf.gather(at_Rn, place_Rn // _GROUP, batch_dims=1)
    return best_Rn, group_Rn * _GROUP + place_Rn % _GROUP


def open_shape(x: tf.Tensor, letters: str) -> tf.TensorShape:
    """The shape, with unknown sizes where they change."""
    sizes = zip(letters, x.shape, strict=True)
    return tf.TensorShape([None if letter in "BLS" else size for letter, size in sizes])


def _changed_if(condition: tf.Tensor, fn: Callable, tree: Any, letters: Any) -> Any:
    """A tree, in which every tensor with rows is fn(tensor, its letters) if a bool scalar says so."""
    rows = [pair for pair in zip_leaves(tree, letters) if "B" in pair[1]]
    before = [x for x, _ in rows]
    # One branch for all of them: a graph has dozens of operations and two functions for each branch.
    after = iter(tf.cond(condition, lambda: [fn(*pair) for pair in rows], lambda: before))

    def result(x: tf.Tensor, letters: str) -> tf.Tensor:
        if "B" not in letters:
            return x
        y = next(after)
        y.set_shape([n if k != "B" else None for k, n in zip(letters, x.shape, strict=True)])
        return y

    return map_structure(result, tree, letters)


def _shaped_as(tree: NestedMap, like: NestedMap) -> NestedMap:
    """`tree`, its tensors' static shapes set to those of `like`, as a loop requires."""
    for x, y in tree.Zip(like):
        x.set_shape(y.shape)
    return tree
