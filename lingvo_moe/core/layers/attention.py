"""Multi-head attention, in training and one step at a time.

Letters: B batch, T query, S key, M model, N head, A head of keys and values, K key dimension, J beam
hypothesis, L decoding step (in caches).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.base_layer import BaseLayer, WeightParams, scoped
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams, ParamError, Params as HyperParams
from lingvo_moe.core.initializers import WeightInit
from lingvo_moe.core.kernels.blockwise import BLOCK
from lingvo_moe.core.kernels.scores import Bias, Seen
from lingvo_moe.core.kernels.weights import Packing
from lingvo_moe.core.layers.positions import ScoreBias
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.tensors import Kept

AUTO = "auto"


class MultiHeadAttention(BaseLayer):
    """softmax(s q k^T) v over N heads, projected back to M; s is K^-0.5 unless `score_scale` is set.

    The softmax is computed in float32 whatever the activations' type. Heads may share keys and values
    (kernels/xla.py, `by_head`). The heads of keys and values then have a letter of their own, A, so that a split of N
    shards queries and output, and every device has all keys and values, unless the split map names A too.

    The same four steps make a training pass, a step of a search and attention to a memory: project the inputs to heads,
    give them positions, attend, and project back.
    """

    PART: ClassVar[str] = "attention"
    KEEPS: ClassVar = {
        **dict.fromkeys(("query", "key", "value"), Kept.PRODUCT),
        "attention": Kept.PRODUCT | Kept.OUTPUT,
    }
    # Whether self-attention needs the positions of tokens even where its `position` is None.
    NEEDS_POSITIONS: ClassVar[bool] = False
    # The parameters that, where they are set, make it go by the positions of tokens.
    BY_POSITIONS: ClassVar[tuple[str, ...]] = ("position",)

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("model_dim", 0, "M; 0 takes the parent's.", checks.SIZE)
        p.Define("num_heads", 1, "N.", checks.SIZE)
        p.Define(
            "num_kv_heads",
            0,
            "A, heads of keys and values, each for N / A heads; 1: multi-query attention; 0: N. "
            "(attention_num_memory_heads in Lingvo's GShard.)",
            checks.COUNT,
        )
        p.Define("dim_per_head", 0, "K; 0 takes M / N.", checks.COUNT)
        p.Define(
            "position",
            None,
            "Params of the Positions of queries and keys, or of scores; None: they have none.",
        )
        p.Define(
            "block",
            AUTO,
            "Tokens of a block, where self-attention is computed by blocks (kernels/blockwise.py). auto: those of the "
            f"fused kernel in a program for TPUs (kernels/pallas/attention.py), in others {BLOCK}.",
            checks.SizeOr((AUTO,)),
        )
        p.Define("biases", False, "Whether all four projections have biases.")
        p.Define(
            "score_scale",
            None,
            "What the products of queries and keys are multiplied by, e.g. 1 as in T5; None: K^-0.5. Queries begin "
            "with weights that are smaller by as much as it is larger.",
            checks.or_none(checks.POSITIVE),
        )
        p.Define("atten_dropout_prob", 0.0, "Dropout on the attention probabilities.", checks.SHARE)
        return p

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        scored, turned = self._CreateWeights()
        self._scale = self.p.score_scale or scored**-0.5
        if self.p.position is not None:
            self.CreateChild("position", _position_params(self.p))
            self.position.CheckHeads(turned)
            self._scale *= self.position.ScoreScale()

    def _CreateWeights(self) -> tuple[int, int]:
        """Creates the weights, and returns how many numbers queries have, and how many of them take positions."""
        m, n, a, k = _dims(self.p)
        self._kv = "N" if a == n else "A"  # the letter of the heads of keys and values
        for name, heads, letter in (("q", n, "N"), ("k", a, self._kv), ("v", a, self._kv)):
            shape, letters = (m, heads, k), f"M{letter}K"
            init = self._QueryInit(m, k) if name == "q" else WeightInit.FanIn(m)
            self.CreateVariable(name, WeightParams(shape, letters, init))
        self.CreateVariable("o", WeightParams((n, k, m), "NKM", WeightInit.FanIn(n * k)))
        if self.p.biases:
            for name, heads, letter in (("q", n, "N"), ("k", a, self._kv), ("v", a, self._kv)):
                bias = WeightParams.Vector((heads, k), f"{letter}K", 0.0)
                self.CreateVariable(f"{name}_bias", bias)
            self.CreateVariable("o_bias", WeightParams.Vector((m,), "M", 0.0))
        return k, k

    def _QueryInit(self, fan_in: int, size: int) -> WeightInit:
        """Initial weights of queries of so many numbers, with which scores vary as much as without a score_scale."""
        init, scale = WeightInit.FanIn(fan_in), self.p.score_scale
        return replace(init, scale=init.scale * size**-0.5 / scale) if scale else init

    def FProp(
        self,
        theta: NestedMap,
        query: tf.Tensor,
        source: tf.Tensor,
        mask: tf.Tensor | NestedMap,
        seed: tf.Tensor | None = None,
        positions: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Each query looks at the source positions that its mask allows.

        Args:
            query: [B, T, M].
            source: [B, S, M]; the query itself in self-attention.
            mask: [B, T or 1, S], bool or 0/1. Or a NestedMap: that `mask`; or, for a packed decoder's self-attention by
                blocks, without dropout on probabilities, the int32 `segments` and `positions` [B, T] from which it
                follows; and `shared`, the weights of positions that all layers of a stack share, if there are any.
            seed: int32 [2]; None means inference, without dropout.
            positions: int32 [B, T], in self-attention whose queries and keys take them.

        Returns:
            [B, T, M]. Where the mask allows nothing the values are finite and mean nothing.
        """
        q, k, v = self._Heads(theta, query, source, positions)
        q = self.Keep(q, "query", "BTNK")
        k = self.Keep(k, "key", f"BS{self._kv}K")
        v = self.Keep(v, "value", f"BS{self._kv}K")

        def drop(probs: tf.Tensor) -> tf.Tensor:
            return kernels.dropout(probs, rate, self.FoldSeed(seed, "atten"))

        rate = self.p.atten_dropout_prob
        seen = self._Seen(theta, mask, positions, positions)
        drops = drop if seed is not None and rate else None
        context = kernels.current().attend(q, k, v, seen, drops)
        return self.Keep(self._Back(theta, context), "attention", "BTM")

    def _Seen(
        self,
        theta: NestedMap,
        mask: tf.Tensor | NestedMap,
        query_at: tf.Tensor | None,
        key_at: tf.Tensor | None,
    ) -> Seen:
        """The keys that queries look at, from FProp's mask and the positions of both."""
        p = self.p
        rows = mask if isinstance(mask, NestedMap) else NestedMap(mask=mask)
        common = {
            "bias": self._BiasOfScores(rows.get("shared", theta.get("position", NestedMap()))),
            "sinks_N": theta.get("sinks"),
            "split": p.activation_split,
        }
        if "mask" in rows:
            near = self._Near(rows.mask, query_at, key_at)
            return Seen(near, query_at, key_at, **common)
        return Seen(
            query_at=rows.positions,
            key_at=rows.positions,
            segments=self._Segments(rows),
            reach=self._Reach(),
            block=None if p.block == AUTO else p.block,
            **common,
        )

    def _BiasOfScores(self, weights: NestedMap) -> Bias | None:
        """The numbers that positions add to scores, from their weights."""
        position = self.children.get("position")
        if not isinstance(position, ScoreBias):
            return None

        def function(query_at: tf.Tensor, key_at: tf.Tensor, *flat: tf.Tensor) -> tf.Tensor:
            return position.Bias(weights.Pack(list(flat)), query_at, key_at)

        return Bias(function, tuple(weights.Flatten()))

    def _Segments(self, rows: NestedMap) -> tf.Tensor:
        """Numbers [B, T], the same for tokens one of which may look at the other: those of the packed texts."""
        return rows.segments

    def _Reach(self) -> int | None:
        """The number of tokens a query may look at, itself and those before it; None: all."""
        return None

    def _Heads(
        self,
        theta: NestedMap,
        query: tf.Tensor | None,
        source: tf.Tensor | None,
        positions: tf.Tensor | None,
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Queries, scaled, keys and values, with their positions, in the layout of the kernels in use.

        Without a query, or without a source, None stands in the place of what would be made of it.
        """
        q, k, v = kernels.current().project_heads(query, source, theta, self._scale, self.Shard)
        if self.p.biases:
            scales = (self._scale, 1.0, 1.0)
            q, k, v = (
                x if x is None else x + self._HeadsBias(theta[f"{name}_bias"], scale)
                for name, x, scale in zip("qkv", (q, k, v), scales, strict=True)
            )
        return self._Positioned(q, positions), self._Positioned(k, positions), v

    def _Near(
        self, mask: tf.Tensor, query_at: tf.Tensor | None, key_at: tf.Tensor | None
    ) -> tf.Tensor:
        """The mask without what the layer does not look at, by int32 positions [B or 1, T or 1] and [B or 1, S]."""
        return mask

    def _HeadsBias(self, bias_NK: tf.Tensor, scale: float) -> tf.Tensor:
        """A bias of heads times a scale, in the layout of the kernels in use."""
        bias = self.Cast(bias_NK) * tf.constant(scale, self.fprop_dtype)
        return kernels.current().in_layout(bias[tf.newaxis, tf.newaxis])

    def _Back(self, theta: NestedMap, context: tf.Tensor) -> tf.Tensor:
        """The heads' results [B, T, N, K] projected to [B, T, M]."""
        y = kernels.current().project_back(context, theta.o)
        return y + self.Cast(theta.o_bias) if "o_bias" in theta else y

    @scoped
    def PrecomputeMemory(self, theta: NestedMap, memory: tf.Tensor) -> NestedMap:
        """Keys and values of memory [B, S, M]: NestedMap(k, v), each of MemoryLetters."""
        _, k, v = self._Heads(theta, None, memory, None)
        return NestedMap(k=k, v=v)

    def MemoryLetters(self) -> NestedMap:
        """The letters of PrecomputeMemory's tensors, with the kernels in use."""
        return self._Letters(kernels.current().MEMORY)

    @scoped
    def AttendMemory(
        self, theta: NestedMap, query: tf.Tensor, memory: NestedMap, mask: tf.Tensor
    ) -> tf.Tensor:
        """Inference on precomputed memory: query [B, J, M], mask [B, J or 1, S] to [B, J, M]."""
        q, _, _ = self._Heads(theta, query, None, None)
        seen = self._Seen(theta, mask, None, None)
        return self._Back(theta, kernels.current().attend(q, memory.k, memory.v, seen))

    def CheckMemory(self) -> None:
        """Raises ParamError if it goes by positions: a memory's tokens and the queries count theirs apart."""
        for name in self.BY_POSITIONS:
            if value := getattr(self.p, name):
                raise ParamError(
                    f"{self.path}.{name}",
                    str(getattr(value, "cls", value)),
                    "must not be set in cross-attention, whose queries and keys have no common positions",
                )

    @scoped
    def InitCache(self, batch: int | tf.Tensor, length: int, num_hyps: int = 1) -> NestedMap:
        """Empty keys and values for L = length steps of J = num_hyps positions: NestedMap(k, v), each of CacheLetters.

        As seen by masks, position j of step t is t * J + j.
        """
        _, _, a, k = _dims(self.p)
        shape = kernels.CacheShape(batch, length, num_hyps, a, k, self.fprop_dtype)
        return NestedMap({name: kernels.current().empty_cache(shape) for name in ("k", "v")})

    def CacheLetters(self) -> NestedMap:
        """The letters of InitCache's tensors, with the kernels in use."""
        return self._Letters(kernels.current().CACHE)

    def _Letters(self, letters: str) -> NestedMap:
        letters = letters.replace("N", self._kv)
        return NestedMap(k=letters, v=letters)

    @scoped
    def ExtendStep(
        self, theta: NestedMap, x: tf.Tensor, cache: NestedMap, time: tf.Tensor, mask: tf.Tensor
    ) -> tuple[tf.Tensor, NestedMap]:
        """One decoding step: writes J keys and values, then attends to the cache under the mask.

        Which hypothesis a cached position belongs to is a matter of the mask alone, so beams are
        never reordered here (flat beam search, the paper's appendix A.1).

        Args:
            x: [B, J, M], the new position of each hypothesis.
            cache: from InitCache or the step before; it must not be used again.
            time: int32 scalar, the step, in [0, length); or, with one hypothesis, int32 [P], consecutive steps at
                once: x and what comes back are [B, P, M] then, and mask is [B, P, length]; or int32 [B, P], where
                caches are in pages (kernels/paged.py).
            mask: [B, J, length * J], bool or 0/1; must allow a hypothesis its own new position,
                time * J + j. Or a NestedMap of it, `shared`, see FProp, and `first`, int32 [B], the step of each row's
                first token, from which its positions count; without it 0.

        Returns:
            ([B, J, M], the new cache).
        """
        ops = kernels.current()
        takes = self.NEEDS_POSITIONS or self.p.position is not None
        query_at = positions_of(time, mask) if takes else None
        q, k, v = self._Heads(theta, x, x, query_at)
        k, v = ops.write_cache(cache.k, k, time), ops.write_cache(cache.v, v, time)
        seen = self._SeenInCache(theta, mask, time, query_at)
        return self._Back(theta, ops.attend_cache(q, k, v, seen)), NestedMap(k=k, v=v)

    def _SeenInCache(
        self,
        theta: NestedMap,
        mask: tf.Tensor | NestedMap,
        time: tf.Tensor,
        query_at: tf.Tensor | None,
    ) -> Seen:
        """The cached keys that the queries of a step look at; see ExtendStep."""
        if not (self.NEEDS_POSITIONS or isinstance(self.children.get("position"), ScoreBias)):
            return self._Seen(theta, mask, None, None)
        pairs = mask.mask if isinstance(mask, NestedMap) else mask
        query_at, key_at = kernels.current().seen_positions(query_at, time, pairs)
        return self._Seen(theta, mask, query_at, in_row(key_at, mask))

    def _Positioned(self, heads: tf.Tensor, positions: tf.Tensor | None) -> tf.Tensor:
        if self.p.position is None or heads is None:
            return heads
        if positions is None:
            raise ValueError(
                f"{self.path}: queries and keys take positions; FProp needs `positions`"
            )
        return self.position.Give(heads, positions)

    def PackWeights(self, theta: NestedMap, packing: Packing) -> NestedMap:
        """See BaseLayer: one product projects an input that is both query and source."""
        q, k, v, o = self._ToPack(theta)
        return NestedMap(_others(theta), qkv=packing.Heads(q, k, v), o=packing.Matrix(o))

    def _ToPack(self, theta: NestedMap) -> tuple[tf.Tensor, ...]:
        """q [M, N, K] times the scale, k and v [M, A, K] and o [N K, M], in the type of the activations."""
        q, k, v, o = (self.Cast(theta[name]) for name in ("q", "k", "v", "o"))
        heads, size, dim = o.shape
        return q * tf.constant(self._scale, q.dtype), k, v, tf.reshape(o, [heads * size, dim])

    @classmethod
    def FPropMeta(cls, params: HyperParams, *input_shapes: Sequence[int]) -> NestedMap:
        """Counts, from the shapes of query and source: projections q, k, v, o, then q k^T and probs v."""
        (batch, time, dim), (_, length, _) = input_shapes[0], input_shapes[-1]
        _, n, a, k = _dims(params)
        projections = 2 * dim * k * batch * (2 * n * time + 2 * a * length)
        products = 2 * 2 * batch * n * time * length * k
        return NestedMap(flops=projections + products, out_shapes=((batch, time, dim),))


def in_row(steps_1P: tf.Tensor, mask: tf.Tensor | NestedMap) -> tf.Tensor:
    """The positions at steps, int32 [1 or B, P], of rows that begin where the `mask` of ExtendStep says."""
    if not isinstance(mask, NestedMap) or "first" not in mask:
        return steps_1P
    return tf.maximum(steps_1P - mask.first[:, tf.newaxis], 0)


class CrossAttention(MultiHeadAttention):
    """Attention to a memory, whose packed weights project queries apart from keys and values."""

    def PackWeights(self, theta: NestedMap, packing: Packing) -> NestedMap:
        q, k, v, o = self._ToPack(theta)
        packed = {"q": packing.Heads(q), "kv": packing.Heads(k, v), "o": packing.Matrix(o)}
        return NestedMap(_others(theta), **packed)


def positions_of(time: tf.Tensor, mask: tf.Tensor | NestedMap) -> tf.Tensor:
    """The positions [1 or B, P] of the new tokens of a step, from the `time` and the `mask` of ExtendStep."""
    return in_row(time if time.shape.rank == 2 else tf.reshape(time, [1, -1]), mask)


def shared_position(p: HyperParams) -> InstantiableParams | None:
    """Params of the layer that has the weights of positions which all layers of a stack share, from the Params of their
    attention; None if they share none."""
    position = None if p.position is None else _position_params(p)
    if position is None or not issubclass(position.cls, ScoreBias):
        return None
    return position.cls.OfStack(position)


def _position_params(p: HyperParams) -> InstantiableParams:
    """Params of attention's positions, for its heads."""
    position = p.position.Copy()
    return position.Set(num_heads=p.num_heads) if "num_heads" in position else position


def _others(theta: NestedMap) -> NestedMap:
    """The weights that stay as they are where those of products are packed."""
    return NestedMap({name: value for name, value in theta.items() if name not in "qkvo"})


def head_dim(p: HyperParams) -> int:
    """K. Raises ValueError where the heads are unequal parts of M."""
    if not p.dim_per_head and p.model_dim % p.num_heads:
        raise ValueError(
            f"attention: model_dim {p.model_dim} does not divide into {p.num_heads} heads; set task.key_dim, or "
            "dim_per_head of the layer"
        )
    return p.dim_per_head or p.model_dim // p.num_heads


def _dims(p: HyperParams) -> tuple[int, int, int, int]:
    """(M, N, A, K)."""
    k, n, a = head_dim(p), p.num_heads, p.num_kv_heads or p.num_heads
    if n % a:
        small = [i for i in range(1, math.isqrt(n) + 1) if n % i == 0]
        divisors = ", ".join(str(i) for i in sorted({*small, *(n // i for i in small)}))
        raise ValueError(
            f"attention: num_kv_heads={a} does not divide num_heads={n}, and each head of keys and values is for "
            f"as many heads; choose one of {divisors}, or 0 for {n}"
        )
    return p.model_dim, n, a, k
