"""Random routing: the baseline that a learned router has to beat.

Zuo et al. 2022, Taming Sparsely Activated Transformer with Stochastic Experts, find it no worse than
gates for translation. It learns nothing and looks at nothing.

Letters: G group, S token in group, k choice rank, E expert, M model.
"""

import tensorflow as tf

from lingvo_moe.core import randomness
from lingvo_moe.core.hyperparams import Params as HyperParams
from lingvo_moe.core.moe.routers.unlearned import UnlearnedRouter, spread
from lingvo_moe.core.moe.slots import top_k
from lingvo_moe.core.nested_map import NestedMap


class RandomRouter(UnlearnedRouter):
    """In training k different experts for each token, drawn anew each step, every set as likely.

    Inference leaves nothing to chance: a token's number in its vocabulary decides, modulo E as in
    hash.py. So it needs no seed, the same text always gives the same result, a cached decoding step
    chooses as the whole pass does, and load is even. All experts have seen all tokens alike, so none
    is a worse choice than another.
    """

    @classmethod
    def Needs(cls, params: HyperParams) -> tuple[str, ...]:
        """Which token it is, for inference."""
        return ("ids",)

    def Choose(
        self, x_GSM: tf.Tensor, seed: tf.Tensor | None, context: NestedMap | None
    ) -> tf.Tensor:
        """See `UnlearnedRouter`."""
        p = self.p
        if seed is None:
            assert context is not None
            return spread(context.ids, p.k, p.num_experts)
        shape = [*x_GSM.shape[:2], p.num_experts]
        return top_k(self.Shard(randomness.uniform(seed, shape), "GSE"), p.k)[1]
