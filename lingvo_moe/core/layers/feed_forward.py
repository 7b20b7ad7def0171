"""The dense feed-forward layer, and the activations of all feed-forward layers and experts by their names.

A new activation is an entry of `ACTIVATIONS`: layers, experts, both sets of kernels, packed decoding and counts of
operations read that table alone.

Letters: B batch, T time, M model, H hidden.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.base_layer import BaseLayer, WeightParams
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params as HyperParams
from lingvo_moe.core.initializers import WeightInit
from lingvo_moe.core.kernels import Activation
from lingvo_moe.core.kernels.weights import Packing
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.tensors import Kept


def _clamped_swiglu(gate: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """SwiGLU of gpt-oss (OpenAI 2025): both products are clamped, and 1 is added to the linear one."""
    gate, x = tf.minimum(gate, 7.0), tf.clip_by_value(x, -7.0, 7.0)
    return gate * tf.sigmoid(1.702 * gate) * (x + 1.0)


ACTIVATIONS: Mapping[str, Activation] = {
    "identity": Activation(tf.identity, 0),
    "relu": Activation(tf.nn.relu, 1),
    "relu6": Activation(tf.nn.relu6, 2),
    "sigmoid": Activation(tf.math.sigmoid, 4),
    "tanh": Activation(tf.math.tanh, 7),
    "gelu": Activation(tf.nn.gelu, 15),
    "silu": Activation(tf.nn.silu, 5),
    "geglu": Activation(lambda gate, x: tf.nn.gelu(gate) * x, 16, gated=True),
    "swiglu": Activation(lambda gate, x: tf.nn.silu(gate) * x, 6, gated=True),
    "clamped_swiglu": Activation(_clamped_swiglu, 11, gated=True),
}


class FeedForward(BaseLayer):
    """y = wo . dropout(f(wi . x)), with biases added to the products if it has them; the same interface as the
    mixture-of-experts layer's.

    f is the activation: elementwise, or gated, of wi_gate . x and wi . x (`ACTIVATIONS`).
    """

    PART: ClassVar[str] = "dense_ffn"
    KEEPS: ClassVar = {"hidden": Kept.PRODUCT, "feed_forward": Kept.PRODUCT | Kept.OUTPUT}

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("model_dim", 0, "M; 0 takes the parent's.", checks.SIZE)
        p.Define("hidden_dim", 0, "H.", checks.SIZE)
        p.Define("activation", "relu", "f, by its name.", checks.one_of(ACTIVATIONS))
        p.Define("relu_dropout_prob", 0.0, "Dropout between the two projections.", checks.SHARE)
        p.Define("use_bias", False, "Whether each projection has a bias.")
        return p

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        m, h = self.p.model_dim, self.p.hidden_dim
        for name in ACTIVATIONS[self.p.activation].weights:
            self.CreateVariable(name, WeightParams((m, h), "MH", WeightInit.FanIn(m)))
        self.CreateVariable("wo", WeightParams((h, m), "HM", WeightInit.FanIn(h)))
        if self.p.use_bias:
            for name, weight in list(self._weights.items()):
                bias = WeightParams.Vector(weight.shape[1:], weight.letters[1:], 0.0)
                self.CreateVariable(f"{name}_bias", bias)

    def FProp(
        self,
        theta: NestedMap,
        x: tf.Tensor,
        paddings: tf.Tensor,
        seed: tf.Tensor | None = None,
        context: NestedMap | None = None,
        shares: NestedMap | None = None,
    ) -> tuple[tf.Tensor, NestedMap]:
        """Maps x [B, T, M] position by position to ([B, T, M], no extras).

        `paddings` [B, T], `context` and `shares` are not needed: a position depends on no other, and
        nothing is chosen. `seed` None means inference.
        """
        activation = ACTIVATIONS[self.p.activation]
        products = [
            self.Keep(self._Product(theta, name, x), "hidden", "BTH") for name in activation.weights
        ]
        h = self.Shard(activation.function(*products), "BTH")
        h = kernels.dropout(h, self.p.relu_dropout_prob, self.FoldSeed(seed, "relu"))
        y = self.Keep(self._Product(theta, "wo", h), "feed_forward", "BTM")
        return y, NestedMap()

    def _Product(self, theta: NestedMap, name: str, x: tf.Tensor) -> tf.Tensor:
        y = kernels.current().product(x, self.Cast(theta[name]))
        return y + self.Cast(theta[f"{name}_bias"]) if self.p.use_bias else y

    def PackWeights(self, theta: NestedMap, packing: Packing) -> NestedMap:
        """See BaseLayer; biases stay as they are."""
        matrices = {
            name: packing.Matrix(self.Cast(theta[name])) for name in theta if "bias" not in name
        }
        return NestedMap(theta, **matrices)

    @classmethod
    def FPropMeta(cls, params: HyperParams, *input_shapes: Sequence[int]) -> NestedMap:
        """Two projections, or three if the activation is gated, 2 M H each, for each token."""
        batch, time, dim = input_shapes[0]
        projection = 2 * batch * time * dim * params.hidden_dim
        return NestedMap(
            flops=ACTIVATIONS[params.activation].products * projection,
            out_shapes=((batch, time, dim),),
        )
