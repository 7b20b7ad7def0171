"""Expert choice: each expert takes the tokens of the group that like it best.

Zhou et al. 2022, Mixture-of-Experts with Expert Choice Routing (section 3).

Letters: G group, S token in group, k choice rank, E expert, C capacity slot.
"""

from typing import ClassVar

import tensorflow as tf

from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params as HyperParams
from lingvo_moe.core.moe.routers.base import LearnedRouter, all_experts, check_choices
from lingvo_moe.core.moe.routers.losses_and_metrics import Choice
from lingvo_moe.core.moe.routers.slots import top_k

_BITS = 30  # of a float32 from 0 to 1, whose bits order it as an integer


class ExpertChoiceRouter(LearnedRouter):
    """Each expert takes, in training, the C tokens of a group whose gate for it is largest.

    Gates are a softmax over E, or sigmoids, and are not normalised again; the earlier token wins a tie. Load is
    even by construction, so there is no loss; a token may find any number of experts, none too.
    C is the layer's: with its capacity_factor c, a token has c experts on average. The gradient
    flows through the chosen gates, none through the choice.

    Whether a token is taken depends on later tokens. A decoder does not know them, so it cannot use this
    router (`LooksAhead`). In inference no token may depend on the others of its batch either: each token
    then takes its own best `inference_k` experts, with the same gates. That differs from training; the
    average number of experts is the same if inference_k is c.
    """

    CHOOSES_BY_CAPACITY: ClassVar[bool] = True

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define(
            "inference_k",
            2,
            "Experts of a token in inference; best near the capacity factor.",
            checks.SIZE,
        )
        return p

    @classmethod
    def LooksAhead(cls, params: HyperParams) -> bool:
        """Whether it looks ahead: always."""
        return True

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        p = self.p
        check_choices(self.path, "inference_k", p.inference_k, p.num_experts)

    def ChooseByLogits(
        self,
        logits_GSE: tf.Tensor,
        real_GS: tf.Tensor,
        capacity: int | None = None,
        seed: tf.Tensor | None = None,
    ) -> Choice:
        """See `LearnedRouter`; without a capacity each token chooses its own best experts."""
        gates_GSE = self.gate.scores(logits_GSE, None)
        probabilities_GSE = self.gate.Probabilities(gates_GSE)
        if capacity is None:
            gate_GSk, index_GSk = top_k(gates_GSE, self.p.inference_k)
            wanted_GSk = tf.stack([real_GS] * self.p.inference_k, -1)
            return Choice(index_GSk, gate_GSk, wanted_GSk, real_GS, probabilities_GSE)
        taken = self.Shard(chosen_tokens(gates_GSE, real_GS, capacity), "GSE")
        position = tf.cast(tf.cumsum(taken, 1, exclusive=True), tf.int32)
        return Choice(
            all_experts(gates_GSE),
            gates_GSE,
            taken,
            real_GS,
            probabilities_GSE,
            position=position,
            ranked=False,
        )


def chosen_tokens(gates_GSE: tf.Tensor, real_GS: tf.Tensor, capacity: int) -> tf.Tensor:
    """float32 [G,S,E]: 1 where a token is among the `capacity` real ones with the largest gate for
    the expert, the earlier of equal ones; no gradient.

    Args:
        gates_GSE: float32 from 0 to 1.
        real_GS: 1 for tokens, 0 for padding.
        capacity: C; all real tokens are chosen where there are no more than that.
    """
    bits_GSE = tf.bitcast(tf.stop_gradient(gates_GSE), tf.int32)
    bits_GSE = tf.where(real_GS[:, :, tf.newaxis] > 0, bits_GSE, -1)
    least_GE = _kth_largest_bits(bits_GSE, capacity)[:, tf.newaxis, :]
    above = tf.cast(bits_GSE > least_GE, tf.float32)
    equal = tf.cast(tf.equal(bits_GSE, least_GE), tf.float32)
    free_GE = float(capacity) - tf.reduce_sum(above, 1, keepdims=True)
    earlier = tf.cumsum(equal, 1, exclusive=True)
    return above + equal * tf.cast(earlier < free_GE, tf.float32)


def _kth_largest_bits(bits_GSE: tf.Tensor, k: int) -> tf.Tensor:
    """int32 [G,E]: the k-th largest of the S numbers of each expert, found bit by bit; 0 where fewer than k count.

    Instead of a sort, a few sums over S, which XLA shards along G like any other operation: much less work on a CPU,
    and no gather where S is not sharded.

    Args:
        bits_GSE: int32 below 2^_BITS; negative ones do not count.
        k: at least 1.
    """

    def step(bit: tf.Tensor, found_GE: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        larger_GE = found_GE + tf.bitwise.left_shift(1, bit)
        at_least = tf.cast(bits_GSE >= larger_GE[:, tf.newaxis, :], tf.float32)
        return bit - 1, tf.where(tf.reduce_sum(at_least, 1) >= k, larger_GE, found_GE)

    # Zeros, sharded as the numbers are.
    start_GE = tf.reduce_min(tf.bitwise.bitwise_and(bits_GSE, 0), 1)
    _, found_GE = tf.while_loop(lambda bit, _: bit >= 0, step, (_BITS - 1, start_GE))
    return found_GE
