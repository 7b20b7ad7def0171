"""Transformer layers, blocks of them, and the stack that repeats a block.

Letters: B batch, T time, S source time, M model, L block, J beam hypothesis.

Layers share `aux`, a NestedMap:
    paddings: float [B, T], 1 at padding.
    self_mask: bool [B, T, T] (see masks.py); or the NestedMap that attention by blocks takes instead (attention.py).
    memory, cross_mask: [B, S, M] and bool [B, T or 1, S]; with cross-attention only.
    context: int32 [B, T] tensors that a MoE layer's router needs (see moe/routers/base.py); only if it
        needs some.
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
from lingvo_moe.core.layers import kept
from lingvo_moe.core.layers.attention import MultiHeadAttention
from lingvo_moe.core.layers.feed_forward import FeedForward
from lingvo_moe.core.layers.normalization import LayerNorm
from lingvo_moe.core.layers.repeat import ALL, Chunk, Repeat, slices
from lingvo_moe.core.nested_map import NestedMap, map_structure


@dataclass(frozen=True)
class _Wiring:
    """The manner in which a layer attends: in a pass over rows, or in a step over a cache."""

    # Normalized x [B, T, M] -> (the output of self-attention [B, T, M], the new cache in a step).
    attend: Callable[[tf.Tensor], tuple[tf.Tensor, NestedMap]]
    # The same for cross-attention, which has no cache to return.
    attend_memory: Callable[[tf.Tensor], tf.Tensor]
    seed: tf.Tensor | None = None  # int32 [2]; None means inference
    letters: str = ""  # the letters by which sums are sharded; "": XLA decides


class TransformerLayer(BaseLayer):
    """x plus self-attention, cross-attention (if any) and feed-forward in turn, pre-LN."""

    PART: ClassVar[str] = "residual"
    PackWeights = BaseLayer.PackChildren

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define(
            "model_dim", 0, "M, for this layer and the parts that leave it open.", checks.COUNT
        )
        p.Define("norm_tpl", LayerNorm.Params(), "Params of the normalizations.")
        p.Define("self_atten_tpl", MultiHeadAttention.Params(), "Params of self-attention.")
        p.Define("cross_atten_tpl", None, "Params of cross-attention; None has none.")
        p.Define("ffn_tpl", FeedForward.Params(), "Params of the feed-forward: dense or MoE.")
        p.Define("residual_dropout_prob", 0.0, "Dropout on the output of each part.", checks.SHARE)
        return p

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        p = self.p
        self.CreateChild("self_norm", _with_dim(p, p.norm_tpl))
        self.CreateChild("self_atten", _with_dim(p, p.self_atten_tpl))
        if p.cross_atten_tpl is not None:
            self.CreateChild("cross_norm", _with_dim(p, p.norm_tpl))
            self.CreateChild("cross_atten", _with_dim(p, p.cross_atten_tpl))
            self.cross_atten.CheckMemory()
        self.CreateChild("ffn_norm", _with_dim(p, p.norm_tpl))
        self.CreateChild("ffn", _with_dim(p, p.ffn_tpl))

    def Variant(self) -> str:
        """See BaseLayer: moe where the feed-forward layer has experts, else dense."""
        parts = {part for part, _ in self.ffn.DeclaredParts().values()}
        return "moe" if "experts" in parts else "dense"

    def FProp(
        self,
        theta: NestedMap,
        x: tf.Tensor,
        aux: NestedMap,
        seed: tf.Tensor | None = None,
    ) -> tuple[tf.Tensor, NestedMap]:
        """Maps x [B, T, M] under aux (see the file's top) to ([B, T, M], the ffn's extras)."""

        def attend(h: tf.Tensor) -> tuple[tf.Tensor, NestedMap]:
            more = {"seed": self.FoldSeed(seed, "self_atten"), **_present(aux, "positions")}
            return self.self_atten.FProp(theta.self_atten, h, h, aux.self_mask, **more), NestedMap()

        def attend_memory(h: tf.Tensor) -> tf.Tensor:
            memory, mask = self.Shard(aux.memory, "BSM"), aux.cross_mask
            own_seed = self.FoldSeed(seed, "cross_atten")
            return self.cross_atten.FProp(theta.cross_atten, h, memory, mask, seed=own_seed)

        wiring = _Wiring(attend, attend_memory, seed, "BTM")
        x, _, extras = self._Wired(theta, self.Shard(x, "BTM"), aux, wiring)
        return x, extras

    def _Wired(
        self, theta: NestedMap, x: tf.Tensor, aux: NestedMap, wiring: "_Wiring"
    ) -> tuple[tf.Tensor, NestedMap, NestedMap]:
        """The parts in turn, with their normalizations and residual branches, for any manner of attention.

        Returns:
            (x after all parts, what `wiring.attend` gives beside its output, the extras of the feed-forward layer).
        """

        def add(name: str, x: tf.Tensor, h: tf.Tensor) -> tf.Tensor:
            seed = self.FoldSeed(wiring.seed, f"{name}_residual")
            x += kernels.dropout(h, self.p.residual_dropout_prob, seed)
            return self.Shard(x, wiring.letters) if wiring.letters else x

        h, attended = wiring.attend(self.self_norm.FProp(theta.self_norm, x))
        x = add("self", x, h)
        if self.p.cross_atten_tpl is not None:
            h = wiring.attend_memory(self.cross_norm.FProp(theta.cross_norm, x))
            x = add("cross", x, h)
        h = self.ffn_norm.FProp(theta.ffn_norm, x)
        more = {"seed": self.FoldSeed(wiring.seed, "ffn"), **_present(aux, "context", "shares")}
        h, extras = self.ffn.FProp(theta.ffn, h, aux.paddings, **more)
        return add("ffn", x, h), attended, extras

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

        def attend_memory(h: tf.Tensor) -> tf.Tensor:
            return self.cross_atten.AttendMemory(theta.cross_atten, h, memory, aux.cross_mask)

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
            name: tpl.cls.FPropMeta(_with_dim(params, tpl), *shapes)
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


class TransformerBlock(BaseLayer):
    """A sequence of different layers, the unit that a stack repeats, e.g. a dense layer and then a MoE layer."""

    PART: ClassVar[str] = "residual"
    PackWeights = BaseLayer.PackChildren

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("layers", [], "Params of TransformerLayers, in order.")
        return p

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        self.CreateChildren("layers", self.p.layers)

    def FProp(
        self,
        theta: NestedMap,
        x: tf.Tensor,
        aux: NestedMap,
        seed: tf.Tensor | None = None,
    ) -> tuple[tf.Tensor, NestedMap]:
        """Maps x [B, T, M]; the extras of layer i, where it has any, are `extras.layer_<i>`."""
        all_extras = NestedMap()
        for i, layer in enumerate(self.layers):
            name = f"layer_{i}"
            x, extras = layer.FProp(theta.layers[i], x, aux, seed=self.FoldSeed(seed, name))
            if extras:
                all_extras[name] = extras
        return x, all_extras

    @classmethod
    def FPropMeta(cls, params: HyperParams, *input_shapes: Sequence[int]) -> NestedMap:
        """The sum of the layers."""
        metas = [layer.cls.FPropMeta(layer, *input_shapes) for layer in params.layers]
        return NestedMap(flops=sum(m.flops for m in metas), out_shapes=(tuple(input_shapes[0]),))


class TransformerStack(BaseLayer):
    """Some first layers, if any; `num_blocks` times a block of layers; a normalization: an encoder or a decoder."""

    NAMES_ITS_PARTS: ClassVar[bool] = True
    PackWeights = BaseLayer.PackChildren

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("model_dim", 0, "M, for the parts that leave it open.", checks.COUNT)
        p.Define(
            "num_blocks",
            1,
            "L, how often the block is repeated, each time with its own weights.",
            checks.LAYERS,
        )
        p.Define("block", [], "Params of the TransformerLayers of one block, in order.")
        p.Define("first", None, "Params of the TransformerLayer that the first layers are.")
        p.Define(
            "num_first",
            0,
            "How many layers there are before the blocks, in no stage of a pipeline.",
            checks.COUNT,
        )
        p.Define("repeat", True, "Scan over the blocks, recomputing in backward; else unroll.")
        p.Define(
            "remat",
            kept.FULL,
            "The activations that are kept and not recomputed (layers/kept.py).",
            checks.NamesOr((kept.FULL, kept.DOTS), ()),
        )
        p.Define("final_norm_tpl", LayerNorm.Params(), "Params of the last normalization.")
        p.Define("parts", 1, "How many parts a pipeline divides the blocks into.", checks.SIZE)
        return p

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        p = self.p
        if p.num_first:
            self.CreateChild("first", _repeat_params(p, [p.first], p.num_first))
        self.CreateChild("blocks", _repeat_params(p, p.block, p.num_blocks))
        self.CreateChild("final_norm", _with_dim(p, p.final_norm_tpl))

    def FProp(
        self,
        theta: NestedMap,
        x: tf.Tensor,
        aux: NestedMap,
        seed: tf.Tensor | None = None,
    ) -> tuple[tf.Tensor, NestedMap]:
        """Maps x [B, T, M] under aux (see the top of the file).

        Returns:
            ([B, T, M], extras): `extras.layer_<i>` holds the extras of layer i of each block, stacked:
            [L, ...].
        """
        x = self.RunFirst(theta, x, aux, seed)
        x, extras = self.RunBlocks(theta.blocks, x, aux, seed)
        return self.final_norm.FProp(theta.final_norm, x), extras

    @scoped
    def RunFirst(
        self, theta: NestedMap, x: tf.Tensor, aux: NestedMap, seed: tf.Tensor | None = None
    ) -> tf.Tensor:
        """The layers before the blocks, as in FProp; their extras are left out: they have no experts."""
        if not self.p.num_first:
            return x
        return self.first.FProp(theta.first, x, aux, self.FoldSeed(seed, "first"))[0]

    @scoped
    def RunBlocks(
        self,
        theta: NestedMap,
        x: tf.Tensor,
        aux: NestedMap,
        seed: tf.Tensor | None = None,
        chunk: Chunk = ALL,
    ) -> tuple[tf.Tensor, NestedMap]:
        """FProp without the last normalization, for the weights of all blocks or of a chunk of them."""
        seed = self.FoldSeed(seed, "blocks")
        return self.blocks.FProp(theta, x, aux, seed, chunk)

    @scoped
    def InitCache(self, batch: int, length: int, num_hyps: int = 1) -> list[list[NestedMap]]:
        """Empty caches for ExtendStep, by block and layer; each of the first layers is a block."""
        return [
            [layer.InitCache(batch, length, num_hyps) for layer in layers]
            for layers in self._Layers()
        ]

    def _Layers(self) -> list[list[TransformerLayer]]:
        """All layers in order, by block; each of the first layers is a block."""
        times = {"first": self.p.num_first, "blocks": self.p.num_blocks}
        return [self.children[name].body.layers for name, n in times.items() for _ in range(n)]

    def _Weights(self, theta: NestedMap, block: int) -> list[NestedMap]:
        """The weights of a block of `_Layers`."""
        number = block - self.p.num_first
        if number < 0:
            return self.first.SliceTheta(theta.first, block).layers
        return self.blocks.SliceTheta(theta.blocks, number).layers

    @scoped
    def PrecomputeMemory(self, theta: NestedMap, memory: tf.Tensor) -> list[list[NestedMap]]:
        """Every cross-attention's keys and values of memory [B, S, M], by block and layer."""
        out = []
        for b, layers in enumerate(self._Layers()):
            pairs = zip(layers, self._Weights(theta, b), strict=True)
            out.append([layer.PrecomputeMemory(weights, memory) for layer, weights in pairs])
        return out

    def Grow(self, small: NestedMap, fresh: NestedMap) -> NestedMap:
        """See BaseLayer: each layer grows out of that of the same number, whatever the size of the other's blocks."""
        names = ("first", "blocks")
        olds = iter(
            layer
            for name in names
            if name in small
            for block in slices(small[name])
            for layer in block.body.layers
        )
        all_grown = NestedMap(small)
        for name in names:
            if name not in fresh:
                continue
            blocks = []
            for block in slices(fresh[name]):
                news = zip(self.children[name].body.layers, block.body.layers, strict=True)
                layers = [layer.Grow(next(olds), new) for layer, new in news]
                blocks.append(NestedMap(body=NestedMap(layers=layers)))
            all_grown[name] = map_structure(lambda *weights: tf.stack(weights), *blocks)
        return all_grown

    def CacheLetters(self) -> list[list[NestedMap]]:
        """The letters of InitCache's tensors, by block and layer."""
        return [[layer.CacheLetters() for layer in layers] for layers in self._Layers()]

    def MemoryLetters(self) -> list[list[NestedMap]]:
        """The letters of PrecomputeMemory's tensors, by block and layer."""
        return [[layer.MemoryLetters() for layer in layers] for layers in self._Layers()]

    @scoped
    def ExtendStep(
        self,
        theta: NestedMap,
        x: tf.Tensor,
        cache: list[list[NestedMap]],
        time: tf.Tensor,
        aux: NestedMap,
        memory: list[list[NestedMap]] | None = None,
    ) -> tuple[tf.Tensor, list[list[NestedMap]]]:
        """One decoding step of J hypotheses.

        Args:
            x: [B, J, M], the embedded newest token of each hypothesis.
            time: int32 scalar; the step writes flat positions time * J .. time * J + J - 1. Or int32 [P], consecutive
                steps of one hypothesis at once, which are P in the place of J (see MultiHeadAttention.ExtendStep).
            aux: self_mask, bool or 0/1 [B, J, length * J], which must allow a hypothesis its own
                new position; cross_mask [B, J or 1, S] with cross-attention; paddings [B, J],
                optional, 1 where a row holds no request; context of [B, J], if needed.
            memory: from PrecomputeMemory; needed with cross-attention.

        Returns:
            ([B, J, M], the new caches). The same numbers as FProp gives at these positions.
        """
        if "paddings" not in aux:
            aux = NestedMap(aux, paddings=tf.zeros(tf.shape(x)[:2]))
        new_cache = []
        for b, layers in enumerate(self._Layers()):
            thetas, row = self._Weights(theta, b), []
            for i, layer in enumerate(layers):
                mem = NestedMap() if memory is None else memory[b][i]
                x, c = layer.ExtendStep(thetas[i], x, cache[b][i], time, aux, mem)
                row.append(c)
            new_cache.append(row)
        return self.final_norm.FProp(theta.final_norm, x), new_cache

    @classmethod
    def FlopsByLayer(
        cls, params: HyperParams, *input_shapes: Sequence[int]
    ) -> list[tuple[HyperParams, dict[str, int]]]:
        """Each different layer, with its TransformerLayer.FlopsByPart times how often there is one."""
        layers = [(params.first, params.num_first)] if params.num_first else []
        layers += [(layer, params.num_blocks) for layer in params.block]
        counts = []
        for layer, times in layers:
            parts = layer.cls.FlopsByPart(_with_dim(params, layer), *input_shapes)
            counts.append((layer, {name: times * flops for name, flops in parts.items()}))
        return counts

    @classmethod
    def FPropMeta(cls, params: HyperParams, *input_shapes: Sequence[int]) -> NestedMap:
        """The sum of the layers."""
        layers = cls.FlopsByLayer(params, *input_shapes)
        flops = sum(sum(parts.values()) for _, parts in layers)
        return NestedMap(flops=flops, out_shapes=(tuple(input_shapes[0]),))


def _repeat_params(p: HyperParams, layers: Sequence[HyperParams], times: int) -> InstantiableParams:
    body = TransformerBlock.Params().Set(layers=[_with_dim(p, layer) for layer in layers])
    repeat = Repeat.Params()
    repeat.Set(body=body, num_repeats=times, unroll=not p.repeat, parts=p.parts)
    repeat.remat = p.remat
    return repeat


def _present(aux: NestedMap, *names: str) -> dict[str, NestedMap]:
    """The arguments of a part that `aux` has."""
    return {name: aux[name] for name in names if name in aux}


def _with_dim(parent: HyperParams, tpl: HyperParams) -> HyperParams:
    """A copy that has the parent's model_dim where it leaves it open (0)."""
    out = tpl.Copy()
    if not out.model_dim:
        out.model_dim = parent.model_dim
    return out
