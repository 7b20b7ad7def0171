"""Noisy top-k gating (Shazeer et al. 2017, Outrageously Large Neural Networks, section 2.1).

Letters: G group, S token in group, k choice rank, E expert, M model.
"""

import tensorflow as tf

from lingvo_moe.core import randomness
from lingvo_moe.core.base_layer import BaseLayer, WeightParams
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params as HyperParams
from lingvo_moe.core.initializers import WeightInit
from lingvo_moe.core.moe.routers.base import LearnedRouter
from lingvo_moe.core.moe.routers.losses_and_metrics import (
    AuxLoss,
    Choice,
    cv_squared,
    importance,
    smooth_load,
)
from lingvo_moe.core.moe.routers.slots import count_choices, top_k
from lingvo_moe.core.nested_map import NestedMap


class NoisyTopKRouter(LearnedRouter):
    """The k largest of H(x) = x wg + normal * softplus(x wnoise), gates by a softmax over those k, or sigmoids.

    Noise, whose size is learnt for each expert, is added in training alone. Two losses keep experts in
    use, each the squared coefficient of variation over experts: of the importance (sum of gates), and
    of the load (expected number of tokens, which has a gradient through the noise). Where there is no
    noise, in inference, the load is a count. The paper weighs both losses by 0.1 in its language
    models; here that is the weights below times the task's own.

    Both weights start at zero, as the paper advises: at first noise alone decides, evenly.

    Beyond the paper: `noise_epsilon` is added to the noise's deviation (as in its authors' published
    code), which keeps the load finite; and experts have a capacity.
    """

    PackWeights = BaseLayer.PackWeights

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("k", 2, "Experts of a token, 1 to E.", checks.SIZE)
        p.Define(
            "importance_weight", 1.0, "Weight of the importance's variation.", checks.NOT_NEGATIVE
        )
        p.Define("load_weight", 1.0, "Weight of the load's variation.", checks.NOT_NEGATIVE)
        p.Define(
            "noise_epsilon", 0.01, "The least standard deviation of the noise.", checks.POSITIVE
        )
        return p

    @classmethod
    def Flops(cls, params: HyperParams, tokens: int) -> int:
        return 2 * super().Flops(params, tokens)

    def __init__(self, params: InstantiableParams):
        params = params.Copy()
        params.weight_split = {"wnoise.E": None, **(params.weight_split or {})}
        super().__init__(params)
        p = self.p
        self.CreateVariable(
            "wnoise", WeightParams((p.model_dim, p.num_experts), "ME", WeightInit.Constant(0.0))
        )

    def GatingInit(self) -> WeightInit:
        """Zeros (appendix A)."""
        return WeightInit.Constant(0.0)

    def ChooseByInputs(
        self,
        theta: NestedMap,
        x_GSM: tf.Tensor,
        real_GS: tf.Tensor,
        capacity: int | None,
        seed: tf.Tensor | None,
    ) -> Choice:
        """See `LearnedRouter`; theta holds wg and wnoise [M,E]."""
        logits_GSE = self.Logits(theta, x_GSM)
        deviation_GSE = None
        if seed is not None:
            x_GSM, wnoise_ME = tf.cast(x_GSM, tf.float32), tf.cast(theta.wnoise, tf.float32)
            raw_GSE = self.Shard(tf.einsum("GSM,ME->GSE", x_GSM, wnoise_ME), "GSE")
            deviation_GSE = tf.math.softplus(raw_GSE) + self.p.noise_epsilon
        return self.ChooseByLogits(logits_GSE, real_GS, capacity, seed, deviation_GSE)

    def ChooseByLogits(
        self,
        logits_GSE: tf.Tensor,
        real_GS: tf.Tensor,
        capacity: int | None = None,
        seed: tf.Tensor | None = None,
        deviation_GSE: tf.Tensor | None = None,
    ) -> Choice:
        """See `LearnedRouter`. `deviation_GSE`: the noise's standard deviations, float32; None, or no
        seed: no noise."""
        p = self.p
        noisy_GSE = logits_GSE
        if seed is not None and deviation_GSE is not None:
            noise_GSE = randomness.normal(self.FoldSeed(seed, "noise"), logits_GSE.shape)
            noisy_GSE += self.Shard(noise_GSE, "GSE") * deviation_GSE
        # The next largest is what a chosen expert's logit would have to exceed with other noise.
        best_GSk, index_GSk = top_k(noisy_GSE, min(p.k + 1, p.num_experts))
        index_GSk = index_GSk[:, :, : p.k]
        gate_GSk = self.gate.scores(best_GSk[:, :, : p.k], None) * real_GS[:, :, tf.newaxis]
        wanted_GSk = tf.stack([real_GS] * p.k, -1)

        def losses() -> list[AuxLoss]:
            if noisy_GSE is logits_GSE or p.k == p.num_experts:
                load_E = tf.reduce_sum(count_choices(index_GSk, wanted_GSk, p.num_experts), 0)
            else:
                threshold_GSE = _to_exceed(noisy_GSE, best_GSk)
                load_E = smooth_load(logits_GSE, deviation_GSE, threshold_GSE, real_GS)
            even = cv_squared(importance(gate_GSk, index_GSk, p.num_experts))
            load = cv_squared(load_E)
            return [
                AuxLoss("importance", even, p.importance_weight, "tokens"),
                AuxLoss("load", load, p.load_weight, "tokens"),
            ]

        probabilities_GSE = self.gate.Probabilities(self.gate.scores(noisy_GSE, None))
        return Choice(index_GSk, gate_GSk, wanted_GSk, real_GS, probabilities_GSE, losses=losses)


def _to_exceed(noisy_GSE: tf.Tensor, best_GSk: tf.Tensor) -> tf.Tensor:
    """[G,S,E]: for each expert the k-th largest of the others, from the k + 1 largest of all."""
    kth_GS1, next_GS1 = best_GSk[:, :, -2:-1], best_GSk[:, :, -1:]
    return tf.where(noisy_GSE > next_GS1, next_GS1, kth_GS1)
