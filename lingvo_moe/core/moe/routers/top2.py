"""Top-2 gating: the paper's Algorithm 1, vectorised, and Lingvo's reading of it.

Letters: G group, S token in group, k choice rank (2 here), E expert, C capacity slot.
"""

from typing import ClassVar

import tensorflow as tf

from lingvo_moe.core import randomness
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams, ParamError, Params as HyperParams
from lingvo_moe.core.moe.routers.base import LearnedRouter
from lingvo_moe.core.moe.routers.losses_and_metrics import AuxLoss, Choice, load_balance
from lingvo_moe.core.moe.routers.slots import count_choices, normalize, pick, replayed
from lingvo_moe.core.nested_map import NestedMap

_CHOICES = {
    "reading": ("paper", "lingvo"),
    "second_expert_policy": ("random", "sampling", "all"),
    "normalize_gates": ("before_drops", "after_drops"),
}


class Top2Router(LearnedRouter):
    """Each token goes to its best two experts while they have free slots; the second is sometimes skipped.

    All first choices of a group get slots before any second choice, each in the order of its tokens.
    A second choice is sent with probability min(1, g2 / threshold), g2 its normalised gate; with the
    threshold 0.5 that is the paper's "2 g2 > rnd".

    `reading` chooses between two accounts of the same algorithm:

    * 'paper' (default). A second choice that chance left out still counts as a slot taken: Algorithm 1
      adds to c_e2 in any case. The auxiliary loss is 1/E sum_e (c_e/S) m_e.
    * 'lingvo'. A second choice left out takes no slot, so later tokens may have it. The auxiliary
      loss is E^2 times the paper's, 1 at perfect balance.

    Lingvo's code differs in three more places:

    * Its second positions start after the *kept* first choices, Algorithm 1's after all of them. Once
      an expert overflows both lie beyond C, so the outcome is the same, and no option is needed.
    * It normalises the two gates before drops (as Algorithm 1 does) or, with its
      `legacy_mtf_behavior=False`, after them, and then samples by the raw gate: `normalize_gates`.
    * Its default policy sends every second choice: `second_expert_policy='all'`. A third one, 'sampling', draws
      the second expert by the gates of all but the first, and always sends it; its gate is that expert's.

    Here alone: padding is left out of the loss's means in both readings, and the second choice always
    differs from the first, even where the softmax underflows to a single one.
    """

    PackWeights = LearnedRouter.PackWeights

    REPLAYS: ClassVar[bool] = True

    @classmethod
    def Choices(cls, params: HyperParams) -> int:
        return 2

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define(
            "reading",
            "paper",
            "'paper' or 'lingvo': see the class.",
            checks.one_of(_CHOICES["reading"]),
        )
        p.Define(
            "second_expert_policy",
            "random",
            "'random' sends the second choice with a probability, 'sampling' draws it by the gates (both in "
            "training only), 'all' always sends the second best.",
            checks.one_of(_CHOICES["second_expert_policy"]),
        )
        p.Define(
            "second_expert_threshold",
            0.5,
            "With 'random': the gate from which a second choice is always sent.",
            checks.POSITIVE,
        )
        p.Define(
            "normalize_gates",
            "before_drops",
            "'before_drops': g1 and g2 sum to 1 before capacity and chance; 'after_drops': the "
            "gates that are kept sum to 1.",
            checks.one_of(_CHOICES["normalize_gates"]),
        )
        p.Define(
            "prioritize_by_gate",
            False,
            "Tokens get slots in the order of their largest gates, not in that of the group (batch-prioritized routing "
            "of fairseq).",
        )
        p.Define(
            "aux_loss_scale",
            None,
            "Factor on 1/E sum_e (c_e/S) m_e; None: 1 in the paper's reading, E^2 in Lingvo's.",
            checks.or_none(checks.NOT_NEGATIVE),
        )
        return p

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        p = self.p
        if p.num_experts < 2:
            why = "top-2 needs two experts or more"
            raise ParamError(f"{self.path}.num_experts", str(p.num_experts), why)

    def ChooseByInputs(
        self,
        theta: NestedMap,
        x_GSM: tf.Tensor,
        real_GS: tf.Tensor,
        capacity: int | None,
        seed: tf.Tensor | None,
        recorded_GSk: tf.Tensor | None = None,
    ) -> Choice:
        """See `LearnedRouter`."""
        logits_GSE = self.Logits(theta, x_GSM)
        return self.ChooseByLogits(logits_GSE, real_GS, capacity, seed, recorded_GSk)

    def ChooseByLogits(
        self,
        logits_GSE: tf.Tensor,
        real_GS: tf.Tensor,
        capacity: int | None = None,
        seed: tf.Tensor | None = None,
        recorded_GSk: tf.Tensor | None = None,
    ) -> Choice:
        """Algorithm 1. See `LearnedRouter`; `recorded_GSk`, int32, are chosen instead (`slots.replayed`)."""
        p = self.p
        gates_GSE = self.gate.scores(logits_GSE, None)
        probabilities_GSE = self.gate.Probabilities(gates_GSE)
        index_GSk = _best_two(gates_GSE, self._Drawn(logits_GSE, seed))
        if recorded_GSk is not None:
            index_GSk = replayed(recorded_GSk, index_GSk)
        gate_GSk = pick(gates_GSE, index_GSk)
        priority_GS = tf.stop_gradient(gate_GSk[:, :, 0]) if p.prioritize_by_gate else None
        if p.normalize_gates == "before_drops":
            gate_GSk = normalize(gate_GSk)
        wanted_GSk = tf.stack([real_GS, real_GS * self._Sampled(gate_GSk[:, :, 1], seed)], -1)

        def losses() -> list[AuxLoss]:
            first_GE = count_choices(index_GSk[:, :, :1], real_GS[:, :, tf.newaxis], p.num_experts)
            # As for other routers 1 at balance.
            loss = load_balance(probabilities_GSE, first_GE, real_GS)
            return [AuxLoss("load_balance", loss, self._AuxLossScale(), "groups")]

        return Choice(
            index_GSk,
            gate_GSk,
            wanted_GSk,
            real_GS,
            probabilities_GSE,
            # The choices that count as earlier ones for a later second choice: the readings differ here.
            counted=tf.stack([real_GS] * 2, -1) if p.reading == "paper" else wanted_GSk,
            priority=priority_GS,
            losses=losses,
            normalized_after_drops=p.normalize_gates == "after_drops",
        )

    def _Drawn(self, logits_GSE: tf.Tensor, seed: tf.Tensor | None) -> tf.Tensor | None:
        """[G,S,E], whose largest entry other than the first choice is a draw by the gates (Gumbel's trick); None
        where nothing is drawn."""
        if seed is None or self.p.second_expert_policy != "sampling":
            return None
        u_GSE = randomness.uniform(self.FoldSeed(seed, "second"), logits_GSE.shape)
        u_GSE = tf.maximum(self.Shard(u_GSE, "GSE"), 2.0**-25)
        return tf.stop_gradient(self.gate.log_scores(logits_GSE)) - tf.math.log(-tf.math.log(u_GSE))

    def _Sampled(self, gate_2: tf.Tensor, seed: tf.Tensor | None) -> tf.Tensor:
        """[G,S], 1 where the second choice is to be sent if a slot is free; a scalar 1 without chance."""
        if seed is None or self.p.second_expert_policy != "random":
            return tf.constant(1.0)
        rnd = self.Shard(randomness.uniform(seed, gate_2.shape), "GS")
        return tf.cast(gate_2 * (1.0 / self.p.second_expert_threshold) > rnd, tf.float32)

    def _AuxLossScale(self) -> float:
        """The factor on Lingvo's loss, which is 1 at balance; the paper's loss is 1 / E^2 of that."""
        p = self.p
        papers = float(p.num_experts**2)
        if p.aux_loss_scale is not None:
            return p.aux_loss_scale / papers
        return 1.0 / papers if p.reading == "paper" else 1.0


def _best_two(gates_GSE: tf.Tensor, drawn_GSE: tf.Tensor | None = None) -> tf.Tensor:
    """int32 [G,S,2]: the largest gate and the second largest, or the largest other of `drawn_GSE`; the lower
    index wins a tie."""
    # Two arg-maxes: the TPU compiler turns a top-k into a sort of all E.
    first_GS = tf.argmax(gates_GSE, -1, output_type=tf.int32)
    is_first_GSE = tf.equal(first_GS[:, :, tf.newaxis], tf.range(gates_GSE.shape[-1]))
    others_GSE = tf.where(is_first_GSE, -1.0, gates_GSE)
    if drawn_GSE is not None:
        others_GSE = tf.where(is_first_GSE, float("-inf"), drawn_GSE)
    return tf.stack([first_GS, tf.argmax(others_GSE, -1, output_type=tf.int32)], -1)
