"""The experts: E two-layer feed-forward networks in two weights (Algorithm 2, lines 5 to 7).

Letters: G group, E expert, C capacity slot, D devices, N rows of a device, M model, H hidden.
"""

import functools

import tensorflow as tf

from lingvo_moe.core import checks, kernels
from lingvo_moe.core.base_layer import BaseLayer, WeightParams
from lingvo_moe.core.hyperparams import InstantiableParams
from lingvo_moe.core.initializers import WeightInit
from lingvo_moe.core.moe.rows import Rows
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import DimsMapping, dims_mapping


class Experts(BaseLayer):
    """relu(x wi) wo, each expert on the tokens that are its own. No biases: an empty slot stays zero.

    A dispatcher gives slots, a tensor, or `Rows`: `FProp` takes the first, `GroupedFProp` the second.
    Experts of one's own need only what their dispatchers give.
    """

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("model_dim", 0, "M; the MoE layer sets it.", check=checks.SIZE)
        p.Define("hidden_dim", 0, "H; the MoE layer sets it.", check=checks.SIZE)
        p.Define("num_experts", 0, "E; the MoE layer sets it.", check=checks.SIZE)
        p.Define(
            "relu_dropout_prob",
            0.0,
            "Dropout on the hidden layer, in training.",
            check=checks.SHARE,
        )
        return p

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        p = self.p
        E, M, H = p.num_experts, p.model_dim, p.hidden_dim
        self.CreateVariable("wi", WeightParams((E, M, H), "EMH", WeightInit.FanIn(M)))
        self.CreateVariable("wo", WeightParams((E, H, M), "EHM", WeightInit.FanIn(H)))

    def FProp(
        self, theta: NestedMap, x_EGCM: tf.Tensor, seed: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Slots [E,G,C,M] in, slots [E,G,C,M] out, both cut along E, as the weights are."""
        wi, wo = self.Cast(theta.wi), self.Cast(theta.wo)
        rate, drop = self.p.relu_dropout_prob, None
        if rate and seed is not None:
            drop = functools.partial(kernels.dropout, rate=rate, seed=seed)
        return kernels.current().experts_feed_forward(x_EGCM, wi, wo, drop, self.Shard)

    def GroupedFProp(self, theta: NestedMap, x: Rows, seed: tf.Tensor | None = None) -> Rows:
        """Rows [D,N,M] in, rows [D,N,M] out, in ragged groups; cut along D, whose experts are local."""
        h = x.MatMul(self.Cast(theta.wi), self._Mapping("wi", "EMH"))
        rate = self.p.relu_dropout_prob
        h = h.With(kernels.dropout(tf.nn.relu(h.values), rate, seed, h.choices))
        return h.MatMul(self.Cast(theta.wo), self._Mapping("wo", "EHM"))

    def _Mapping(self, name: str, letters: str) -> DimsMapping:
        return dims_mapping(letters, self.p.weight_split, name)
