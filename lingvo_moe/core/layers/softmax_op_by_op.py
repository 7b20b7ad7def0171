"""The cross-entropy over a large vocabulary for TensorFlow's own kernels (core/op_by_op.py).

The logits are the largest tensor of a training step: 64 MB where an activation is 2. Each operation that
touches them costs as much as a layer, so they are read three times and written once beside the products,
and all else is worked out on [T, M] and [V, M].

Letters: B batch, T token (B and time joined), M model, V vocabulary.
"""

from collections.abc import Callable

import tensorflow as tf


def losses(
    x: tf.Tensor, table: tf.Tensor, labels: tf.Tensor, label_smoothing: float
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """The losses of logits x table^T.

    Args:
        x: float32 [B, time, M].
        table: float32 [V, M].
        labels: int32 [B, time].
        label_smoothing: e of Softmax.XentLoss.

    Returns:
        (xent, nll, correct), float32 [B, time]: the smoothed cross-entropy; that without smoothing, and
        whether no logit is above the label's, both without gradient.
    """
    flat_x, flat_labels = tf.reshape(x, [-1, x.shape[-1]]), tf.reshape(labels, [-1])
    each = _losses(label_smoothing)(flat_x, table, flat_labels)
    xent, nll, correct = (tf.reshape(loss, tf.shape(labels)) for loss in each)
    return xent, nll, correct


def _losses(label_smoothing: float) -> Callable:
    @tf.custom_gradient
    def run(x: tf.Tensor, table: tf.Tensor, labels: tf.Tensor) -> tuple[list[tf.Tensor], Callable]:
        num = table.shape[0]
        on, off = 1.0 - label_smoothing, label_smoothing / num
        logits = tf.matmul(x, table, transpose_b=True)
        probs = tf.nn.softmax(logits)
        best = tf.reduce_max(logits, -1)
        # From the largest probability, at least 1/V, where a label's own may be 0 in float32.
        partition = best - tf.math.log(tf.reduce_max(probs, -1))
        picked = tf.gather(logits, labels, batch_dims=1)
        summed = tf.reduce_sum(table, 0, keepdims=True)
        xent = partition - on * picked
        if label_smoothing:
            xent -= off * tf.reduce_sum(x * summed, -1)
        correct = tf.cast(picked >= best, tf.float32)

        def grad(dxent: tf.Tensor, *_: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, None]:
            """Of logits it is dxent (probs - target), target = on at the label and off everywhere; what
            the target contributes to the products needs no matrix of that size."""
            each = dxent[:, tf.newaxis]
            scaled = each * x
            dx = tf.matmul(probs, table) - on * tf.gather(table, labels)
            dtable = tf.matmul(probs, scaled, transpose_a=True)
            dtable = tf.tensor_scatter_nd_sub(dtable, labels[:, tf.newaxis], on * scaled)
            if label_smoothing:
                dx -= off * summed
                dtable -= off * tf.reduce_sum(scaled, 0, keepdims=True)
            return each * dx, dtable, None

        return [xent, partition - picked, correct], grad

    return run
