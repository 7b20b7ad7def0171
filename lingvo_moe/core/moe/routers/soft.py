"""The dense mixture: every token sees every expert. The reference for all others.

Jacobs et al. 1991, Adaptive Mixtures of Local Experts; Shazeer et al. 2017, section 2.1 (softmax
gating). Every expert is computed, however small its weight.

Letters: G group, S token in group, k choice rank (k = E here), E expert.
"""

import tensorflow as tf

from lingvo_moe.core.moe.routers.base import LearnedRouter, all_experts
from lingvo_moe.core.moe.routers.losses_and_metrics import Choice


class SoftRouter(LearnedRouter):
    """Gates are the softmax over all experts, or sigmoids; nothing is dropped, so there is no capacity and no loss.

    It costs E experts a token: the output of a k-choice router approximates this sum by its larger
    terms.
    """

    @classmethod
    def Slots(cls, group_size: int, capacity: int) -> int:
        """One for each token."""
        return group_size

    def ChooseByLogits(
        self,
        logits_GSE: tf.Tensor,
        real_GS: tf.Tensor,
        capacity: int | None = None,
        seed: tf.Tensor | None = None,
    ) -> Choice:
        """See `LearnedRouter`; the capacity is ignored."""
        gates_GSE = self.gate.scores(logits_GSE, None)
        wanted = real_GS[:, :, tf.newaxis] * tf.cast(gates_GSE >= 0, tf.float32)
        return Choice(
            all_experts(logits_GSE),
            gates_GSE,
            wanted,
            real_GS,
            self.gate.Probabilities(gates_GSE),
            ranked=False,
            limited=False,
        )
