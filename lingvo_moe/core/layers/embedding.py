"""Token embeddings. Letters: B batch, T time, V vocabulary, M model."""

import math
from collections.abc import Sequence
from typing import ClassVar

import tensorflow as tf

from lingvo_moe.core.base_layer import BaseLayer, WeightParams
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params as HyperParams
from lingvo_moe.core.initializers import WeightInit
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.tensors import lookup

SCALE_HELP = "The factor of an embedding that is looked up, e.g. 1.0; None: sqrt(M)."


class Embedding(BaseLayer):
    """A table of token embeddings, scaled when looked up.

    The table starts with a standard deviation of 1/sqrt(M), so that embeddings that are scaled by sqrt(M) start at unit
    size, and so do the logits when a softmax shares the table.
    """

    PART: ClassVar[str] = "embedding"
    NAMES_ITS_PARTS: ClassVar[bool] = True

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("vocab_size", 0, "V.", checks.IDS)
        p.Define("model_dim", 0, "M.", checks.SIZE)
        p.Define("scale", None, SCALE_HELP, checks.or_none(checks.POSITIVE))
        return p

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        p = self.p
        init = WeightInit.Gaussian(1 / math.sqrt(p.model_dim))
        self.CreateVariable("table", WeightParams((p.vocab_size, p.model_dim), "VM", init))

    def FProp(self, theta: NestedMap, ids: tf.Tensor) -> tf.Tensor:
        """Looks up ids, int32 [B, T] with values in [0, V): embeddings [B, T, M]."""
        scale = math.sqrt(self.p.model_dim) if self.p.scale is None else self.p.scale
        x = self.Cast(lookup(theta.table, ids)) * tf.constant(scale, self.fprop_dtype)
        return self.Shard(x, "BTM")

    @classmethod
    def FPropMeta(cls, params: HyperParams, *input_shapes: Sequence[int]) -> NestedMap:
        """A lookup multiplies no matrices."""
        return NestedMap(flops=0, out_shapes=((*input_shapes[0], params.model_dim),))
