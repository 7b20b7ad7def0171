"""A Transformer layer: attention and feed-forward, with their normalizations and residual branches.

Letters: B batch, T time, S source time, M model, J beam hypothesis.

Layers share `aux`, a NestedMap:
    paddings: float [B, T], 1 at padding.
    self_mask: bool [B, T, T] (see masks.py); or a NestedMap that self-attention takes instead (attention.py).
    memory, cross_mask: [B, S, M] and bool [B, T or 1, S]; with cross-attention only.
    context: int32 [B, T] tensors that a MoE layer's router needs (see moe/routers/base.py); only if it
        needs some.
    experts: int32 [n, B, T, k], recorded ones of n MoE layers, in their order, where these are to choose them.
    shares: float scalars, in a micro-batch only; see core/moe/layer.py.
    positions: int32 [B, T], each token's in its segment; only where queries and keys take them (positions.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.base_layer import BaseLayer, scoped
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params as HyperParams
from lingvo_moe.core.layers.attention import MultiHeadAttention
from lingvo_moe.core.layers.feed_forward import FeedForward
from lingvo_moe.core.layers.normalization import LayerNorm
from lingvo_moe.core.nested_map import NestedMap

NORM_PLACES = ("before", "after", "both", "output")
NORM_PLACES_HELP = (
    "Where a part f of a layer is normalized. before: x + f(norm(x)) (GShard, Lingvo). after: norm(x + f(x)), and the "
    "stack has no last normalization (Vaswani et al. 2017, Marian). both: x + norm'(f(norm(x))) (Gemma 2). output: "
    "x + norm(f(x)) (OLMo 2)."
)


@dataclass(frozen=True)
class _Wiring:
    """The manner in which a layer attends: in a pass over rows, or in a step over a cache."""

    # x [B, T, M] -> (the output of self-attention [B, T, M], the new cache in a step).
    attend: Callable[[tf.Tensor], tuple[tf.Tensor, NestedMap]]
    # The same for cross-attention, which has no new cache.
    attend_memory: Callable[[tf.Tensor], tuple[tf.Tensor, NestedMap]]
    seed: tf.Tensor | None = None  # int32 [2]; None means inference
    letters: str = ""  # the letters by which sums are sharded; "": XLA decides


class TransformerLayer(BaseLayer):
    """x plus self-attention, cross-attention (if any) and feed-forward in turn, normalized as `norm_place` says."""

    PART: ClassVar[str] = "residual"
    PackWeights = BaseLayer.PackChildren

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define(
            "model_dim", 0, "M, for this layer and the parts that leave it open.", checks.COUNT
        )
        p.Define("norm_tpl", LayerNorm.Params(), "Params of the normalizations.")
        p.Define("norm_place", "before", NORM_PLACES_HELP, checks.one_of(NORM_PLACES))
        p.Define("self_atten_tpl", MultiHeadAttention.Params(), "Params of self-attention.")
        p.Define("cross_atten_tpl", None, "Params of cross-attention; None has none.")
        p.Define("ffn_tpl", FeedForward.Params(), "Params of the feed-forward: dense or MoE.")
        p.Define("residual_dropout_prob", 0.0, "Dropout on the output of each part.", checks.SHARE)
        return p

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        p = self.p
        self._CreateNorms("self")
        self.CreateChild("self_atten", with_dim(p, p.self_atten_tpl))
        if p.cross_atten_tpl is not None:
            self._CreateNorms("cross")
            self.CreateChild("cross_atten", with_dim(p, p.cross_atten_tpl))
            self.cross_atten.CheckMemory()
        self._CreateNorms("ffn")
        self.CreateChild("ffn", with_dim(p, p.ffn_tpl))

    def _CreateNorms(self, part: str) -> None:
        norms = [f"{part}_norm"] + [f"{part}_output_norm"] * (self.p.norm_place == "both")
        for name in norms:
            self.CreateChild(name, with_dim(self.p, self.p.norm_tpl))

    def Variant(self) -> str:
        """See BaseLayer: moe where the feed-forward layer has experts, else dense."""
        parts = {part for part, _ in self.ffn.DeclaredParts().values()}
        return "moe" if "experts" in parts else "dense"

    def FProp(
        self, theta: NestedMap, x: tf.Tensor, aux: NestedMap, seed: tf.Tensor | None = None
    ) -> tuple[tf.Tensor, NestedMap]:
        """Maps x [B, T, M] under aux (see the file's top) to ([B, T, M], the ffn's extras)."""

        def attend(h: tf.Tensor) -> tuple[tf.Tensor, NestedMap]:
            more = {"seed": self.FoldSeed(seed, "self_atten"), **_present(aux, "positions")}
            return self.self_atten.FProp(theta.self_atten, h, h, aux.self_mask, **more), NestedMap()

        def attend_memory(h: tf.Tensor) -> tuple[tf.Tensor, NestedMap]:
            memory, own_seed = self.Shard(aux.memory, "BSM"), self.FoldSeed(seed, "cross_atten")
            h = self.cross_atten.FProp(theta.cross_atten, h, memory, aux.cross_mask, seed=own_seed)
            return h, NestedMap()

        wiring = _Wiring(attend, attend_memory, seed, "BTM")
        x, _, extras = self._Wired(theta, self.Shard(x, "BTM"), aux, wiring)
        return x, extras

    def _Wired(
        self, theta: NestedMap, x: tf.Tensor, aux: NestedMap, wiring: _Wiring
    ) -> tuple[tf.Tensor, NestedMap, NestedMap]:
        """The parts in turn, with their normalizations and residual branches, for any manner of attention.

        Returns:
            (x after all parts, what `wiring.attend` gives beside its output, the extras of the feed-forward layer).
        """

        def branch(part: str, x: tf.Tensor, run: Callable) -> tuple[tf.Tensor, NestedMap]:
            place = self.p.norm_place
            h = normalized(f"{part}_norm", x) if place in ("before", "both") else x
            h, more = run(h)
            if place in ("both", "output"):
                h = normalized(f"{part}_output_norm" if place == "both" else f"{part}_norm", h)
            seed = self.FoldSeed(wiring.seed, f"{part}_residual")
            x += kernels.dropout(h, self.p.residual_dropout_prob, seed)
            x = self.Shard(x, wiring.letters) if wiring.letters else x
            return normalized(f"{part}_norm", x) if place == "after" else x, more

        def normalized(norm: str, x: tf.Tensor) -> tf.Tensor:
            return self.children[norm].FProp(theta[norm], x)

        def feed_forward(h: tf.Tensor) -> tuple[tf.Tensor, NestedMap]:
            more = {"seed": self.FoldSeed(wiring.seed, "ffn"), **_present(aux, "context", "shares")}
            return self.ffn.FProp(theta.ffn, h, aux.paddings, **more)

        x, attended = branch("self", x, wiring.attend)
        if self.p.cross_atten_tpl is not None:
            x, _ = branch("cross", x, wiring.attend_memory)
        x, extras = branch("ffn", x, feed_forward)
        return x, attended, extras

    @scoped
    def InitCache(self, batch: int, length: int, num_hyps: int = 1) -> NestedMap:
        """See MultiHeadAttention.InitCache."""
        return self.self_atten.InitCache(batch, length, num_hyps)

    def CacheLetters(self) -> NestedMap:
        """The letters of InitCache's tensors."""
        return self.self_atten.CacheLetters()

    @scoped
    def PrecomputeMemory(self, theta: NestedMap, memory: tf.Tensor) -> NestedMap:
        """Cross-attention's keys and values of memory [B, S, M]; empty without one."""
        if self.p.cross_atten_tpl is None:
            return NestedMap()
        return self.cross_atten.PrecomputeMemory(theta.cross_atten, memory)

    def MemoryLetters(self) -> NestedMap:
        """The letters of PrecomputeMemory's tensors."""
        return NestedMap() if self.p.cross_atten_tpl is None else self.cross_atten.MemoryLetters()

    @scoped
    def ExtendStep(
        self,
        theta: NestedMap,
        x: tf.Tensor,
        cache: NestedMap,
        time: tf.Tensor,
        aux: NestedMap,
        memory: NestedMap,
    ) -> tuple[tf.Tensor, NestedMap]:
        """One decoding step of J hypotheses, in inference.

        Args:
            x: [B, J, M].
            time: int32 scalar.
            aux: self_mask [B, J, length * J]; with cross-attention cross_mask [B, J or 1, S];
                paddings [B, J], 1 where a row holds no request; context of [B, J], if needed.

        Returns:
            ([B, J, M], the new cache).
        """

        def attend(h: tf.Tensor) -> tuple[tf.Tensor, NestedMap]:
            return self.self_atten.ExtendStep(theta.self_atten, h, cache, time, aux.self_mask)

        def attend_memory(h: tf.Tensor) -> tuple[tf.Tensor, NestedMap]:
            h = self.cross_atten.AttendMemory(theta.cross_atten, h, memory, aux.cross_mask)
            return h, NestedMap()

        return self._Wired(theta, x, aux, _Wiring(attend, attend_memory))[:2]

    @classmethod
    def FlopsByPart(cls, params: HyperParams, *input_shapes: Sequence[int]) -> dict[str, int]:
        """Forward operations of self_atten, cross_atten (if any), ffn and, with experts, dispatch (MoELayer.FPropMeta).

        Arguments as for FPropMeta.
        """
        x = tuple(input_shapes[0])
        parts: dict[str, tuple[HyperParams, tuple[tuple[int, ...], ...]]] = {
            "self_atten": (params.self_atten_tpl, (x, x))
        }
        if params.cross_atten_tpl is not None:
            parts["cross_atten"] = (params.cross_atten_tpl, (x, tuple(input_shapes[1])))
        parts["ffn"] = (params.ffn_tpl, (x,))
        metas = {
            name: tpl.cls.FPropMeta(with_dim(params, tpl), *shapes)
            for name, (tpl, shapes) in parts.items()
        }
        flops = {name: meta.flops for name, meta in metas.items()}
        if dispatch := metas["ffn"].get("dispatch"):
            flops |= {"ffn": flops["ffn"] - dispatch, "dispatch": dispatch}
        return flops

    @classmethod
    def FPropMeta(cls, params: HyperParams, *input_shapes: Sequence[int]) -> NestedMap:
        """Adds up the parts, from the shapes of x and, with cross-attention, of memory."""
        parts = cls.FlopsByPart(params, *input_shapes)
        dispatch, flops = parts.get("dispatch", 0), sum(parts.values())
        return NestedMap(flops=flops, dispatch=dispatch, out_shapes=(tuple(input_shapes[0]),))


def _present(aux: NestedMap, *names: str) -> dict[str, NestedMap]:
    """The arguments of a part that `aux` has."""
    return {name: aux[name] for name in names if name in aux}


def with_dim(parent: HyperParams, tpl: HyperParams) -> HyperParams:
    """A copy that has the parent's model_dim where it leaves it open (0)."""
    out = tpl.Copy()
    if not out.model_dim:
        out.model_dim = parent.model_dim
    return out
