"""A classifier of texts: a task with one stack, which sees both ways. This file is all of it but an input.

Letters: B text, T token, M model, V vocabulary, C class.
"""

import tensorflow as tf

from lingvo_moe.api import (
    Context,
    InstantiableParams,
    NestedMap,
    Softmax,
    TaskStack,
    TransformerTask,
    checks,
    sizes_of,
    within,
)


class TextClassifier(TransformerTask):
    """Takes `batch.{ids,segment_ids,segment_pos}` [B,T], a text a row, and `labels` [B]; reads the mean of tokens."""

    STACKS = (TaskStack("encoder", "num_layers", side="source", causal=False),)
    SIZES = {**TransformerTask.SIZES, **sizes_of(STACKS)}

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params().Delete("tied_softmax", "multi_token_weight")
        p.Define("vocab_size", 1000, "V.", checks.IDS)
        p.Define("num_layers", 2, "Layers.", checks.LAYERS)
        p.Define("num_classes", 2, "C.", checks.SIZE)
        return p

    def CreateHead(self, stack: TaskStack) -> None:
        p = self.p
        head = Softmax.Params().Set(vocab_size=p.num_classes, model_dim=p.model_dim)
        self.CreateChild("softmax", head.Set(label_smoothing=p.label_smoothing))

    def Units(self, batch: NestedMap) -> NestedMap:
        return NestedMap(super().Units(batch), texts=tf.constant(float(batch.ids.shape[0])))

    @within("Loss")
    def LossTerms(
        self, theta: NestedMap, carry: NestedMap, context: Context
    ) -> tuple[tf.Tensor, NestedMap]:
        batch, shares = context.batch, context.shares
        y = self.encoder.Normalized(theta.encoder, carry.x)
        real = tf.cast(batch.segment_ids > 0, y.dtype)
        mean = tf.einsum("BTM,BT->BM", y, real) / tf.reduce_sum(real, 1, keepdims=True)
        ones = tf.ones([batch.ids.shape[0], 1])
        losses = self.softmax.Losses(
            theta.softmax, mean[:, tf.newaxis], batch.labels[:, tf.newaxis], ones
        )
        share = (1.0 if shares is None else shares.texts) / batch.ids.shape[0]
        loss, nll, accuracy = (tf.reduce_sum(x) * share for x in losses)
        return loss, NestedMap(nll=nll, accuracy=accuracy, tokens=tf.reduce_sum(real))
