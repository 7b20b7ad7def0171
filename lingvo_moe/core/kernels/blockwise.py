"""Causal self-attention over blocks of queries and keys, whose memory grows with the length and not with its square.

The formulas are those of Rabe and Staats 2021 ("Self-attention Does Not Need O(n^2) Memory") and Dao et al. 2022
("FlashAttention"): a softmax over blocks of keys needs of those before a largest logit and a sum alone, and the
backward pass makes the probabilities of a block again from each query's logarithm of that sum. A loop goes through the
pairs of a block of queries and a block of keys that it may look at; other pairs are not computed.

Letters: those of `Kernels`; Q block, T query in it, S key in it.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.kernels.xla import MASKED, Shard, by_head
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.tensors import custom_gradient, runtime_zeros, shape_of

BLOCK, FROM_LENGTH = 1024, 2048  # tokens: of a block; of rows from which on blocks pay


@dataclass(frozen=True)
class Blocks:
    """Blocks of tokens, and which tokens look at which.

    Attributes:
        size: tokens of a block; the last one is filled up.
        rows: int32 tensors [B,T] from which `allowed` follows; a token whose numbers are 0 is not looked at.
        allowed: (rows of some queries [B,t], of some keys [B,s]) -> bool [B,t,s].
        reach: a query looks at none but the last `reach` tokens of its row, itself included; None: at all before it.
    """

    size: int
    rows: NestedMap
    allowed: Callable[[NestedMap, NestedMap], tf.Tensor]
    reach: int | None = None

    def Pairs(self, length: int) -> np.ndarray:
        """The numbers of a block of queries and of one of keys that some of its queries may look at: int32 [P,2]."""
        num, reach = -(-length // self.size), self.reach or length
        first = [max(0, i * self.size - reach + 1) // self.size for i in range(num)]
        return np.array([(i, j) for i in range(num) for j in range(first[i], i + 1)], "int32")


def attend(
    q: tf.Tensor,
    k: tf.Tensor,
    v: tf.Tensor,
    blocks: Blocks,
    sinks_N: tf.Tensor | None,
    shard: Shard,
) -> tf.Tensor:
    """`Kernels.attend` without dropout, by blocks: [B,T,N,K].

    The softmax, and sums over blocks, are float32. A query that may look nowhere gets finite numbers that mean nothing.

    Args:
        q, k, v: in the layout of the kernels in use, of a static length.
    """
    q, k, v = (kernels.current().out_of_layout(x) for x in (q, k, v))
    batch, length, heads, _ = shape_of(q)
    size = min(blocks.size, length)
    heads_of_keys = "N" if k.shape[2] == heads else "A"
    letters = {"q": "QBNTK", "k": f"QB{heads_of_keys}SK"}
    q_QBNTK = shard(_split(q, size), letters["q"])
    k, v = (shard(_split(x, size), letters["k"]) for x in (k, v))
    rows = blocks.rows.Transform(lambda x: _split(x, size))
    over = _Loop(blocks.Pairs(length), rows, blocks.allowed, shard, letters)

    @custom_gradient
    def run(q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, *sinks: tf.Tensor) -> tuple:
        y, log_sum = over.Forward(q, k, v, *sinks)
        return y, lambda dy: over.Backward((q, k, v, *sinks), y, log_sum, dy)

    y = run(q_QBNTK, k, v, *([] if sinks_N is None else [sinks_N]))
    y = tf.reshape(tf.transpose(y, [1, 0, 3, 2, 4]), [batch, -1, heads, v.shape[-1]])
    return y[:, :length]


def _split(x: tf.Tensor, size: int) -> tf.Tensor:
    """[B,T,N,K] or [B,T] in blocks, [Q,B,N,t,K] or [Q,B,t]; zeros fill up the last one."""
    batch, length, *rest = shape_of(x)
    num = -(-length // size)
    if num * size > length:
        x = tf.pad(x, [[0, 0], [0, num * size - length], *([0, 0] for _ in rest)])
    x = tf.reshape(x, [batch, num, size, *rest])
    return tf.transpose(x, [1, 0, 3, 2, 4] if rest else [1, 0, 2])


@dataclass(frozen=True)
class _Loop:
    """The loop over pairs of blocks."""

    pairs: np.ndarray
    rows: NestedMap  # [Q,B,t]
    allowed: Callable[[NestedMap, NestedMap], tf.Tensor]
    shard: Shard
    letters: dict[str, str]  # of queries, and of keys and values

    def Forward(
        self, q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, *sinks: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """The result [Q,B,N,T,K], and each query's logarithm of its softmax's denominator, float32 [Q,B,N,T].

        The sums so far are divided by exp of the largest logit so far.
        """

        def step(i: tf.Tensor, j: tf.Tensor, state: list[tf.Tensor]) -> list[tf.Tensor]:
            largest, total, weighted = (tf.gather(x, i) for x in state)
            scores = self._Scores(tf.gather(q, i), tf.gather(k, j), i, j)
            new = tf.maximum(largest, tf.reduce_max(scores, -1))
            powers = tf.exp(scores - new[..., tf.newaxis])
            shrink = tf.exp(largest - new)
            total = total * shrink + tf.reduce_sum(powers, -1)
            values = _weighted(powers, tf.gather(v, j))
            weighted = weighted * shrink[..., tf.newaxis] + tf.cast(values, tf.float32)
            return [_put(x, i, y) for x, y in zip(state, (new, total, weighted), strict=True)]

        zeros = self._Zeros(q, self.letters["q"][:-1], q.shape[:-1])
        start = [zeros + MASKED, zeros]
        if sinks:  # a logit of each head, before any key
            start = [zeros + tf.cast(sinks[0], tf.float32)[:, tf.newaxis], zeros + 1.0]
        start.append(self._Zeros(q, self.letters["q"], [*q.shape[:-1], v.shape[-1]]))
        largest, total, weighted = self._Run(step, start)
        y = tf.cast(weighted / total[..., tf.newaxis], v.dtype)
        return y, largest + tf.math.log(total)

    def Backward(
        self,
        inputs: tuple[tf.Tensor, ...],
        y: tf.Tensor,
        log_sum: tf.Tensor,
        dy: tf.Tensor,
    ) -> list[tf.Tensor]:
        """The gradients of q, k, v and, if any, of sinks."""
        q, k, v, *sinks = inputs
        # A logit's gradient is its probability times (its value's part of dy, less the mean of that over all keys).
        mean = tf.reduce_sum(tf.cast(y, tf.float32) * tf.cast(dy, tf.float32), -1)

        def step(i: tf.Tensor, j: tf.Tensor, state: list[tf.Tensor]) -> list[tf.Tensor]:
            sources = [tf.gather(q, i), tf.gather(k, j), tf.gather(v, j)]
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(sources)
                scores = self._Scores(sources[0], sources[1], i, j)
                probs = tf.exp(scores - tf.gather(log_sum, i)[..., tf.newaxis])
                results = [_weighted(probs, sources[2]), tf.reduce_sum(probs, -1)]
            upstream = [tf.gather(dy, i), -tf.gather(mean, i)]
            found = tape.gradient(results, sources, upstream)
            items = zip(state, (i, j, j), found, strict=True)
            return [_put(x, n, tf.gather(x, n) + tf.cast(g, x.dtype)) for x, n, g in items]

        of = (self.letters["q"], self.letters["k"], self.letters["k"])
        start = [self._Zeros(q, each, x.shape) for each, x in zip(of, (q, k, v), strict=True)]
        sums = self._Run(step, start)
        grads = [tf.cast(d, x.dtype) for d, x in zip(sums, (q, k, v), strict=True)]
        for logit in sinks:
            probs = tf.exp(tf.cast(logit, tf.float32)[:, tf.newaxis] - log_sum)
            grads.append(tf.cast(-tf.reduce_sum(probs * mean, [0, 1, 3]), logit.dtype))
        return grads

    def _Scores(self, q: tf.Tensor, k: tf.Tensor, i: tf.Tensor, j: tf.Tensor) -> tf.Tensor:
        """Float32 logits [B,N,T,S] of blocks i and j."""
        queries = self.rows.Transform(lambda x: tf.gather(x, i))
        keys = self.rows.Transform(lambda x: tf.gather(x, j))
        allowed = self.allowed(queries, keys)[:, tf.newaxis]
        scores = tf.cast(by_head("BNTK,BNSK->BNTS", q, k), tf.float32)
        return tf.where(allowed, scores, tf.constant(MASKED))

    def _Zeros(self, given: tf.Tensor, letters: str, shape: tf.TensorShape) -> tf.Tensor:
        return self.shard(runtime_zeros(given, tf.float32, shape), letters)

    def _Run(self, step: Callable, start: list[tf.Tensor]) -> list[tf.Tensor]:
        """Calls step(number of a block of queries, of keys, state) -> state for each pair."""
        scope, count = tf.get_current_name_scope(), len(self.pairs)

        def one(n: tf.Tensor, *state: tf.Tensor) -> list[tf.Tensor]:
            with tf.name_scope(f"{scope}/") if scope else contextlib.nullcontext():
                i, j = tf.unstack(tf.gather(tf.constant(self.pairs), n))
                return [n + 1, *step(i, j, list(state))]

        return tf.while_loop(lambda n, *_: n < count, one, [tf.constant(0), *start])[1:]


def _weighted(powers: tf.Tensor, v: tf.Tensor) -> tf.Tensor:
    return by_head("BNTS,BNSK->BNTK", tf.cast(powers, v.dtype), v)


def _put(rows: tf.Tensor, i: tf.Tensor, row: tf.Tensor) -> tf.Tensor:
    return kernels.current().with_row(rows, i, row)
