"""Multi-head latent attention (DeepSeek-V2 2024, section 2.1): keys and values of all heads from one vector a token.

Letters: B batch, T query, S key, M model, N head, K key dimension, J beam hypothesis; of weights also R the rank of
queries or of keys and values.
"""

from collections.abc import Sequence

import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.base_layer import BaseLayer, WeightParams, scoped
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params as HyperParams
from lingvo_moe.core.initializers import WeightInit
from lingvo_moe.core.layers.attention import MultiHeadAttention, head_dim, positions_of
from lingvo_moe.core.layers.normalization import normalized
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.tensors import shape_of


class LatentAttention(MultiHeadAttention):
    """Keys and values are projections of an RMS-normalized latent vector of `rank` numbers; queries may be too.

    A head's queries and keys are `dim_per_head` numbers without positions, then `turned_dim` that take them; those of
    keys are the same for all heads. A cache holds the latent vector and the turned numbers alone, rank + turned_dim
    of each token: a step multiplies queries by the keys' projection, attends to latent vectors, and projects what it
    got to values (the absorbed form).

    Rotary positions turn numbers i and i + K/2 together. DeepSeek's weights have such pairs side by side: those of
    turned numbers must be reordered, first all even ones, then all odd ones.
    """

    PackWeights = BaseLayer.PackWeights

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params().Delete("num_kv_heads", "biases")
        p.Define("rank", 512, "Of keys and values (kv_lora_rank elsewhere).", checks.SIZE)
        p.Define(
            "query_rank",
            0,
            "Of queries (q_lora_rank); 0: they are projections of the input.",
            checks.COUNT,
        )
        p.Define(
            "turned_dim",
            64,
            "How many numbers of a head take positions (qk_rope_head_dim).",
            checks.SIZE,
        )
        p.Define("value_dim", 0, "Of a value (v_head_dim); 0: dim_per_head.", checks.COUNT)
        p.Define(
            "norm_epsilon", 1e-6, "Added to the mean square of latent vectors.", checks.POSITIVE
        )
        return p

    def _CreateWeights(self) -> tuple[int, int]:
        self._kv = "N"
        m, n, k, value = _dims(self.p)
        p, fan_in = self.p, WeightInit.FanIn
        size = k + p.turned_dim  # of a head's queries, and of its keys
        if p.query_rank:
            self.CreateVariable("q_down", WeightParams((m, p.query_rank), "MR", fan_in(m)))
            self.CreateVariable("q_norm", WeightParams.Vector((p.query_rank,), "R", 1.0))
        source, letter = (p.query_rank, "R") if p.query_rank else (m, "M")
        init = self._QueryInit(source, size)
        self.CreateVariable("q", WeightParams((source, n, size), f"{letter}NK", init))
        self.CreateVariable("down", WeightParams((m, p.rank + p.turned_dim), "MR", fan_in(m)))
        self.CreateVariable("norm", WeightParams.Vector((p.rank,), "R", 1.0))
        self.CreateVariable("k", WeightParams((p.rank, n, k), "RNK", fan_in(p.rank)))
        self.CreateVariable("v", WeightParams((p.rank, n, value), "RNK", fan_in(p.rank)))
        self.CreateVariable("o", WeightParams((n, value, m), "NKM", fan_in(n * value)))
        return size, p.turned_dim

    def _Queries(
        self, theta: NestedMap, x: tf.Tensor, positions: tf.Tensor | None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Scaled queries [B,T,N,K], and their turned numbers in the layout of the kernels in use."""
        if self.p.query_rank:
            x = self._Normalized(
                kernels.current().product(x, self.Cast(theta.q_down)), theta.q_norm
            )
        q = tf.einsum("BTR,RNK->BTNK", x, self.Cast(theta.q))
        q = self.Shard(q * tf.constant(self._scale, q.dtype), "BTNK")
        plain, turned = tf.split(q, [-1, self.p.turned_dim], axis=-1)
        return plain, self._Positioned(kernels.current().in_layout(turned), positions)

    def _Latent(
        self, theta: NestedMap, x: tf.Tensor, positions: tf.Tensor | None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Latent vectors [B,S,R], and the turned numbers of keys in the layout of the kernels in use, of one head."""
        latent = kernels.current().product(x, self.Cast(theta.down))
        latent, turned = tf.split(latent, [self.p.rank, self.p.turned_dim], axis=-1)
        turned = kernels.current().in_layout(turned[:, :, tf.newaxis])
        return self._Normalized(latent, theta.norm), self._Positioned(turned, positions)

    def _Normalized(self, x: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
        return normalized(x, scale, None, self.p.norm_epsilon, self.fprop_dtype)

    def _Heads(
        self,
        theta: NestedMap,
        query: tf.Tensor | None,
        source: tf.Tensor | None,
        positions: tf.Tensor | None,
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """See MultiHeadAttention; here values may have another size than queries and keys."""
        layout = kernels.current().in_layout
        q = k = v = None
        if query is not None:
            plain, turned = self._Queries(theta, query, positions)
            q = tf.concat([layout(plain), turned], -1)
        if source is not None:
            latent, turned = self._Latent(theta, source, positions)
            k, v = (
                layout(self.Shard(tf.einsum("BSR,RNK->BSNK", latent, self.Cast(w)), "BSNK"))
                for w in (theta.k, theta.v)
            )
            turned = tf.broadcast_to(turned, [*shape_of(k)[:-1], self.p.turned_dim])
            k = tf.concat([k, turned], -1)
        return q, k, v

    @scoped
    def InitCache(self, batch: int | tf.Tensor, length: int, num_hyps: int = 1) -> NestedMap:
        """Empty latent vectors and turned numbers: NestedMap(latent) of CacheLetters, with one head of both."""
        size = self.p.rank + self.p.turned_dim
        shape = kernels.CacheShape(batch, length, num_hyps, 1, size, self.fprop_dtype)
        return NestedMap(latent=kernels.current().empty_cache(shape))

    def CacheLetters(self) -> NestedMap:
        return NestedMap(latent=kernels.current().CACHE.replace("N", "A"))

    @scoped
    def ExtendStep(
        self, theta: NestedMap, x: tf.Tensor, cache: NestedMap, time: tf.Tensor, mask: tf.Tensor
    ) -> tuple[tf.Tensor, NestedMap]:
        ops, query_at = kernels.current(), positions_of(time, mask)
        latent, turned = self._Latent(theta, x, query_at)
        new = tf.concat([ops.in_layout(latent[:, :, tf.newaxis]), turned], -1)
        latents = ops.write_cache(cache.latent, new, time)
        plain, turned = self._Queries(theta, x, query_at)
        absorbed = tf.einsum("BTNK,RNK->BTNR", plain, self.Cast(theta.k))
        q = tf.concat([ops.in_layout(absorbed), turned], -1)
        seen = self._SeenInCache(theta, mask, time, query_at)
        context = ops.attend_cache(q, latents, latents, seen)[..., : self.p.rank]
        context = tf.einsum("BTNR,RNK->BTNK", context, self.Cast(theta.v))
        return self._Back(theta, context), NestedMap(latent=latents)

    @classmethod
    def FPropMeta(cls, params: HyperParams, *input_shapes: Sequence[int]) -> NestedMap:
        """Counts, from the shapes of query and source: all projections, then q k^T and probs v."""
        (batch, time, _), (_, length, _) = input_shapes[0], input_shapes[-1]
        p, (m, n, k, value) = params, _dims(params)
        size = k + p.turned_dim
        of_query = p.query_rank * (m + n * size) if p.query_rank else m * n * size
        of_source = m * (p.rank + p.turned_dim) + p.rank * n * (k + value)
        projections = time * (of_query + n * value * m) + length * of_source
        products = n * time * length * (size + value)
        return NestedMap(flops=2 * batch * (projections + products), out_shapes=((batch, time, m),))


def _dims(p: HyperParams) -> tuple[int, int, int, int]:
    """M, N, K without what takes positions, and the size of a value."""
    k = head_dim(p)
    return p.model_dim, p.num_heads, k, p.value_dim or k
