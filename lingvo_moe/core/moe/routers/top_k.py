"""The k best experts of each token, for any k: Switch (k = 1) and later routers.

Letters: G group, S token in group, k choice rank, E expert, Q group of experts, M model.
"""

import functools
from collections.abc import Callable
from typing import ClassVar

import tensorflow as tf

from lingvo_moe.core import randomness
from lingvo_moe.core.base_layer import WeightParams
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams, ParamError
from lingvo_moe.core.initializers import WeightInit
from lingvo_moe.core.moe.routers.base import LearnedRouter
from lingvo_moe.core.moe.routers.losses_and_metrics import (
    AuxLoss,
    Choice,
    load_balance,
    log_partition,
    z_loss,
)
from lingvo_moe.core.moe.routers.quantiles import balanced_bias
from lingvo_moe.core.moe.routers.slots import (
    count_choices,
    normalize,
    pick,
    replayed,
    top_k,
)
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import dims_mapping
from lingvo_moe.core.tensors import shape_of

_ORDERS = ("before", "after")
_NORMALIZATIONS = ("never", "before_drops", "after_drops")
# How many of a group's best scores are summed for its own.
_GROUP_SCORES = {"two_best": 2, "best": 1}


class TopKRouter(LearnedRouter):
    """Each token goes to its k most probable experts while they have free slots, all first choices of a
    group before any second, and so on. The choice is not random.

    With k = 1 this is the Switch Transformer's router (Fedus et al. 2021, section 2.1): the gate is the probability
    itself, not normalised, or it would be 1 and only losses would train wg. Switch also has
    jitter=0.01, and 0.01 as the weight of its loss, which is the translation model's aux_loss_weight.
    For ST-MoE (Zoph et al. 2022) on top of it, z_loss_weight=0.1 makes 0.001 of that; k = 2 and k = 8
    are common too. The layer's capacity_factor has to grow with k: it is slots a token.

    Softmax 'before' the choice gives gates that are probabilities among all experts; 'after' it, among
    the chosen ones. The second is the first normalised, in value and gradient.

    DeepSeek-V3's router (2024, section 2.1.2) is gate='sigmoid' with k=8, gate_scale=2.5, 4 of 8 expert_groups and a
    balance_bias: experts are chosen by score plus bias, and weighted by their scores over the sum of the chosen ones.
    Its loss by sequence is the load-balance loss where the layer makes a group of each row (num_groups=0).

    `balance_bias` balances without a loss (Wang et al. 2024, algorithm 1): each expert has a bias that
    is added to its probability for the choice only. No gradient changes it; after each
    step it goes up by `balance_bias` where the expert had fewer choices than the mean over experts,
    down where it had more. Experts are then best by biased probability. load_balance_weight=0 goes
    with it. With `balance_quantiles` the bias is computed from the step's tokens instead.
    """

    PackWeights = LearnedRouter.PackWeights

    REPLAYS: ClassVar[bool] = True

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("k", 2, "Experts of a token, 1 to E.", checks.SIZE)
        p.Define(
            "gate_scale",
            1.0,
            "A factor of the gates, after they are normalised (DeepSeek-V3: 2.5).",
            checks.POSITIVE,
        )
        p.Define(
            "softmax_order",
            "before",
            "The gates' softmax: 'before' the choice, over all experts, or 'after', over the chosen.",
            checks.one_of(_ORDERS),
        )
        p.Define(
            "normalize_gates",
            None,
            "'never'; 'before_drops': a token's gates sum to 1 before capacity; 'after_drops': the "
            "gates that are kept sum to 1. None: 'never' for k = 1, else 'before_drops'.",
            checks.or_none(checks.one_of(_NORMALIZATIONS)),
        )
        p.OnlyWith("softmax_order", lambda p: "" if p.gate == "softmax" else f"gate={p.gate}")
        p.Define(
            "jitter",
            0.0,
            "In training, inputs are multiplied by uniform noise from 1 - jitter to 1 + jitter.",
            checks.SHARE,
        )
        p.Define(
            "load_balance_weight",
            1.0,
            "Of E sum_e f_e P_e, 1 at balance; see moe/routers/losses_and_metrics.py.",
            checks.NOT_NEGATIVE,
        )
        p.Define(
            "z_loss_weight",
            0.0,
            "Of the mean squared log of the softmax's denominator.",
            checks.NOT_NEGATIVE,
        )
        p.Define(
            "balance_bias",
            0.0,
            "How far an expert's bias moves in a step (the paper: 0.001); 0: there is no bias.",
            checks.NOT_NEGATIVE,
        )
        p.Define(
            "balance_quantiles",
            False,
            "Whether the bias becomes what would have balanced the step's tokens, in place of a balance_bias that it "
            "moves by, and of a loss (moe/routers/quantiles.py).",
        )
        p.Define("logit_bias", False, "Whether the gating network has a bias (gpt-oss).")
        p.Define(
            "expert_groups",
            1,
            "Experts are in so many groups of consecutive ones; a token's are in those of the largest group_score.",
            checks.SIZE,
        )
        p.Define("groups_per_token", 1, "In how many groups a token's experts are.", checks.SIZE)
        p.Define(
            "group_score",
            "two_best",
            "A group's score: the sum of its 'two_best' experts' (DeepSeek-V3), or its 'best' one's (DeepSeek-V2).",
            checks.one_of(tuple(_GROUP_SCORES)),
        )
        p.OnlyWith(
            "groups_per_token group_score",
            lambda p: "expert_groups=1" if p.expert_groups == 1 else "",
        )
        return p

    def __init__(self, params: InstantiableParams):
        params = params.Copy()
        replicated = {"balance_bias.E": None, "logit_bias.E": None}
        params.weight_split = {**replicated, **(params.weight_split or {})}
        if params.normalize_gates is None:
            params.normalize_gates = "never" if params.k == 1 else "before_drops"
        super().__init__(params)
        p = self.p
        self._Check()
        if p.logit_bias:
            self.CreateVariable("logit_bias", WeightParams.Vector((p.num_experts,), "E", 0.0))
        if self._biased:
            self.CreateVariable(
                "balance_bias",
                WeightParams(
                    (p.num_experts,), "E", WeightInit.Constant(0.0), "float32", trainable=False
                ),
            )

    @property
    def _biased(self) -> bool:
        """Whether experts are chosen by score plus bias."""
        return bool(self.p.balance_bias) or self.p.balance_quantiles

    def _Check(self) -> None:
        p = self.p
        if p.balance_quantiles:
            self._CheckQuantiles()
        if p.expert_groups > 1:
            self._CheckGroups()
        if p.k == 1 and (p.softmax_order, p.normalize_gates) != ("before", "never"):
            raise ValueError(
                f"{self.path}: with k=1, softmax_order={p.softmax_order!r} and normalize_gates="
                f"{p.normalize_gates!r} make every gate 1, which trains nothing; use 'before' and 'never'"
            )

    def _CheckQuantiles(self) -> None:
        """Raises ParamError for what balances beside quantiles, or leaves them nothing to balance."""
        p = self.p
        goes_with = {"balance_bias": 0.0, "load_balance_weight": 0.0, "expert_groups": 1}
        for name, value in goes_with.items():
            if p.Get(name) != value:
                why = f"balance_quantiles=True, which needs no other balance and no groups: set {value:g}"
                raise ParamError(f"{self.path}.{name}", str(p.Get(name)), why)
        if p.k == p.num_experts:
            why = f"k={p.k} is all experts, which leaves nothing to balance"
            raise ParamError(f"{self.path}.balance_quantiles", "True", why)

    def _CheckGroups(self) -> None:
        """Raises ValueError, naming the parameter, where groups are unequal or a token's experts do not fit."""
        p = self.p
        if p.num_experts % p.expert_groups:
            raise ValueError(
                f"{self.path}.expert_groups={p.expert_groups}: {p.num_experts} experts do not fall into that many "
                "equal groups"
            )
        size = p.num_experts // p.expert_groups
        least = -(-p.k // size)
        if not least <= p.groups_per_token <= p.expert_groups:
            raise ValueError(
                f"{self.path}.groups_per_token={p.groups_per_token}: {p.k} experts of a token, in groups of {size}, "
                f"take from {least} to {p.expert_groups} groups"
            )

    def ChooseByInputs(
        self,
        theta: NestedMap,
        x_GSM: tf.Tensor,
        real_GS: tf.Tensor,
        capacity: int | None,
        seed: tf.Tensor | None,
        recorded_GSk: tf.Tensor | None = None,
    ) -> Choice:
        """See `LearnedRouter`; with `balance_bias` theta holds balance_bias [E] too."""
        p = self.p
        if p.jitter and seed is not None:
            noise_GSM = randomness.uniform(self.FoldSeed(seed, "jitter"), x_GSM.shape)
            factor_GSM = self.Shard(1.0 + p.jitter * (2.0 * noise_GSM - 1.0), "GSM")
            x_GSM = tf.cast(x_GSM, tf.float32) * factor_GSM
        bias_E = theta.balance_bias if self._biased else None
        logits_GSE = self.Logits(theta, x_GSM)
        return self.ChooseByLogits(logits_GSE, real_GS, capacity, seed, bias_E, recorded_GSk)

    def Logits(self, theta: NestedMap, x_GSM: tf.Tensor) -> tf.Tensor:
        """See `LearnedRouter`; with `logit_bias` theta holds logit_bias [E] too."""
        logits_GSE = super().Logits(theta, x_GSM)
        if not self.p.logit_bias:
            return logits_GSE
        return logits_GSE + tf.cast(theta.logit_bias, tf.float32)

    def ChooseByLogits(
        self,
        logits_GSE: tf.Tensor,
        real_GS: tf.Tensor,
        capacity: int | None = None,
        seed: tf.Tensor | None = None,
        bias_E: tf.Tensor | None = None,
        recorded_GSk: tf.Tensor | None = None,
    ) -> Choice:
        """See `LearnedRouter`. `bias_E`, float32, is added to the probabilities for the choice; in
        training its next value is among the updates. `recorded_GSk`, int32, are chosen instead (`slots.replayed`)."""
        p = self.p
        log_z_GS = functools.cache(lambda: log_partition(logits_GSE))
        scores_GSE, index_GSk, gate_GSk = self._Best(
            logits_GSE, bias_E, None if seed is None else log_z_GS, recorded_GSk
        )
        probabilities_GSE = self.gate.Probabilities(scores_GSE)
        wanted_GSk = tf.stack([real_GS] * p.k, -1)
        count_GE = functools.cache(lambda: count_choices(index_GSk, wanted_GSk, p.num_experts))

        def losses() -> list[AuxLoss]:
            balance = load_balance(probabilities_GSE, count_GE(), real_GS)
            z = z_loss(log_z_GS(), real_GS)
            return [
                AuxLoss("load_balance", balance, p.load_balance_weight, "groups"),
                AuxLoss("z", z, p.z_loss_weight, "tokens"),
            ]

        updates = NestedMap()
        if bias_E is not None and seed is not None:
            if p.balance_quantiles:
                split = dims_mapping("GSE", p.activation_split or {})
                next_E = balanced_bias(scores_GSE, index_GSk, real_GS, bias_E, split)
            else:
                next_E = self._NextBias(bias_E, count_GE())
            updates.Set(f"{self.path}.balance_bias", next_E)
        return Choice(
            index_GSk,
            normalize(gate_GSk) if p.normalize_gates == "before_drops" else gate_GSk,
            wanted_GSk,
            real_GS,
            probabilities_GSE,
            losses=losses,
            updates=updates,
            normalized_after_drops=p.normalize_gates == "after_drops",
            scale=p.gate_scale,
        )

    def _Best(
        self,
        logits_GSE: tf.Tensor,
        bias_E: tf.Tensor | None,
        log_z_GS: Callable[[], tf.Tensor] | None,
        recorded_GSk: tf.Tensor | None,
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Scores [G,S,E], and the experts with their gates, [G,S,k].

        Args:
            logits_GSE: from the gating network.
            bias_E: added to the scores for the choice; None for no bias.
            log_z_GS: gives log_partition(logits_GSE), in training; None in inference.
            recorded_GSk: the experts, where they are recorded ones.
        """
        p = self.p
        scores_GSE = self.gate.scores(logits_GSE, log_z_GS)
        if bias_E is None and p.expert_groups == 1:
            logits_GSk, index_GSk = top_k(logits_GSE, p.k)
        else:
            by_GSE = tf.stop_gradient(scores_GSE)
            if bias_E is not None:
                by_GSE += bias_E
            if p.expert_groups > 1:
                summed = _GROUP_SCORES[p.group_score]
                by_GSE = _in_best_groups(by_GSE, p.expert_groups, p.groups_per_token, summed)
            _, index_GSk = top_k(by_GSE, p.k)
            logits_GSk = pick(logits_GSE, index_GSk)
        if recorded_GSk is not None:
            index_GSk = replayed(recorded_GSk, index_GSk)
            logits_GSk = pick(logits_GSE, index_GSk)
        if p.softmax_order == "after":
            gate_GSk = tf.nn.softmax(logits_GSk)
        elif log_z_GS is None:
            gate_GSk = pick(scores_GSE, index_GSk)
        else:
            gate_GSk = self.gate.scores(logits_GSk, log_z_GS)
        return scores_GSE, index_GSk, gate_GSk

    def _NextBias(self, bias_E: tf.Tensor, count_GE: tf.Tensor) -> tf.Tensor:
        """The bias after this step, from how often each expert was chosen in the whole batch."""
        load_E = tf.reduce_sum(count_GE, 0)
        # All times E: 1/E times the sum would be rounded, and an expert exactly at the mean would get a step.
        missing_E = tf.reduce_sum(load_E) - self.p.num_experts * load_E
        return bias_E + self.p.balance_bias * tf.sign(missing_E)


def _in_best_groups(scores_GSE: tf.Tensor, num_groups: int, chosen: int, summed: int) -> tf.Tensor:
    """The scores of the experts in each token's best groups; -inf elsewhere.

    Args:
        scores_GSE: float32; no gradient flows.
        num_groups: Q, of consecutive experts.
        chosen: how many groups are best.
        summed: how many of a group's best scores are summed for its own.
    """
    groups, tokens, experts = shape_of(scores_GSE)
    size = experts // num_groups
    by_group = tf.reshape(scores_GSE, [groups, tokens, num_groups, size])
    best = tf.math.top_k(tf.stop_gradient(by_group), min(summed, size)).values
    _, index_GSk = top_k(tf.reduce_sum(best, -1), chosen)
    best_GSQ = tf.reduce_any(tf.one_hot(index_GSk, num_groups, True, False, dtype=tf.bool), 2)
    return tf.where(tf.repeat(best_GSQ, size, -1), scores_GSE, float("-inf"))
