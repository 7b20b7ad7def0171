"""Logits and their cross-entropy. Letters: B batch, T time, M model, V vocabulary."""

from collections.abc import Sequence
from typing import ClassVar

import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.base_layer import BaseLayer, WeightParams, scoped
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params as HyperParams
from lingvo_moe.core.initializers import WeightInit
from lingvo_moe.core.kernels.packed_weights import PackAs
from lingvo_moe.core.kernels.weights import Packing
from lingvo_moe.core.nested_map import NestedMap

SCALE_HELP = "The factor of the logits, e.g. 1/sqrt(M) where the table of embeddings of T5 is the softmax's too."


class Softmax(BaseLayer):
    """Logits scale x . table^T, and the label-smoothed cross-entropy of each token.

    With `p.tied` the layer has no variable: the model passes the target embedding's table as
    `theta=NestedMap(table=theta.target_embedding.table)`.
    """

    PART: ClassVar[str] = "softmax"
    NAMES_ITS_PARTS: ClassVar[bool] = True

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("vocab_size", 0, "V.", checks.IDS)
        p.Define("model_dim", 0, "M.", checks.SIZE)
        p.Define("tied", False, "Whether the table is another layer's, passed in theta.")
        p.Define("scale", 1.0, SCALE_HELP, checks.POSITIVE)
        p.Define(
            "label_smoothing", 0.0, "The share of the target that is uniform over V.", checks.SHARE
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
        table = theta.packed_table if "packed_table" in theta else theta.table
        return kernels.current().logits(self._Scaled(x), table, self.Shard)

    def _Scaled(self, x: tf.Tensor) -> tf.Tensor:
        return x if self.p.scale == 1.0 else x * tf.constant(self.p.scale, x.dtype)

    def PackWeights(self, theta: NestedMap, packing: Packing) -> NestedMap:
        """See BaseLayer: `packed_table` stands beside a tied table, of which an embedding reads rows."""
        if "table" not in theta:  # another layer's
            return theta
        table = tf.transpose(self.Cast(theta.table))
        return NestedMap(theta if self.p.tied else {}, packed_table=packing.Matrix(table))

    @scoped
    def OfTokens(self, theta: NestedMap, ids: tf.Tensor) -> NestedMap:
        """Returns the packed weights with which FProp computes the logits of the tokens `ids` alone: [B, T, U].

        The table's rows of these tokens are copied and packed as float32, also if the other weights are int8.

        Args:
            theta: from `PackWeights`.
            ids: int32 [U]; U may be unknown while tracing.
        """
        some = NestedMap(theta, table=tf.gather(theta.table, ids))
        packed = self.PackWeights(some, PackAs()).packed_table
        return NestedMap(theta, packed_table=packed)

    @scoped
    def Losses(
        self, theta: NestedMap, x: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """The losses of the logits of x [B, T, M], without keeping the logits where the kernels can do without.

        Args:
            theta: table [V, M].
            labels: int32 [B, T].
            weights: float [B, T], 0 at padding.

        Returns:
            (xent, nll, correct), float32 [B, T], all times the weight: see `Kernels.token_losses`.
        """
        return kernels.current().token_losses(
            self._Scaled(x), theta.table, labels, weights, self.p.label_smoothing, self.Shard
        )

    @classmethod
    def FPropMeta(cls, params: HyperParams, *input_shapes: Sequence[int]) -> NestedMap:
        """2 M V for each token."""
        batch, time, dim = input_shapes[0]
        return NestedMap(
            flops=2 * batch * time * dim * params.vocab_size,
            out_shapes=((batch, time, params.vocab_size),),
        )
