"""Logits and their cross-entropy. Letters: B batch, T time, M model, V vocabulary."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from lingvo_moe.core import checks
from lingvo_moe.core.base_layer import BaseLayer, WeightParams
from lingvo_moe.core.hyperparams import InstantiableParams
from lingvo_moe.core.hyperparams import Params as HyperParams
from lingvo_moe.core.initializers import WeightInit
from lingvo_moe.core.layers import softmax_op_by_op
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.op_by_op import is_op_by_op


class Softmax(BaseLayer):
    """Logits x . table^T, and the label-smoothed cross-entropy of each token.

    With `p.tied` the layer has no variable: the model passes the target embedding's table as
    `theta=NestedMap(table=theta.target_embedding.table)`.
    """

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("vocab_size", 0, "V.", check=checks.IDS)
        p.Define("model_dim", 0, "M.", check=checks.SIZE)
        p.Define("tied", False, "Whether the table is another layer's, passed in theta.")
        p.Define(
            "label_smoothing",
            0.0,
            "The share of the target that is uniform over V.",
            check=checks.SHARE,
        )
        return p

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        p = self.p
        if not p.tied:
            init = WeightInit.FanIn(p.model_dim)
            self.CreateVariable("table", WeightParams((p.vocab_size, p.model_dim), "VM", init))

    def FProp(self, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        """Logits of x [B, T, M]: float32 [B, T, V]."""
        logits = tf.einsum("BTM,VM->BTV", x, self.Cast(theta.table))
        return self.Shard(tf.cast(logits, tf.float32), "BTV")

    def Losses(
        self, theta: NestedMap, x: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """What training needs of the logits of x [B, T, M]; labels and weights as in XentLoss.

        Returns:
            (xent, nll, correct), float32 [B, T], all times the weight: xent and correct as from
            XentLoss, and nll the cross-entropy without smoothing, which has no gradient.
        """
        if is_op_by_op() and x.dtype == theta.table.dtype == tf.float32:
            each = softmax_op_by_op.losses(x, theta.table, labels, self.p.label_smoothing)
            xent, nll, correct = (loss * tf.cast(weights, tf.float32) for loss in each)
            return xent, nll, correct
        logits = self.FProp(theta, x)
        xent, correct = self.XentLoss(logits, labels, weights)
        nll = smoothed_cross_entropy(tf.stop_gradient(logits), labels, 0.0)
        return xent, nll * tf.cast(weights, tf.float32), correct

    def XentLoss(
        self, logits: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Cross-entropy in nats and whether the best-scored id is the label, both times the weight.

        Args:
            logits: float32 [B, T, V].
            labels: int32 [B, T].
            weights: float [B, T], 0 at padding.

        Returns:
            (xent, correct), float32 [B, T]. With e = label_smoothing and p = softmax(logits),
            xent = -(1 - e) log p[label] - e/V sum_v log p[v].
        """
        weights = tf.cast(weights, tf.float32)
        best = tf.argmax(logits, axis=-1, output_type=tf.int32)
        correct = tf.cast(tf.equal(best, tf.cast(labels, tf.int32)), tf.float32)
        xent = smoothed_cross_entropy(logits, labels, self.p.label_smoothing)
        return xent * weights, correct * weights

    @classmethod
    def FPropMeta(cls, params: HyperParams, *input_shapes: Sequence[int]) -> NestedMap:
        """2 M V for each token."""
        batch, time, dim = input_shapes[0]
        return NestedMap(
            flops=2 * batch * time * dim * params.vocab_size,
            out_shapes=((batch, time, params.vocab_size),),
        )


def smoothed_cross_entropy(
    logits: tf.Tensor, labels: tf.Tensor, label_smoothing: float
) -> tf.Tensor:
    """See Softmax.XentLoss: logits float32 [B, T, V], labels int32 [B, T] to float32 [B, T].

    The gradient keeps the logits and one number for each token, and rebuilds the rest elementwise.
    """
    num = logits.shape[-1]
    on, off = 1.0 - label_smoothing, label_smoothing / num

    @tf.custom_gradient
    def xent(logits: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        # A one-hot product instead of a gather: it partitions and fuses, and needs no table of ids.
        partition = tf.reduce_logsumexp(logits, axis=-1)
        picked = tf.reduce_sum(logits * tf.one_hot(labels, num), axis=-1)
        loss = partition - on * picked
        if label_smoothing:
            loss -= off * tf.reduce_sum(logits, axis=-1)

        def grad(dloss: tf.Tensor) -> tuple[tf.Tensor, None]:
            probs = tf.exp(logits - partition[..., tf.newaxis])
            target = tf.one_hot(labels, num, on_value=on + off, off_value=off)
            return dloss[..., tf.newaxis] * (probs - target), None

        return loss, grad

    return xent(logits, labels)
