"""Classifier: the head that scores classes. Letters: B batch, M model, V classes."""

from collections.abc import Sequence
from typing import ClassVar

import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.base_layer import BaseLayer, WeightParams
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params as HyperParams
from lingvo_moe.core.initializers import WeightInit
from lingvo_moe.core.nested_map import NestedMap


class Classifier(BaseLayer):
    """Logits x . w + b, and their label-smoothed cross-entropy.

    The layer works on features in its own sharding. With the batch sharded everywhere else and
    `activation_split={"V": axis}`, `weight_split={"V": axis}` here, every device gets the features of
    the whole batch and scores its part of the classes; logits are never gathered.
    """

    PART: ClassVar[str] = "classifier"

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("num_classes", 0, "V.", checks.SIZE)
        p.Define("model_dim", 0, "M.", checks.SIZE)
        p.Define(
            "label_smoothing", 0.0, "The share of the target that is uniform over V.", checks.SHARE
        )
        return p

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        shape = (self.p.model_dim, self.p.num_classes)
        self.CreateVariable("w", WeightParams(shape, "MV", WeightInit.FanIn(self.p.model_dim)))
        self.CreateVariable("b", WeightParams.Vector(shape[1:], "V", 0.0))

    def FProp(self, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        """Logits of x [B, M]: float32 [B, V]."""
        x = self.Shard(x, "BM")
        logits = tf.cast(tf.einsum("BM,MV->BV", x, self.Cast(theta.w)), tf.float32)
        return self.Shard(logits + tf.cast(theta.b, tf.float32), "BV")

    def Losses(self, logits: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Two cross-entropies in nats of logits float32 [B, V] and labels int32 [B]: with label smoothing,
        and without (which has no gradient); float32 [B]."""
        cross_entropy = kernels.current().cross_entropy
        smoothed = cross_entropy(logits, labels, self.p.label_smoothing)
        return smoothed, cross_entropy(tf.stop_gradient(logits), labels, 0.0)

    @classmethod
    def FPropMeta(cls, params: HyperParams, *input_shapes: Sequence[int]) -> NestedMap:
        """2 M V for each image; the bias as Conv2D's."""
        batch, dim = input_shapes[0]
        return NestedMap(
            flops=2 * batch * dim * params.num_classes, out_shapes=((batch, params.num_classes),)
        )


def in_top_k(logits: tf.Tensor, labels: tf.Tensor, k: int) -> tf.Tensor:
    """Whether each label is among the k best-scored classes; of equal scores the lower number is better.

    It counts the better classes, which partitions along V as a sum does; a sort would gather V.

    Args:
        logits: float32 [B, V].
        labels: int32 [B].
        k: from 1.

    Returns:
        float32 [B]: 1 or 0; 0 where the label's own score is not finite.
    """
    classes = tf.range(logits.shape[-1], dtype=labels.dtype)
    is_label = labels[:, tf.newaxis] == classes
    label_logit = tf.reduce_sum(tf.where(is_label, logits, 0.0), axis=-1, keepdims=True)
    better = (logits > label_logit) | ((logits == label_logit) & (classes < labels[:, tf.newaxis]))
    rank = tf.reduce_sum(tf.cast(better, tf.float32), axis=-1)
    return tf.cast((rank < k) & tf.math.is_finite(label_logit[:, 0]), tf.float32)
