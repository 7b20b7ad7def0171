"""Locality-sensitive hashing: tokens whose vectors have nearly one direction go to the same experts.

A fixed rule, not learnt: near vectors usually have the same hash, far ones seldom. Two
families of hash functions:

* random hyperplanes, a bit each for the side that a vector lies on (Charikar 2002, section 3);
* the cross-polytope: a random rotation, then the nearest of the 2d unit vectors +-e_i (Andoni et al.
  2015, section 3; section 5 for the second nearest and so on, which are the further choices here).

Letters: G group, S token in group, k choice rank, E expert, M model, P projection.
"""

import tensorflow as tf

from lingvo_moe.core import randomness
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params as HyperParams
from lingvo_moe.core.moe.routers.slots import top_k
from lingvo_moe.core.moe.routers.unlearned import UnlearnedRouter
from lingvo_moe.core.nested_map import NestedMap

HASHES = ("cross_polytope", "hyperplanes")


class LshRouter(UnlearnedRouter):
    """Experts by a fixed random hash of the token's vector. It has no weights.

    * 'cross_polytope' (default): E/2 random projections; expert i where projection i is the largest
      in size and positive, E/2 + i where it is negative. Further choices are the next largest. Any
      even E.
    * 'hyperplanes': log2 E projections; their signs are the bits of the expert's number, the first
      projection the lowest bit. Choice r flips the bit of the r-th smallest projection, the
      vector being nearly on the other side there. E a power of two, and k at most log2 E + 1.

    A hash has no gradient: vectors learn from the experts alone, so a layer in the middle of a network needs no
    gradient estimate. Each program computes the projections again
    from `hash_seed` and the layer's path, the same ones for the layers of a stack, in float32.
    """

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define(
            "hash",
            "cross_polytope",
            f"One of {', '.join(HASHES)}: see the class.",
            checks.one_of(HASHES),
        )
        p.Define("hash_seed", 0, "Seed of the random projections.", checks.SEED)
        return p

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        p = self.p
        E = p.num_experts
        if p.hash == "cross_polytope" and E % 2:
            raise ValueError(
                f"{self.path}: a cross-polytope has an even number of corners, not {E}"
            )
        if p.hash == "hyperplanes":
            if E < 2 or E & (E - 1):
                raise ValueError(
                    f"{self.path}: hyperplanes number 2^n experts, not {E}; use "
                    "hash='cross_polytope' for any even number"
                )
            if p.k > E.bit_length():
                raise ValueError(
                    f"{self.path}.k={p.k}: {E} experts have {E.bit_length() - 1} bits to flip, so k is "
                    f"at most {E.bit_length()}"
                )

    @classmethod
    def Flops(cls, params: HyperParams, tokens: int) -> int:
        return 2 * tokens * params.model_dim * _num_projections(params)

    def Projections(self) -> tf.Tensor:
        """float32 [M,P], the random directions: P = E/2, or log2 E."""
        p = self.p
        seed = randomness.fold_in(randomness.make_seed(p.hash_seed, 0), self.path)
        return randomness.normal(seed, [p.model_dim, _num_projections(p)])

    def Rule(
        self, x_GSM: tf.Tensor, seed: tf.Tensor | None, context: NestedMap | None
    ) -> tf.Tensor:
        p = self.p
        x_GSM = tf.cast(tf.stop_gradient(x_GSM), tf.float32)
        side_GSP = self.Shard(tf.einsum("GSM,MP->GSP", x_GSM, self.Projections()), "GSP")
        if p.hash == "cross_polytope":
            return top_k(tf.concat([side_GSP, -side_GSP], -1), p.k)[1]
        num = side_GSP.shape[-1]
        bit_P = tf.constant([2**i for i in range(num)], tf.int32)
        on_GSP = side_GSP > 0
        expert_GS = tf.reduce_sum(tf.where(on_GSP, bit_P, 0), -1)
        choices = [expert_GS]
        if p.k > 1:
            nearest = tf.unstack(top_k(-tf.abs(side_GSP), p.k - 1)[1], axis=-1)
            choices += [tf.bitwise.bitwise_xor(expert_GS, tf.gather(bit_P, n)) for n in nearest]
        return tf.stack(choices, -1)


def _num_projections(p: HyperParams) -> int:
    return p.num_experts.bit_length() - 1 if p.hash == "hyperplanes" else p.num_experts // 2
