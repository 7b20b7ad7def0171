"""A head for the token after the next one (DeepSeek-V3 2024, section 2.2).

Letters: B batch, T time, M model; H is M too, where it is summed over.
"""

from collections.abc import Sequence
from typing import ClassVar

import tensorflow as tf

from lingvo_moe.core.base_layer import BaseLayer, WeightParams
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params as HyperParams
from lingvo_moe.core.initializers import WeightInit
from lingvo_moe.core.layers.normalization import LayerNorm
from lingvo_moe.core.layers.transformer_layer import TransformerLayer
from lingvo_moe.core.nested_map import NestedMap


class MultiTokenHead(BaseLayer):
    """One more layer, whose input is a projection of the stack's output and of the next token's embedding.

    Both are normalized before the projection, and the layer's output after it. Embedding and softmax are the model's.
    The report leaves open whether the stack's output is that before or after its last normalization; it is that after,
    as for the published weights in `transformers`, which has the halves of the projection in one, the token's first.
    """

    NAMES_ITS_PARTS: ClassVar[bool] = True
    PART: ClassVar[str] = "residual"

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("model_dim", 0, "M.", checks.SIZE)
        p.Define("layer", TransformerLayer.Params(), "The layer.")
        p.Define("norm_tpl", LayerNorm.Params(), "Params of the normalizations.")
        return p

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        m = self.p.model_dim
        for name in ("of_hidden", "of_token"):  # the halves of the projection
            self.CreateVariable(name, WeightParams((m, m), "HM", WeightInit.FanIn(2 * m)))
        for name in ("hidden_norm", "token_norm", "final_norm"):
            self.CreateChild(name, self.p.norm_tpl.Copy().Set(model_dim=m))
        self.CreateChild("layer", self.p.layer.Copy().Set(model_dim=m))

    def FProp(
        self,
        theta: NestedMap,
        x: tf.Tensor,
        tokens: tf.Tensor,
        aux: NestedMap,
        seed: tf.Tensor | None = None,
    ) -> tuple[tf.Tensor, NestedMap]:
        """The input of the softmax for the token after the next.

        Args:
            x: [B, T, M], the stack's output after its last normalization, which the softmax reads too.
            tokens: [B, T, M], the embedding of each position's next token.
            aux: as for the stack's layers.
            seed: int32 [2]; None means inference.

        Returns:
            ([B, T, M], the extras of the layer).
        """
        x = self.hidden_norm.FProp(theta.hidden_norm, x)
        tokens = self.token_norm.FProp(theta.token_norm, tokens)
        y = tf.einsum("BTH,HM->BTM", x, self.Cast(theta.of_hidden))
        y += tf.einsum("BTH,HM->BTM", tokens, self.Cast(theta.of_token))
        y, extras = self.layer.FProp(theta.layer, self.Shard(y, "BTM"), aux, seed)
        return self.final_norm.FProp(theta.final_norm, y), extras

    @classmethod
    def FPropMeta(cls, params: HyperParams, *input_shapes: Sequence[int]) -> NestedMap:
        """The projection, 4 M^2 for each token, and the layer."""
        batch, time, dim = input_shapes[0]
        layer = params.layer.Copy().Set(model_dim=dim)
        inside = layer.cls.FPropMeta(layer, *input_shapes)
        flops = 4 * batch * time * dim**2 + inside.flops
        return NestedMap(flops=flops, dispatch=inside.dispatch, out_shapes=((batch, time, dim),))
