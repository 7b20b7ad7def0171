"""The losses of logits for TensorFlow's own kernels, in few passes. Letters: R token, M model, V vocabulary."""

from collections.abc import Callable

import tensorflow as tf

from lingvo_moe.core.kernels.without_avx512 import weight_gradient
from lingvo_moe.core.kernels.xla import Shard
from lingvo_moe.core.private import tensorflow as private


def token_losses(
    x: tf.Tensor,
    table_VM: tf.Tensor,
    labels: tf.Tensor,
    weights: tf.Tensor,
    label_smoothing: float,
    shard: Shard,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """See `Kernels`.

    The logits are the largest tensor of a training step: 64 MB where an activation is 2. Each operation that touches
    them costs as much as a layer, so they are read three times and written once beside the products, and all else is
    computed on [R,M] and [V,M]. Where x is no float32, products are of its type, so each of them costs one pass more.
    """
    flat_x, flat_labels = tf.reshape(x, [-1, x.shape[-1]]), tf.reshape(labels, [-1])
    losses = _token_losses(label_smoothing)(flat_x, table_VM, flat_labels)
    xent, nll, correct = (
        tf.reshape(loss, tf.shape(labels)) * tf.cast(weights, tf.float32) for loss in losses
    )
    return xent, nll, correct


def _token_losses(label_smoothing: float) -> Callable:
    @private.custom_gradient
    def run(x: tf.Tensor, table: tf.Tensor, labels: tf.Tensor) -> tuple[list[tf.Tensor], Callable]:
        num, narrow = table.shape[0], tf.cast(table, x.dtype)
        on, off = 1.0 - label_smoothing, label_smoothing / num
        scores = _float32(tf.matmul(x, narrow, transpose_b=True))
        probs = tf.nn.softmax(scores)
        best = tf.reduce_max(scores, -1)
        # From the largest probability, at least 1/V, where a label's own may be 0 in float32.
        partition = best - tf.math.log(tf.reduce_max(probs, -1))
        picked = tf.gather(scores, labels, batch_dims=1)
        summed = tf.reduce_sum(_float32(table), 0, keepdims=True)
        xent = partition - on * picked
        if label_smoothing:
            xent -= off * tf.reduce_sum(_float32(x) * summed, -1)
        correct = tf.cast(picked >= best, tf.float32)

        def grad(dxent: tf.Tensor, *_: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, None]:
            """The logits' is dxent (probs - target), target = on at the label and off everywhere; the contribution of
            the target to the products needs no matrix of that size."""
            per_token = dxent[:, tf.newaxis]
            scaled = per_token * _float32(x)
            if x.dtype == tf.float32:
                dx = tf.matmul(probs, narrow) - on * tf.gather(narrow, labels)
                dtable = weight_gradient(probs, scaled)
                dtable = tf.tensor_scatter_nd_sub(dtable, labels[:, tf.newaxis], on * scaled)
            else:  # rounded after the difference: near 1 a probability would lose what is left to learn
                places = tf.stack([tf.range(tf.size(labels)), labels], 1)
                at_label = tf.fill(tf.shape(labels), on)
                rest = tf.cast(tf.tensor_scatter_nd_sub(probs, places, at_label), x.dtype)
                dx = _float32(tf.matmul(rest, narrow))
                dtable = _float32(weight_gradient(rest, tf.cast(scaled, x.dtype)))
            if label_smoothing:
                dx -= off * summed
                dtable -= off * tf.reduce_sum(scaled, 0, keepdims=True)
            return tf.cast(per_token * dx, x.dtype), tf.cast(dtable, table.dtype), None

        return [xent, partition - picked, correct], grad

    return run


def _float32(x: tf.Tensor) -> tf.Tensor:
    return tf.cast(x, tf.float32)
