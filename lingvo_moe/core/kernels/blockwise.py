"""Causal self-attention over blocks of queries and keys, whose memory grows with the length and not with its square.

The formulas are those of Rabe and Staats 2021 ("Self-attention Does Not Need O(n^2) Memory") and Dao et al. 2022
("FlashAttention"): a softmax over blocks of keys needs of those before a largest logit and a sum alone, and the
backward pass makes the probabilities of a block again from each query's logarithm of that sum. A loop goes through the
pairs of a block of queries and a block of keys that it may look at; other pairs are not computed.

Letters: those of `Kernels`; Q block, T query in it, S key in it.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from lingvo_moe.core.kernels.scores import MASKED, Seen, by_head
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.tensors import custom_gradient, or_zeros, runtime_zeros, shape_of, with_row

BLOCK, FROM_LENGTH = 1024, 2048  # tokens: of a block; of rows from which on blocks pay


def attend(q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, seen: Seen) -> tf.Tensor:
    """`Kernels.attend` in rows, without dropout, by blocks: [B,T,N,K].

    The softmax, and sums over blocks, are float32. A query that may look nowhere gets finite numbers that mean nothing.

    Args:
        q, k, v: [B,T,N,K] and twice [B,S,A,K], of a static length.
        seen: with segments.
    """
    batch, length, heads, _ = shape_of(q)
    size = min(seen.block or BLOCK, length)
    heads_of_keys = "N" if k.shape[2] == heads else "A"
    letters = {"q": "QBNTK", "k": f"QB{heads_of_keys}SK"}
    q_QBNTK = seen.Shard(_split(q, size), letters["q"])
    k, v = (seen.Shard(_split(x, size), letters["k"]) for x in (k, v))
    rows = NestedMap(segments=_split(seen.segments, size), positions=_split(seen.query_at, size))
    loop = _Loop(_pairs(length, size, seen.reach), rows, seen, letters)
    # What attention takes beside queries, keys and values, and has gradients.
    weights = () if seen.bias is None else seen.bias.weights
    sinks = [] if seen.sinks_N is None else [seen.sinks_N]

    @custom_gradient
    def run(*inputs: tf.Tensor) -> tuple:
        y, log_sum = loop.Forward(*inputs)
        return y, lambda dy: loop.Backward(inputs, y, log_sum, dy)

    y = run(q_QBNTK, k, v, *sinks, *weights)
    y = tf.reshape(tf.transpose(y, [1, 0, 3, 2, 4]), [batch, -1, heads, v.shape[-1]])
    return y[:, :length]


def _pairs(length: int, size: int, reach: int | None) -> np.ndarray:
    """The numbers of a block of queries and of one of keys that some of its queries may look at: int32 [P,2]."""
    num, reach = -(-length // size), reach or length
    first = [max(0, i * size - reach + 1) // size for i in range(num)]
    return np.array([(i, j) for i in range(num) for j in range(first[i], i + 1)], "int32")


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
    rows: NestedMap  # `segments` and `positions`, int32 [Q,B,t]
    seen: Seen
    letters: dict[str, str]  # "q": those of queries; "k": those of keys and values

    def Forward(
        self, q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, *others: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """The result [Q,B,N,T,K], and each query's logarithm of its softmax's denominator, float32 [Q,B,N,T].

        The sums so far are divided by exp of the largest logit so far.
        """
        sinks, weights = self._Others(others)

        def step(i: tf.Tensor, j: tf.Tensor, state: list[tf.Tensor]) -> list[tf.Tensor]:
            largest, total, weighted = (tf.gather(x, i) for x in state)
            scores = self._Scores(tf.gather(q, i), tf.gather(k, j), weights, i, j)
            new = tf.maximum(largest, tf.reduce_max(scores, -1))
            powers = tf.exp(scores - new[..., tf.newaxis])
            shrink = tf.exp(largest - new)
            total = total * shrink + tf.reduce_sum(powers, -1)
            values = _weighted(powers, tf.gather(v, j))
            weighted = weighted * shrink[..., tf.newaxis] + tf.cast(values, tf.float32)
            news = (new, total, weighted)
            return [with_row(x, i, y) for x, y in zip(state, news, strict=True)]

        zeros = self._Zeros(q, self.letters["q"][:-1], q.shape[:-1])
        start = [zeros + MASKED, zeros]
        if sinks:  # a logit of each head, before any key
            start = [zeros + tf.cast(sinks[0], tf.float32)[:, tf.newaxis], zeros + 1.0]
        start.append(self._Zeros(q, self.letters["q"], [*q.shape[:-1], v.shape[-1]]))
        largest, total, weighted = self._Run(step, start)
        y = tf.cast(weighted / total[..., tf.newaxis], v.dtype)
        return y, largest + tf.math.log(total)

    def Backward(
        self, inputs: tuple[tf.Tensor, ...], y: tf.Tensor, log_sum: tf.Tensor, dy: tf.Tensor
    ) -> list[tf.Tensor]:
        """The gradients of q, k, v and, if any, of sinks and of the bias' weights."""
        q, k, v, *others = inputs
        sinks, weights = self._Others(others)
        # A logit's gradient is its probability times (its value's part of dy, less the mean of that over all keys).
        mean = tf.reduce_sum(tf.cast(y, tf.float32) * tf.cast(dy, tf.float32), -1)

        def step(i: tf.Tensor, j: tf.Tensor, state: list[tf.Tensor]) -> list[tf.Tensor]:
            sources = [tf.gather(q, i), tf.gather(k, j), tf.gather(v, j), *weights]
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(sources)
                scores = self._Scores(sources[0], sources[1], sources[3:], i, j)
                probs = tf.exp(scores - tf.gather(log_sum, i)[..., tf.newaxis])
                results = [_weighted(probs, sources[2]), tf.reduce_sum(probs, -1)]
            upstream = [tf.gather(dy, i), -tf.gather(mean, i)]
            pairs = zip(tape.gradient(results, sources, upstream), sources, strict=True)
            grads = [tf.cast(or_zeros(grad, x), tf.float32) for grad, x in pairs]
            blocks = zip(state[:3], (i, j, j), grads[:3], strict=True)
            sums = [with_row(x, n, tf.gather(x, n) + g) for x, n, g in blocks]
            return sums + [x + g for x, g in zip(state[3:], grads[3:], strict=True)]

        letters = (self.letters["q"], self.letters["k"], self.letters["k"])
        arrays = zip(letters, (q, k, v), strict=True)
        start = [self._Zeros(q, dims, x.shape) for dims, x in arrays]
        start += [runtime_zeros(q, tf.float32, w.shape) for w in weights]
        sums = self._Run(step, start)
        sources = (q, k, v, *weights)
        grads = [tf.cast(d, x.dtype) for d, x in zip(sums, sources, strict=True)]
        of_sinks = []
        for logit in sinks:
            probs = tf.exp(tf.cast(logit, tf.float32)[:, tf.newaxis] - log_sum)
            of_sinks.append(tf.cast(-tf.reduce_sum(probs * mean, [0, 1, 3]), logit.dtype))
        return [*grads[:3], *of_sinks, *grads[3:]]

    def _Others(
        self, others: Sequence[tf.Tensor]
    ) -> tuple[Sequence[tf.Tensor], Sequence[tf.Tensor]]:
        """The inputs beside q, k and v in two parts: sinks, if any, and the bias' weights."""
        num = self.seen.sinks_N is not None
        return others[:num], others[num:]

    def _Scores(
        self, q: tf.Tensor, k: tf.Tensor, weights: Sequence[tf.Tensor], i: tf.Tensor, j: tf.Tensor
    ) -> tf.Tensor:
        """Float32 logits [B,N,T,S] of blocks i and j."""
        queries = self.rows.Transform(lambda x: tf.gather(x, i))
        keys = self.rows.Transform(lambda x: tf.gather(x, j))
        allowed = self.seen.MaskInRow(queries, keys)[:, tf.newaxis]
        scores = tf.cast(by_head("BNTK,BNSK->BNTS", q, k), tf.float32)
        if self.seen.bias is not None:
            scores += self.seen.bias.function(queries.positions, keys.positions, *weights)
        return tf.where(allowed, scores, tf.constant(MASKED))

    def _Zeros(self, runtime: tf.Tensor, letters: str, shape: tf.TensorShape) -> tf.Tensor:
        return self.seen.Shard(runtime_zeros(runtime, tf.float32, shape), letters)

    def _Run(self, step: Callable, start: list[tf.Tensor]) -> list[tf.Tensor]:
        """Calls step(number of a block of queries, of keys, state) -> state for each pair.

        TensorFlow traces the body of a loop as a graph of its own, in which no name scope is open. The caller's is
        opened there again, so that the names of the body's operations, too, say which layer they are of.
        """
        scope, count = tf.get_current_name_scope(), len(self.pairs)

        def one(n: tf.Tensor, *state: tf.Tensor) -> list[tf.Tensor]:
            with tf.name_scope(f"{scope}/") if scope else contextlib.nullcontext():
                i, j = tf.unstack(tf.gather(tf.constant(self.pairs), n))
                return [n + 1, *step(i, j, list(state))]

        return tf.while_loop(lambda n, *_: n < count, one, [tf.constant(0), *start])[1:]


def _weighted(powers: tf.Tensor, v: tf.Tensor) -> tf.Tensor:
    return by_head("BNTS,BNSK->BNTK", tf.cast(powers, v.dtype), v)
