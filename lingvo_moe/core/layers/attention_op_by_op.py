"""Attention for TensorFlow's own kernels: few products, few transpositions, few passes (core/op_by_op.py).

An einsum over [B, T, N, K] makes TensorFlow move each operand so that B and N lead, in forward and
backward, and each of the three projections reads the input anew. Here one product makes all of a kind,
and one transposition brings them where the products over S and K need them.

Letters: B batch, T query, S key, M model, N head, A head of keys and values, R head of those that share them, K
key dimension.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

from lingvo_moe.core.op_by_op import fused

# What is added to a masked logit: beside it a float32 logit vanishes.
_MASKED = -1e9


def project(x: tf.Tensor, weights: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """x [B, T, M] by each of the weights [M, N, K]: a list of [B, N, T, K]."""
    batch, time = tf.shape(x)[0], tf.shape(x)[1]
    if x.shape.is_fully_defined():
        batch, time = x.shape[:2]
    dim, heads, size = weights[0].shape
    num = len(weights)
    joined = tf.reshape(tf.concat(weights, axis=1), [dim, num * heads * size])
    y = tf.matmul(tf.reshape(x, [-1, dim]), joined)
    y = tf.reshape(y, [batch, time, num, heads, size])
    return tf.unstack(tf.transpose(y, [2, 0, 3, 1, 4]))


def probabilities(q: tf.Tensor, k: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    """softmax(q k^T) where the mask allows: [B, N, T, K], [B, A, S, K], bool or 0/1 [B, T or 1, S] to
    float32 [B, N, T, S]."""
    bias = (1.0 - tf.cast(mask, tf.float32)) * _MASKED
    logits = tf.cast(_by_kv_head(q, k, transpose_b=True), tf.float32)
    return _softmax(logits, bias[:, tf.newaxis])


def context(probs: tf.Tensor, v: tf.Tensor, o: tf.Tensor) -> tf.Tensor:
    """probs [B, N, T, S] times v [B, A, S, K], projected by o [N, K, M]: [B, T, M]."""
    heads, size, dim = o.shape
    y = tf.transpose(_by_kv_head(probs, v), [0, 2, 1, 3])
    shape = tf.shape(y)
    batch, time = y.shape[:2] if y.shape.is_fully_defined() else (shape[0], shape[1])
    y = tf.matmul(tf.reshape(y, [-1, heads * size]), tf.reshape(o, [heads * size, dim]))
    return tf.reshape(y, [batch, time, dim])


def _by_kv_head(x: tf.Tensor, y: tf.Tensor, transpose_b: bool = False) -> tf.Tensor:
    """x [B, N, T, a] times y [B, A, a, b] (or [B, A, b, a]), head by head: [B, N, T, b]. The R heads that share a
    matrix are rows of one product."""
    heads, shared = x.shape[1], y.shape[1]
    if heads == shared:
        return tf.matmul(x, y, transpose_b=transpose_b)
    batch, _, time, width = tf.unstack(tf.shape(x))
    rows = tf.reshape(x, [batch, shared, heads // shared * time, width])
    out = tf.matmul(rows, y, transpose_b=transpose_b)
    joined = tf.reshape(out, [batch, heads, time, tf.shape(out)[3]])
    joined.set_shape([*x.shape[:3], out.shape[3]])
    return joined


@tf.custom_gradient
def _softmax(logits: tf.Tensor, bias: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    probs = tf.nn.softmax(logits + bias)

    def grad(dprobs: tf.Tensor) -> tuple[tf.Tensor, None]:
        return _softmax_grad(probs, dprobs), None

    return probs, grad


@fused
def _softmax_grad(probs: tf.Tensor, dprobs: tf.Tensor) -> tf.Tensor:
    return probs * (dprobs - tf.reduce_sum(probs * dprobs, axis=-1, keepdims=True))
