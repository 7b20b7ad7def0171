"""Flat beam search for TensorFlow's own kernels, where shapes may change while it runs (core/op_by_op.py).

The hypotheses and scores are those of `flat_beam_search`; what differs is what they cost:

  * the flat sequence and the caches begin small and grow in blocks of steps, so that attention spans
    what was written and little more;
  * at the end of a block the rows that are done leave: they cost nothing from then on;
  * as many stay, or are put beside the first ones, as make products of FEWEST_ROWS;
  * candidates come from the raw logits, which are read three times: softmax, the maximum of each group of
    tokens, and the groups that can hold one of the best.

Letters: as in flat_beam_search.py; L step that there is room for, n candidate of one hypothesis, R = B J,
G group of tokens, W token of a group.
"""

import numpy as np
import tensorflow as tf

from lingvo_moe.core.decode.flat_beam_search import (
    NEVER,
    FlatBeamSearch,
    StepFn,
    dim,
)
from lingvo_moe.core.layers.panels import FEWEST_ROWS
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.op_by_op import rounded_alike

BLOCK = 16  # steps
_GROUP = 64  # tokens
_FEW_FORBIDDEN = 16


class GrowingBeamSearch(FlatBeamSearch):
    """`FlatBeamSearch` in blocks; see the file's top. The number of rows need not be known."""

    def Run(
        self,
        step_fn: StepFn,
        cache: NestedMap,
        max_lengths_B: tf.Tensor,
        letters: list[str] | None = None,
    ) -> NestedMap:
        """See `flat_beam_search`.

        Args:
            step_fn: takes caches of any number of rows and steps. V may be unknown: then it is 2 J and as many as
                `allowed_V` forbids at least, and `allowed_V` is about the first of them.
            cache: with room for the first BLOCK steps.
            max_lengths_B: see there.
            letters: those of each tensor of the cache, in the order of `Flatten`: B is the row, L the step.

        Returns:
            As there; T is the longest of max_lengths_B.
        """
        assert letters is not None
        given = dim(max_lengths_B, 0)
        max_lengths_B, cache = self._Filled(max_lengths_B, cache, letters)
        state = self.Start(max_lengths_B, BLOCK)
        rows_B = tf.range(dim(max_lengths_B, 0))

        def unfinished(rows_B: tf.Tensor, state: NestedMap, *_: NestedMap) -> tf.Tensor:
            del rows_B
            return self.Unfinished(state)

        def block(rows_B: tf.Tensor, state: NestedMap, cache: NestedMap, found: NestedMap) -> tuple:
            state, cache = self._Block(step_fn, state, cache)
            found = self._Noted(found, rows_B, state)
            with tf.name_scope("beam_search/"):
                rows_B, state, cache = self._Regrown(rows_B, state, cache, letters)
            return rows_B, state, cache, found

        found = self._NothingFound(max_lengths_B)
        start = (rows_B, state, cache, found)
        shapes = (
            tf.TensorShape([None]),
            _open_shapes(state, state_letters(state)),
            _open_shapes(cache, letters),
            found.Transform(lambda x: x.shape),
        )
        _, state, _, found = tf.while_loop(
            unfinished, block, start, shape_invariants=shapes, parallel_iterations=1
        )
        return NestedMap(found.Transform(lambda x: x[:given]), steps=state.time)

    def _Filled(self, max_lengths_B: tf.Tensor, cache: NestedMap, letters: list[str]) -> tuple:
        """With empty rows behind, where there are too few: see `_least`."""
        fill = tf.maximum(self._least - dim(max_lengths_B, 0), 0)

        def filled(x: tf.Tensor, letters: str) -> tf.Tensor:
            if "B" not in letters:
                return x
            room = [[0, fill * (letter == "B")] for letter in letters]
            y = tf.cond(fill > 0, lambda: tf.pad(x, room), lambda: x)
            y.set_shape([n if k != "B" else None for k, n in zip(letters, x.shape, strict=True)])
            return y

        if self._least == 1:
            return max_lengths_B, cache
        tensors = zip(cache.Flatten(), letters, strict=True)
        return filled(max_lengths_B, "B"), cache.Pack([filled(*each) for each in tensors])

    @property
    def _least(self) -> int:
        """How many rows are searched at least, done or not."""
        return -(-FEWEST_ROWS // self.J)

    def _Block(self, step_fn: StepFn, state: NestedMap, cache: NestedMap) -> tuple:
        """Steps until there is no more room, or all are done."""
        places = tf.shape(state.ids_BS)[1] // self.J

        def unfinished(state: NestedMap, cache: NestedMap) -> tf.Tensor:
            del cache
            # A step writes where the next one finds its tokens.
            return self.Unfinished(state) & (state.time + 1 < places)

        def step(before: NestedMap, cache: NestedMap) -> tuple:
            state, after = self.Step(step_fn, before, cache)
            return _shaped_as(state, before), _shaped_as(after, cache)

        return tf.while_loop(unfinished, step, (state, cache), parallel_iterations=1)

    def _Regrown(
        self, rows_B: tf.Tensor, state: NestedMap, cache: NestedMap, letters: list[str]
    ) -> tuple:
        """Without the rows that are done, and with room for another block."""
        stay_B = self._Staying(state.done_B)
        at = tf.where(stay_B)[:, 0]
        everyone = tf.reduce_all(stay_B)

        def regrown(x: tf.Tensor, letters: str, grow: int) -> tf.Tensor:
            y = x
            if "B" in letters:
                rows = letters.index("B")
                y = tf.cond(everyone, lambda: x, lambda: tf.gather(x, at, axis=rows))
            if grow:
                places = letters.index("L" if "L" in letters else "S")
                y = tf.pad(y, [[0, grow * (i == places)] for i in range(len(letters))])
            y.set_shape(x.shape)
            return y

        state = state.Pack(
            [
                regrown(x, names, BLOCK * self.J * ("S" in names))
                for x, names in zip(state.Flatten(), state_letters(state), strict=True)
            ]
        )
        cache = cache.Pack(
            [
                regrown(x, names, BLOCK * ("L" in names))
                for x, names in zip(cache.Flatten(), letters, strict=True)
            ]
        )
        return regrown(rows_B, "B", 0), state, cache

    def _Staying(self, done_B: tf.Tensor) -> tf.Tensor:
        """Which rows go on: those that are not done, and of the others the first ones until there are `_least`."""
        missing = self._least - tf.math.count_nonzero(~done_B, dtype=tf.int32)
        return ~done_B | (tf.cumsum(tf.cast(done_B, tf.int32)) <= missing)

    def _NothingFound(self, max_lengths_B: tf.Tensor) -> NestedMap:
        B, K = dim(max_lengths_B, 0), self.o.top_k
        longest = tf.minimum(tf.reduce_max(max_lengths_B), self.T)
        found = NestedMap(
            ids_BKT=tf.fill([B, K, longest], self.o.pad_id),
            lengths_BK=tf.zeros([B, K], tf.int32),
            scores_BK=tf.fill([B, K], NEVER),
        )
        return found

    def _Noted(self, found: NestedMap, rows_B: tf.Tensor, state: NestedMap) -> NestedMap:
        """With what the rows have found so far."""
        now = self.Results(state)
        longest, steps = tf.shape(found.ids_BKT)[2], tf.shape(now.ids_BKT)[2]
        ids = now.ids_BKT[:, :, :longest]
        room = [[0, 0], [0, 0], [0, tf.maximum(longest - steps, 0)]]
        now.ids_BKT = tf.pad(ids, room, constant_values=self.o.pad_id)
        at = rows_B[:, tf.newaxis]
        noted = NestedMap(
            {name: tf.tensor_scatter_nd_update(x, at, now[name]) for name, x in found.items()}
        )
        return _shaped_as(noted, found)

    def _candidates(
        self, live_BJ: tf.Tensor, logits_BJV: tf.Tensor, last_B: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """As FlatBeamSearch._candidates."""
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
        # log-sum-exp: the largest logit and its probability, which is never too small to be one.
        largest_R = tf.reduce_max(tf.nn.softmax(logits_RV), 1)
        log_R1 = rounded_alike(tf.math.log, largest_R[:, tf.newaxis])
        partition_R1 = best_R[:, tf.newaxis] - log_R1

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
        """bool [V]: the tokens that may be emitted, EOS among them.

        Where V is not known it is as long as `allowed_V`, and all that come after may be.
        """
        token_V = np.arange(np.asarray(self.allowed_V).size if V is None else V)
        allowed_V = (token_V != self.o.pad_id) & (token_V != self.o.bos_id)
        if self.allowed_V is not None:
            allowed_V &= np.asarray(self.allowed_V)
        return allowed_V | (token_V == self.o.eos_id)


def largest(x_RV: tf.Tensor, count: int) -> tuple[tf.Tensor, tf.Tensor]:
    """tf.math.top_k: values and their places, float32 and int32 [R, count], largest first, of equals the
    first. All of them, where V is known to be smaller than `count`.

    One pass over all finds the maximum of each group of tokens. Those among the `count` largest are in the
    `count` groups of the largest maxima, so that only these are sorted.
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


def state_letters(state: NestedMap) -> list[str]:
    """The letters of each tensor of the search's state: the ends of their names."""
    return [path.rpartition("_")[2] if x.shape.rank else "" for path, x in state.FlattenItems()]


def _open_shapes(tree: NestedMap, letters: list[str]) -> NestedMap:
    """The shapes, with those dimensions unknown that change."""
    shapes = [
        tf.TensorShape(
            [None if n in "BLS" else size for n, size in zip(names, x.shape, strict=True)]
        )
        for names, x in zip(letters, tree.Flatten(), strict=True)
    ]
    return tree.Pack(shapes)


def _shaped_as(tree: NestedMap, like: NestedMap) -> NestedMap:
    """`tree`, whose tensors are told the shapes of `like`, as a loop wants it."""
    for x, y in zip(tree.Flatten(), like.Flatten(), strict=True):
        x.set_shape(y.shape)
    return tree
