"""The scores of queries and keys in attention: which ones count, what is added to them, and their softmax.

Letters: B batch, T query, S key, N head, A head of keys and values, R heads of queries that share one, K key dimension.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import tensorflow as tf

from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding.annotate import shard_letters
from lingvo_moe.core.sharding.letters import SplitMap
from lingvo_moe.core.tensors import shape_of

# The value of a masked score: finite, so that a query that may look nowhere still gives numbers.
MASKED = -1e9


def segment_mask(query_segments: tf.Tensor, key_segments: tf.Tensor) -> tf.Tensor:
    """Within one packed example, never at padding: int [B, T] and [B, S] to bool [B, T, S].

    Segment 0 is padding. A query at padding may look nowhere (attention then returns some finite
    value that nothing uses).
    """
    q, k = query_segments[:, :, tf.newaxis], key_segments[:, tf.newaxis, :]
    return tf.logical_and(tf.equal(q, k), tf.not_equal(k, 0))


def causal_segment_mask_of(query: NestedMap, key: NestedMap) -> tf.Tensor:
    """The part for some queries and keys: int `segments` and `positions` [B, T] and [B, S] to bool [B, T, S]."""
    # Positions restart in each segment, so that they order what is in one segment only.
    return tf.logical_and(
        segment_mask(query.segments, key.segments),
        tf.greater_equal(query.positions[:, :, tf.newaxis], key.positions[:, tf.newaxis, :]),
    )


@dataclass(frozen=True)
class Bias:
    """Numbers that are added to scores, by the positions of queries and keys.

    Attributes:
        function: (int32 positions of queries [B,T], of keys [B,S], *weights) -> float32 [B,N,T,S]. B and T may be 1 for
            all rows or queries, and N for all heads.
        weights: the tensors to which gradients flow.
    """

    function: Callable[..., tf.Tensor]
    weights: tuple[tf.Tensor, ...] = ()


@dataclass(frozen=True)
class Seen:
    """The keys that each query looks at, and what its scores are beside products.

    Either a mask says it, or, in a packed decoder's self-attention, the segments and positions of a row: a query looks
    at the keys of its segment that do not come after it. No mask of a whole row then needs to be made.

    Attributes:
        mask: bool or 0/1 [B, T or 1, S]; None: it follows from `segments`.
        query_at, key_at: int32 positions [B or 1, T or 1] and [B or 1, S], which a row and a bias need.
        segments: int32 [B,T] of a row, 0 at padding; there `key_at` is `query_at`.
        reach: in a row, how many tokens a query looks at, itself and those before it; None: all.
        block: in a row, tokens of a block (blockwise.py); None: the kernels choose.
        bias: what is added to the scores; None: nothing.
        sinks_N: logits that take part in each head's softmax, beside those of the keys, and have no value.
        split: the mesh axes of activations, by letters.
    """

    mask: tf.Tensor | None = None
    query_at: tf.Tensor | None = None
    key_at: tf.Tensor | None = None
    segments: tf.Tensor | None = None
    reach: int | None = None
    block: int | None = None
    bias: Bias | None = None
    sinks_N: tf.Tensor | None = None
    split: SplitMap = field(default_factory=dict)

    def Mask(self) -> tf.Tensor:
        """The mask of all queries and keys."""
        if self.mask is not None:
            return self.mask
        row = NestedMap(segments=self.segments, positions=self.query_at)
        return self.MaskInRow(row, row)

    def MaskInRow(self, query: NestedMap, key: NestedMap) -> tf.Tensor:
        """The mask [B,t,s] of some tokens of rows, from their `segments` and `positions` [B,t] and [B,s]."""
        mask = causal_segment_mask_of(query, key)
        if self.reach is None:
            return mask
        distance = query.positions[:, :, tf.newaxis] - key.positions[:, tf.newaxis]
        return tf.logical_and(mask, distance < self.reach)

    def BiasOfAll(self) -> tf.Tensor | None:
        """The bias of all queries and keys, [B or 1, N or 1, T or 1, S]."""
        if self.bias is None:
            return None
        return self.bias.function(self.query_at, self.key_at, *self.bias.weights)

    def Shard(self, x: tf.Tensor, letters: str) -> tf.Tensor:
        """Annotates an activation by its einsum letters."""
        return shard_letters(x, letters, self.split)


def masked_softmax(scores: tf.Tensor, seen: Seen) -> tf.Tensor:
    """[B,N,T,S] products of queries and keys to float32 probabilities of the keys that are seen."""
    allowed = tf.cast(seen.Mask(), tf.bool)[:, tf.newaxis]
    scores, bias = tf.cast(scores, tf.float32), seen.BiasOfAll()
    scores = tf.where(allowed, scores if bias is None else scores + bias, tf.constant(MASKED))
    if seen.sinks_N is None:
        return tf.nn.softmax(scores)
    return softmax_beside(scores, seen.sinks_N[:, tf.newaxis, tf.newaxis])


def softmax_beside(scores: tf.Tensor, sinks: tf.Tensor) -> tf.Tensor:
    """The softmax of float32 scores and one more, whose probability is left out; `sinks` has it, with a last dimension
    of 1."""
    sinks = tf.cast(sinks, tf.float32)
    largest = tf.maximum(tf.reduce_max(scores, -1, keepdims=True), sinks)
    largest = tf.stop_gradient(largest)
    powers = tf.exp(scores - largest)
    return powers / (tf.reduce_sum(powers, -1, keepdims=True) + tf.exp(sinks - largest))


def by_head(equation: str, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """tf.einsum head by head, where `y` may have fewer heads than `x`.

    With A heads of keys and values, each serves R = N / A heads of queries: A = N is multi-head attention, A = 1
    multi-query attention (Shazeer 2019, "Fast Transformer Decoding: One Write-Head is All You Need"), anything between
    grouped-query attention (Ainslie et al. 2023, "GQA"). Heads a R to a R + R - 1 share keys and values a. Those are
    never repeated: the R heads are further rows of one product.

    Args:
        equation: in which N is the head of both operands and of the result, e.g. "BTNK,BSNK->BNTS".
    """
    x_letters, y_letters, out = re.split(",|->", equation)
    axis, kv_heads = x_letters.index("N"), y.shape[y_letters.index("N")]
    if x.shape[axis] == kv_heads:
        return tf.einsum(equation, x, y)
    x_letters, out_shared = (letters.replace("N", "AR") for letters in (x_letters, out))
    y_letters = y_letters.replace("N", "A")
    sizes = shape_of(x)
    shape = [*sizes[:axis], kv_heads, x.shape[axis] // kv_heads, *sizes[axis + 1 :]]
    z = tf.einsum(f"{x_letters},{y_letters}->{out_shared}", tf.reshape(x, shape), y)
    axis, sizes = out.index("N"), shape_of(z)
    return tf.reshape(z, [*sizes[:axis], z.shape[axis] * z.shape[axis + 1], *sizes[axis + 2 :]])
