"""Blocks of Transformer layers, and the stack that repeats a block.

Letters: B batch, T time, S source time, M model, L block, J beam hypothesis.

Layers share `aux`, a NestedMap: see transformer_layer.py.
"""

from collections.abc import Sequence
from typing import ClassVar

import tensorflow as tf

from lingvo_moe.core.base_layer import BaseLayer, scoped
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params as HyperParams
from lingvo_moe.core.layers import kept
from lingvo_moe.core.layers.attention import shared_position
from lingvo_moe.core.layers.normalization import LayerNorm
from lingvo_moe.core.layers.repeat import ALL, Chunk, Repeat, slices
from lingvo_moe.core.layers.transformer_layer import TransformerLayer, with_dim
from lingvo_moe.core.nested_map import NestedMap, map_structure


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
        self, theta: NestedMap, x: tf.Tensor, aux: NestedMap, seed: tf.Tensor | None = None
    ) -> tuple[tf.Tensor, NestedMap]:
        """Maps x [B, T, M]; the extras of layer i, where it has any, are `extras.layer_<i>`."""
        all_extras = NestedMap()
        recorded = iter(tf.unstack(aux.experts) if "experts" in aux else ())
        for i, layer in enumerate(self.layers):
            name, layer_aux = f"layer_{i}", aux
            if "experts" in aux and layer.Variant() == "moe":
                layer_aux = NestedMap(aux)
                layer_aux.context = NestedMap(aux.get("context", {}), experts=next(recorded))
            x, extras = layer.FProp(theta.layers[i], x, layer_aux, seed=self.FoldSeed(seed, name))
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
        p.Define("has_final_norm", True, "Whether there is a last normalization.")
        p.Define("parts", 1, "How many parts a pipeline divides the blocks into.", checks.SIZE)
        return p

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        p = self.p
        if p.num_first:
            self.CreateChild("first", _repeat_params(p, [p.first], p.num_first))
        self.CreateChild("blocks", _repeat_params(p, p.block, p.num_blocks))
        if p.has_final_norm:
            self.CreateChild("final_norm", with_dim(p, p.final_norm_tpl))
        positions = [shared_position(layer.self_atten_tpl) for layer in p.block]
        if position := next(filter(None, positions), None):
            self.CreateChild("position", position)

    @scoped
    def WithShared(self, theta: NestedMap, aux: NestedMap) -> NestedMap:
        """aux with the weights of positions that all layers share, if any; RunFirst and RunBlocks need them in it."""
        if "position" not in self.children:
            return aux
        mask = aux.self_mask
        rows = mask if isinstance(mask, NestedMap) else NestedMap(mask=mask)
        return NestedMap(aux, self_mask=NestedMap(rows, shared=theta.position))

    def FProp(
        self, theta: NestedMap, x: tf.Tensor, aux: NestedMap, seed: tf.Tensor | None = None
    ) -> tuple[tf.Tensor, NestedMap]:
        """Maps x [B, T, M] under aux (see the top of the file).

        Returns:
            ([B, T, M], extras): `extras.layer_<i>` holds the extras of layer i of each block, stacked:
            [L, ...].
        """
        aux = self.WithShared(theta, aux)
        x = self.RunFirst(theta, x, aux, seed)
        x, extras = self.RunBlocks(theta.blocks, x, aux, seed)
        return self.Normalized(theta, x), extras

    @scoped
    def Normalized(self, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        """The output [B, T, M] of all layers after the last normalization, if there is one."""
        return self.final_norm.FProp(theta.final_norm, x) if "final_norm" in self.children else x

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
        """FProp without the last normalization, for the weights of all blocks or of a chunk of them.

        Raises ValueError: recorded `aux.experts` are of another number of layers than have experts.
        """
        seed = self.FoldSeed(seed, "blocks")
        if "experts" in aux:
            aux = self._ByBlock(aux)
        return self.blocks.FProp(theta, x, aux, seed, chunk)

    def _ByBlock(self, aux: NestedMap) -> NestedMap:
        """aux with recorded experts [L, B, T, k] as what each block takes of them."""
        blocks, layers = self.p.num_blocks, self.blocks.body.layers
        moe_layers = sum(layer.Variant() == "moe" for layer in layers)
        number, *rest = aux.experts.shape
        if number != blocks * moe_layers:
            raise ValueError(
                f"{self.path}: recorded `experts` are of {number} layers, and {blocks * moe_layers} have experts"
            )
        by_block = tf.reshape(aux.experts, [blocks, moe_layers, *rest])
        others = {name: value for name, value in aux.items() if name != "experts"}
        return NestedMap(others, by_repetition=NestedMap(experts=by_block))

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
        aux = self.WithShared(theta, aux)
        new_cache = []
        for b, layers in enumerate(self._Layers()):
            thetas, row = self._Weights(theta, b), []
            for i, layer in enumerate(layers):
                mem = NestedMap() if memory is None else memory[b][i]
                x, c = layer.ExtendStep(thetas[i], x, cache[b][i], time, aux, mem)
                row.append(c)
            new_cache.append(row)
        return self.Normalized(theta, x), new_cache

    @classmethod
    def FlopsByLayer(
        cls, params: HyperParams, *input_shapes: Sequence[int]
    ) -> list[tuple[HyperParams, dict[str, int]]]:
        """Each different layer, with its TransformerLayer.FlopsByPart times how often there is one."""
        layers = [(params.first, params.num_first)] if params.num_first else []
        layers += [(layer, params.num_blocks) for layer in params.block]
        counts = []
        for layer, times in layers:
            parts = layer.cls.FlopsByPart(with_dim(params, layer), *input_shapes)
            counts.append((layer, {name: times * flops for name, flops in parts.items()}))
        return counts

    @classmethod
    def FPropMeta(cls, params: HyperParams, *input_shapes: Sequence[int]) -> NestedMap:
        """The sum of the layers."""
        layers = cls.FlopsByLayer(params, *input_shapes)
        flops = sum(sum(parts.values()) for _, parts in layers)
        return NestedMap(flops=flops, out_shapes=(tuple(input_shapes[0]),))


def _repeat_params(p: HyperParams, layers: Sequence[HyperParams], times: int) -> InstantiableParams:
    body = TransformerBlock.Params().Set(layers=[with_dim(p, layer) for layer in layers])
    repeat = Repeat.Params()
    repeat.Set(body=body, num_repeats=times, unroll=not p.repeat, parts=p.parts)
    repeat.remat = p.remat
    return repeat
