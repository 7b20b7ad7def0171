"""The base of routers without weights: they differ by their rule alone.

Letters: G group, S token in group, k choice rank, E expert, C capacity slot, M model.
"""

import tensorflow as tf

from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams
from lingvo_moe.core.moe.routers.base import Router, real_tokens
from lingvo_moe.core.moe.routers.losses_and_metrics import Choice
from lingvo_moe.core.nested_map import NestedMap


class UnlearnedRouter(Router):
    """Sends each token to k experts by a rule without weights. Subclasses implement `Rule`.

    A rule gives experts, not gates, so each kept choice weighs 1/k: with k = 1 the output is the expert's
    own (Roller et al. 2021). Gates are not renormalised after a drop. There is no loss and no gradient.
    """

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("k", 1, "Experts of a token.", checks.SIZE)
        return p

    def Choose(
        self,
        theta: NestedMap,
        x_GSM: tf.Tensor,
        paddings_GS: tf.Tensor,
        capacity: int | None = None,
        seed: tf.Tensor | None = None,
        context: NestedMap | None = None,
    ) -> Choice:
        """See `Router`; theta is empty."""
        k, real_GS = self.p.k, real_tokens(paddings_GS)
        wanted = tf.stack([real_GS] * k, -1)
        return Choice(self.Rule(x_GSM, seed, context), wanted * (1.0 / k), wanted, real_GS)

    def Rule(
        self, x_GSM: tf.Tensor, seed: tf.Tensor | None, context: NestedMap | None
    ) -> tf.Tensor:
        """int32 [G,S,k], the experts of each token, all different; arguments as in `Choose`."""
        raise NotImplementedError(f"{type(self).__name__}.Rule")


def spread(number: tf.Tensor, k: int, num_experts: int) -> tf.Tensor:
    """k different experts for each number, int32 [...,k], and the same number of numbers for each
    expert at each rank.

    The first is number mod E. The others follow at equal steps around the circle of experts, and
    the length of the step goes round with number div E: so numbers with the same first expert have
    different others, and any E successive numbers (from a multiple of E) fill each rank evenly.

    Args:
        number: int32, not negative.
        k: at most E.
    """
    longest = (num_experts - 1) // (k - 1) if k > 1 else 1
    step = 1 + number // num_experts % longest
    ranks = [(number % num_experts + rank * step) % num_experts for rank in range(k)]
    return tf.stack(ranks, -1)
