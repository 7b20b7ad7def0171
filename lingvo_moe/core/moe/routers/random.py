"""Random routing: the baseline for learned routers.

Zuo et al. 2022, Taming Sparsely Activated Transformer with Stochastic Experts, find it no worse than
gates for translation. It has no weights and ignores the tokens' vectors.

Letters: G group, S token in group, k choice rank, E expert, M model.
"""

import tensorflow as tf

from lingvo_moe.core import randomness
from lingvo_moe.core.config.hyperparams import Params as HyperParams
from lingvo_moe.core.moe.routers.slots import top_k
from lingvo_moe.core.moe.routers.unlearned import UnlearnedRouter, spread
from lingvo_moe.core.nested_map import NestedMap


class RandomRouter(UnlearnedRouter):
    """Draws k different experts for each token in each step of training; every set is equally likely.

    Inference is not random: a token's number in its vocabulary decides, modulo E as in hash.py. So it
    needs no seed, the same text always gives the same result, a cached decoding step chooses as the full
    pass does, and load is even. In training all experts see all tokens equally often, so each is as good
    a choice as any other.
    """

    @classmethod
    def Needs(cls, params: HyperParams) -> tuple[str, ...]:
        """The token's number, for inference."""
        return ("ids",)

    def Rule(
        self, x_GSM: tf.Tensor, seed: tf.Tensor | None, context: NestedMap | None
    ) -> tf.Tensor:
        p = self.p
        if seed is None:
            assert context is not None
            return spread(context.ids, p.k, p.num_experts)
        shape = [*x_GSM.shape[:2], p.num_experts]
        return top_k(self.Shard(randomness.uniform(seed, shape), "GSE"), p.k)[1]
