"""Top-2 gating: the paper's Algorithm 1, vectorised, and Lingvo's reading of it.

Letters: G group, S token in group, k choice rank (2 here), E expert, C capacity slot.
"""

import tensorflow as tf

from lingvo_moe.core import randomness
from lingvo_moe.core.hyperparams import InstantiableParams
from lingvo_moe.core.hyperparams import Params as HyperParams
from lingvo_moe.core.moe.losses import load_balance
from lingvo_moe.core.moe.metrics import add_losses, routing_metrics
from lingvo_moe.core.moe.routers.base import LearnedRouter, Routing
from lingvo_moe.core.suggest import did_you_mean

_CHOICES = {
    "reading": ("paper", "lingvo"),
    "second_expert_policy": ("random", "all"),
    "normalize_gates": ("before_drops", "after_drops"),
}


class Top2Router(LearnedRouter):
    """Each token goes to its best two experts while they have room; the second is sometimes skipped.

    All first choices of a group are seated before any second choice, each in the order of its tokens.
    A second choice is sent with probability min(1, g2 / threshold), g2 its normalised gate; with the
    threshold 0.5 that is the paper's "2 g2 > rnd".

    `reading` chooses between two accounts of the same algorithm:

    * 'paper' (default). A second choice that chance left out still counts as a seat taken: Algorithm 1
      adds to c_e2 whatever it decided. The auxiliary loss is 1/E sum_e (c_e/S) m_e.
    * 'lingvo'. A second choice left out takes no seat, so later tokens may have it. The auxiliary
      loss is E^2 times the paper's, 1 at perfect balance.

    Three more places where Lingvo's code differs, and what this class does:

    * Its second positions start after the *kept* first choices, Algorithm 1's after all of them. Once
      an expert overflows both lie beyond C, so the outcome is the same, and no option is needed.
    * It normalises the two gates before drops (as Algorithm 1 does) or, with its
      `legacy_mtf_behavior=False`, after them, and then samples by the raw gate: `normalize_gates`.
    * Its default policy sends every second choice: `second_expert_policy='all'`.

    Here alone: padding is left out of the loss's means in both readings, and the second choice always
    differs from the first, even where the softmax underflows to a single one.
    """

    @classmethod
    def Choices(cls, params: HyperParams) -> int:
        return 2

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("reading", "paper", "'paper' or 'lingvo': see the class.")
        p.Define(
            "second_expert_policy",
            "random",
            "'random' sends the second choice by chance (training only), 'all' always.",
        )
        p.Define(
            "second_expert_threshold",
            0.5,
            "With 'random': the gate from which a second choice is always sent.",
        )
        p.Define(
            "normalize_gates",
            "before_drops",
            "'before_drops': g1 and g2 sum to 1 before capacity and chance; 'after_drops': what is "
            "kept sums to 1.",
        )
        p.Define(
            "aux_loss_scale",
            None,
            "Factor on 1/E sum_e (c_e/S) m_e; None: 1 in the paper's reading, E^2 in Lingvo's.",
        )
        return p

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        p = self.p
        for name, known in _CHOICES.items():
            value = getattr(p, name)
            if value not in known:
                raise ValueError(
                    f"{self.path}.{name}={value!r}: known are {', '.join(known)}"
                    f"{did_you_mean(str(value), known)}"
                )
        if p.num_experts < 2:
            raise ValueError(f"{self.path}: top-2 needs two experts or more, got {p.num_experts}")
        if not p.second_expert_threshold > 0:
            raise ValueError(
                f"{self.path}.second_expert_threshold must be positive, got "
                f"{p.second_expert_threshold}; second_expert_policy='all' always sends the second"
            )

    def Route(
        self,
        logits_GSE: tf.Tensor,
        paddings_GS: tf.Tensor,
        capacity: int | None,
        seed: tf.Tensor | None = None,
    ) -> Routing:
        """Algorithm 1. See `Router.FProp` for the arguments."""
        p = self.p
        real_GS = 1.0 - tf.cast(paddings_GS, tf.float32)
        gates_GSE = tf.nn.softmax(logits_GSE)
        index_1, index_2 = _top_2(gates_GSE)
        first_GSE = tf.one_hot(index_1, p.num_experts)
        second_GSE = tf.one_hot(index_2, p.num_experts)
        gate_1 = tf.reduce_sum(gates_GSE * first_GSE, -1)
        gate_2 = tf.reduce_sum(gates_GSE * second_GSE, -1)
        if p.normalize_gates == "before_drops":
            gate_1, gate_2 = _normalize(gate_1, gate_2)

        wanted_1 = real_GS
        wanted_2 = real_GS * self._Sampled(gate_2, seed)
        first_GSE *= real_GS[:, :, tf.newaxis]
        # Who counts as seated before a later second choice: this is where the readings part.
        seat_2 = real_GS if p.reading == "paper" else wanted_2
        position_1 = _position(first_GSE, first_GSE)
        position_2 = _position(second_GSE * seat_2[:, :, tf.newaxis], second_GSE)
        seated_GE = tf.reduce_sum(first_GSE, 1)
        position_2 += tf.reduce_sum(second_GSE * seated_GE[:, tf.newaxis, :], -1)

        kept_1, kept_2 = wanted_1, wanted_2
        if capacity is not None:
            kept_1 *= tf.cast(position_1 < capacity, tf.float32)
            kept_2 *= tf.cast(position_2 < capacity, tf.float32)
        gate_1, gate_2 = gate_1 * kept_1, gate_2 * kept_2
        if p.normalize_gates == "after_drops":
            gate_1, gate_2 = _normalize(gate_1, gate_2)

        expert_index = tf.stack([index_1, index_2], -1)
        gate = tf.stack([gate_1, gate_2], -1)
        kept = tf.stack([kept_1, kept_2], -1)
        wanted = tf.stack([wanted_1, wanted_2], -1)
        loss = load_balance(gates_GSE, first_GSE, real_GS)
        aux_loss = loss * self._AuxLossScale()
        metrics = routing_metrics(
            expert_index, gate, wanted, kept, real_GS, p.num_experts, capacity, gates_GSE
        )
        # As for other routers 1 at balance, whatever the reading.
        add_losses(metrics, aux_loss, {"load_balance": loss * float(p.num_experts**2)})
        return Routing(
            expert_index=expert_index,
            gate=gate,
            position=tf.cast(tf.stack([position_1, position_2], -1), tf.int32),
            kept=kept,
            num_experts=p.num_experts,
            capacity=capacity,
            aux_loss=aux_loss,
            metrics=metrics,
        )

    def _Sampled(self, gate_2: tf.Tensor, seed: tf.Tensor | None) -> tf.Tensor:
        """[G,S], 1 where the second choice is to be sent, room allowing; a scalar 1 without chance."""
        if seed is None or self.p.second_expert_policy == "all":
            return tf.constant(1.0)
        rnd = self.Shard(randomness.uniform(seed, gate_2.shape), "GS")
        return tf.cast(gate_2 * (1.0 / self.p.second_expert_threshold) > rnd, tf.float32)

    def _AuxLossScale(self) -> float:
        p = self.p
        if p.aux_loss_scale is not None:
            return float(p.aux_loss_scale)
        return 1.0 if p.reading == "paper" else float(p.num_experts**2)


def _top_2(gates_GSE: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The indices [G,S] of the largest and the second largest gate; the lower index wins a tie."""
    # Two arg-maxes, which XLA partitions along G like any reduction; its sort-based top-k it may not.
    index_1 = tf.argmax(gates_GSE, -1, output_type=tf.int32)
    chosen = tf.one_hot(index_1, gates_GSE.shape[-1], on_value=True, off_value=False, dtype=tf.bool)
    others = tf.where(chosen, tf.constant(-1.0), gates_GSE)
    return index_1, tf.argmax(others, -1, output_type=tf.int32)


def _normalize(gate_1: tf.Tensor, gate_2: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Both over their sum; zeros where both are zero."""
    total = gate_1 + gate_2
    scale = tf.math.reciprocal(tf.where(total > 0, total, tf.constant(1.0)))
    return gate_1 * scale, gate_2 * scale


def _position(seats_GSE: tf.Tensor, choice_GSE: tf.Tensor) -> tf.Tensor:
    """[G,S]: how many earlier tokens of the group took a seat at this token's choice."""
    earlier_GSE = tf.cumsum(seats_GSE, axis=1, exclusive=True)
    return tf.reduce_sum(earlier_GSE * choice_GSE, -1)
