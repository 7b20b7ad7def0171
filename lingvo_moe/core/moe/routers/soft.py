"""The dense mixture: every token sees every expert. The reference for all others.

Jacobs et al. 1991, Adaptive Mixtures of Local Experts; Shazeer et al. 2017, section 2.1 (softmax
gating). Every expert is computed, however small its weight.

Letters: G group, S token in group, k choice rank (k = E here), E expert.
"""

import tensorflow as tf

from lingvo_moe.core.moe.routers.base import Chosen, LearnedRouter, Routing, all_experts
from lingvo_moe.core.moe.routers.inputs import real_tokens
from lingvo_moe.core.nested_map import NestedMap


class SoftRouter(LearnedRouter):
    """Gates are the softmax over all experts; nothing is dropped, so there is no capacity and no loss.

    It costs E experts a token: the output of a k-choice router approximates this sum by its larger
    terms.
    """

    @classmethod
    def Slots(cls, group_size: int, capacity: int) -> int:
        """One for each token."""
        del capacity
        return group_size

    def Route(
        self,
        logits_GSE: tf.Tensor,
        paddings_GS: tf.Tensor,
        capacity: int | None,
        seed: tf.Tensor | None = None,
    ) -> Routing:
        """See `LearnedRouter`; the capacity is ignored."""
        real_GS = real_tokens(paddings_GS)
        gates_GSE = tf.nn.softmax(logits_GSE)
        expert_index = all_experts(logits_GSE)
        kept = _kept(gates_GSE, real_GS)
        # Token s has slot s of each expert.
        position = expert_index - expert_index
        position += tf.range(tf.shape(position)[1])[tf.newaxis, :, tf.newaxis]
        return self.Decided(
            expert_index,
            gates_GSE * kept,
            position,
            kept,
            kept,
            real_GS,
            None,
            gates_GSE,
            ranked=False,
        )

    def _ChooseByLogits(
        self, theta: NestedMap, logits_GSE: tf.Tensor, real_GS: tf.Tensor
    ) -> Chosen:
        """See `LearnedRouter`."""
        gates_GSE = tf.nn.softmax(logits_GSE)
        kept = _kept(gates_GSE, real_GS)
        return Chosen(all_experts(logits_GSE), gates_GSE * kept, kept)


def _kept(gates_GSE: tf.Tensor, real_GS: tf.Tensor) -> tf.Tensor:
    return real_GS[:, :, tf.newaxis] * tf.cast(gates_GSE >= 0, tf.float32)
