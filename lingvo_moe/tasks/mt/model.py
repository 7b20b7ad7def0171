"""The MoE Transformer that translates (paper section 2): encoder, decoder, and an MoE in every second feed-forward
layer.

Letters: B batch, T target time, S source time, J hypotheses, M model, V vocabulary.
"""

from typing import ClassVar

import tensorflow as tf

from lingvo_moe.core.base_layer import scoped, within
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params as HyperParams
from lingvo_moe.core.decode.ranges import LENGTH_ALPHA
from lingvo_moe.core.input.base_input import BaseInput
from lingvo_moe.core.kernels.weights import Packing
from lingvo_moe.core.layers import masks, softmax
from lingvo_moe.core.layers.repeat import Chunk
from lingvo_moe.core.moe.layer import ROUTERS
from lingvo_moe.core.moe.losses_and_metrics import combined_metrics
from lingvo_moe.core.nested_map import NestedMap, updates_of
from lingvo_moe.core.pipeline.parts import Context, Parts, Stack
from lingvo_moe.core.task.base_task import TaskError
from lingvo_moe.core.tensors import dim
from lingvo_moe.tasks import experts
from lingvo_moe.tasks.mt.task import MtTask, side_shares


class MtModel(MtTask):
    """An encoder-decoder Transformer from packed source rows to packed target rows.

    `FProp(theta, batch, seed)` takes int32 `batch.src.{ids,segment_ids,segment_pos}` [B,S] and
    `batch.tgt.{ids,labels,segment_ids,segment_pos}` [B,T], where segment 0 is padding, and returns
    the training loss and float32 metrics. Where a router needs them (`Needs`), both sides also have
    `task_ids`, the number of each token's source language.
    """

    MAY_CHANGE: ClassVar[tuple[str, ...]] = (
        *MtTask.MAY_CHANGE,
        "length_alpha",
    )  # of searches alone

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define(
            "decoder_router",
            None,
            "The router of the decoder's MoE layers; None: moe.router, as in the encoder.",
            choices=ROUTERS,
        )
        p.OnlyWith("decoder_router", experts.without_experts)
        p.Define(
            "length_alpha",
            0.6,
            "The exponent by which translations' scores are normalised by length; 0 for none.",
            LENGTH_ALPHA,
        )
        for name in ("model_dim", "num_experts"):
            p.Derive(f"decoder_router.{name}", name)
        return p

    def CreateLayers(self) -> None:
        """See TransformerTask."""
        p = self.p
        for name in ("source_embedding", "target_embedding"):
            size = p.source_vocab_size if name.startswith("source") else p.target_vocab_size
            self.CreateChild(name, self.EmbeddingParams(size))
        self.CreateChild("position", self.PositionParams())
        self.CreateChild("encoder", self._stack(p.num_encoder_layers, decoder=False))
        self.CreateChild("decoder", self._stack(p.num_decoder_layers, decoder=True))
        self.CreateChild("softmax", self.SoftmaxParams(p.target_vocab_size))

    def _stack(self, num_layers: int, decoder: bool) -> InstantiableParams:
        """Layers in blocks: one dense layer, or a dense one and an MoE."""
        p = self.p
        block = [self._layer(moe=False, decoder=decoder)]
        if p.num_experts:
            block.append(self._layer(moe=True, decoder=decoder))
        side = "decoder" if decoder else "encoder"
        if num_layers % len(block):
            raise ValueError(
                f"task.num_{side}_layers={num_layers}: with experts, layers come in "
                "pairs (dense, MoE); give an even number"
            )
        return self.StackParams(block, num_layers // len(block))

    def _layer(self, moe: bool, decoder: bool) -> InstantiableParams:
        if not moe:
            return self.LayerParams(cross=decoder)
        p = self.p
        vocab_size = p.target_vocab_size if decoder else p.source_vocab_size
        ffn = experts.moe_params(p, *_router_of(p, decoder), decoder, vocab_size)
        return self.LayerParams(ffn, cross=decoder)

    @classmethod
    def Needs(cls, params: HyperParams, decoder: bool) -> tuple[str, ...]:
        """Facts about the tokens that the router of one side reads: see moe/routers/base.py."""
        router = _router_of(params, decoder)[1]
        return router.cls.Needs(router) if params.num_experts else ()

    @classmethod
    def RoutesByTask(cls, params: HyperParams) -> bool:
        return any("task_ids" in cls.Needs(params, decoder) for decoder in (False, True))

    @classmethod
    def NumTasks(cls, params: HyperParams) -> int:
        """The largest number of source languages that every router which chooses by language supports."""
        sides = [(_router_of(params, d)[1], cls.Needs(params, d)) for d in (False, True)]
        return min(router.num_tasks for router, needs in sides if "task_ids" in needs)

    # --- the contract of BaseTask

    @classmethod
    def ConfigureInput(cls, task: HyperParams, inputs: HyperParams) -> None:
        """See BaseTask: batches hold task ids where a router asks for them."""
        if cls.RoutesByTask(task):
            inputs.task_ids = True

    def CheckData(self, inputs: BaseInput) -> None:
        """See BaseTask: a router that chooses by language has a place for each."""
        if not self.RoutesByTask(self.p):
            return
        languages = inputs.Artifacts().about["languages"]
        most = self.NumTasks(self.p)
        if len(languages) > most:
            raise TaskError(
                f"the model routes by language and has num_tasks={most}, but the data has {len(languages)} languages "
                f"({', '.join(languages)}); set the router's num_tasks to {len(languages)}, or input.languages to "
                "some of them"
            )

    def MetricLayers(self) -> dict[str, list[str]]:
        """The MoE layers of a stack, counted with the dense ones from 0: layer_1, layer_3 ..."""
        stacks = (
            {"encoder": self.encoder.p, "decoder": self.decoder.p} if self.p.num_experts else {}
        )
        return {
            f"moe/{name}": [f"layer_{(b + 1) * len(p.block) - 1}" for b in range(p.num_blocks)]
            for name, p in stacks.items()
        }

    # --- training

    def Forward(self) -> Parts:
        """See TransformerTask: the encoder's blocks, then the decoder's.

        Embeddings and softmax are in no stage: all devices compute them together for each micro-batch. The encoder's
        output passes through the decoder's stages with its micro-batch, and each normalizes it.
        """
        encoder = Stack(
            name="encoder",
            weights="encoder.blocks",
            num_blocks=self.encoder.p.num_blocks,
            carry={"x": "BTM"},
            takes={},
            enter=self._EnterEncoder,
            run=self._RunEncoder,
        )
        decoder = Stack(
            name="decoder",
            weights="decoder.blocks",
            num_blocks=self.decoder.p.num_blocks,
            carry={"memory": "BSM", "x": "BTM"},
            takes={"memory": "x"},
            enter=self._EnterDecoder,
            run=self._RunDecoder,
        )
        return Parts((encoder, decoder), takes=("x",), loss=self._Loss, metrics=self._Metrics)

    def _EnterEncoder(self, theta: NestedMap, context: Context) -> NestedMap:
        seed = self.FoldSeed(self.FoldSeed(context.seed, "encoder"), "embedding")
        return NestedMap(x=self.Embed(theta, "source_embedding", context.batch.src, seed))

    def _RunEncoder(
        self, weights: NestedMap, theta: NestedMap, carry: NestedMap, context: Context, chunk: Chunk
    ) -> tuple[NestedMap, tf.Tensor, NestedMap]:
        aux = self._EncoderAux(context.batch.src, context.shares)
        seed = self.FoldSeed(context.seed, "encoder")
        x, extras = self.encoder.RunBlocks(weights, carry.x, aux, seed, chunk)
        return NestedMap(x=x), *self._Added(extras)

    def _EnterDecoder(self, theta: NestedMap, context: Context) -> NestedMap:
        name = "target_embedding"
        seed = self.FoldSeed(context.seed, name)
        return NestedMap(x=self.Embed(theta, name, context.batch.tgt, seed))

    def _RunDecoder(
        self, weights: NestedMap, theta: NestedMap, carry: NestedMap, context: Context, chunk: Chunk
    ) -> tuple[NestedMap, tf.Tensor, NestedMap]:
        memory = self.encoder.final_norm.FProp(theta.encoder.final_norm, carry.memory)
        aux = NestedMap(self._DecoderAux(context.batch, context.shares), memory=memory)
        seed = self.FoldSeed(context.seed, "decoder")
        x, extras = self.decoder.RunBlocks(weights, carry.x, aux, seed, chunk)
        return NestedMap(x=x, memory=carry.memory), *self._Added(extras)

    def _Added(self, extras: NestedMap) -> tuple[tf.Tensor, NestedMap]:
        """The auxiliary loss of the blocks' MoE layers, weighted, and their extras [n,...]: no others have any."""
        if not self.p.num_experts:
            return tf.constant(0.0), NestedMap()
        (moe,) = extras.values()
        return self.p.aux_loss_weight * tf.reduce_sum(moe.aux_loss), moe

    def _Loss(
        self, theta: NestedMap, carry: NestedMap, context: Context
    ) -> tuple[tf.Tensor, NestedMap]:
        y = self.decoder.final_norm.FProp(theta.decoder.final_norm, carry.x)
        return self.TokenLosses(theta.target_embedding, y, context.batch.tgt, context.shares)

    def _Metrics(self, sums: NestedMap, loss: tf.Tensor, moe: NestedMap) -> NestedMap:
        """Metrics; with experts also aux_loss, `moe` by stack [L,...], and routers' updates, if any: see BaseTask."""
        metrics = NestedMap(sums, loss=loss)
        if not self.p.num_experts:
            return metrics
        return NestedMap(
            metrics,
            aux_loss=tf.reduce_sum(moe.encoder.aux_loss) + tf.reduce_sum(moe.decoder.aux_loss),
            moe=NestedMap(encoder=moe.encoder.metrics, decoder=moe.decoder.metrics),
            **updates_of(moe.encoder, moe.decoder),
        )

    def CombinedMetrics(self, sums: NestedMap) -> NestedMap:
        if not self.p.num_experts:
            return sums
        moe = {name: combined_metrics(metrics) for name, metrics in sums.moe.items()}
        return NestedMap(sums, moe=NestedMap(moe))

    @staticmethod
    def Predicted(batch: NestedMap) -> NestedMap:
        return batch.tgt

    def _SoftmaxTable(self, theta: NestedMap) -> NestedMap:
        """See TransformerTask: the target embedding's."""
        return theta.target_embedding

    @within("Masks")
    def _DecoderAux(self, batch: NestedMap, shares: NestedMap | None = None) -> NestedMap:
        """Masks, paddings and context, which all decoder layers read (see layers/transformer.py); not the memory."""
        src, tgt = batch.src, batch.tgt
        return NestedMap(
            self_mask=masks.causal_segment_mask(tgt.segment_ids, tgt.segment_pos),
            paddings=masks.paddings(tgt.segment_ids),
            cross_mask=masks.segment_mask(tgt.segment_ids, src.segment_ids),
            **self._Context(tgt, decoder=True),
            **self.Positions(tgt),
            **side_shares(shares, "target"),
        )

    @within("Masks")
    def _EncoderAux(self, src: NestedMap, shares: NestedMap | None = None) -> NestedMap:
        """Masks, paddings and context, which all encoder layers read."""
        return NestedMap(
            self_mask=masks.segment_mask(src.segment_ids, src.segment_ids),
            paddings=masks.paddings(src.segment_ids),
            **self._Context(src, decoder=False),
            **self.Positions(src),
            **side_shares(shares, "source"),
        )

    def _Context(self, row: NestedMap, decoder: bool) -> dict[str, NestedMap]:
        """`context` for the layers, of a side's tensors, if its router needs any."""
        needs = self.Needs(self.p, decoder)
        return {"context": NestedMap({k: row[k] for k in needs if k in row})} if needs else {}

    # --- decoding

    def PackWeights(self, theta: NestedMap, packing: Packing) -> NestedMap:
        """See BaseLayer; the softmax's table is the target embedding's."""
        table = self.softmax.PackWeights(theta.target_embedding, packing)
        return NestedMap(self.PackChildren(theta, packing), target_embedding=table)

    @scoped
    def Encode(self, theta: NestedMap, src: NestedMap) -> NestedMap:
        """The encoder's output for unpacked rows: memory [B,S,M], segment_ids int32 [B,S], and task_ids int32 [B],
        where the decoder needs them."""
        x = self._EnterEncoder(theta, Context(NestedMap(src=src))).x
        memory, _ = self.encoder.FProp(theta.encoder, x, self._EncoderAux(src))
        encoded = NestedMap(memory=memory, segment_ids=src.segment_ids)
        if "task_ids" in self.Needs(self.p, decoder=True):
            encoded.task_ids = src.task_ids[:, 0]  # a row holds one sentence
        return encoded

    @scoped
    def InitCache(
        self, theta: NestedMap, encoded: NestedMap, beam_size: int, max_length: int
    ) -> NestedMap:
        """The decoder's keys and values: empty ones for `beam_size * max_length` positions, and the memory's."""
        batch = dim(encoded.memory, 0)
        first = tf.fill([batch, 1], 1)
        tasks = {"task_ids": encoded.task_ids} if "task_ids" in encoded else {}
        return NestedMap(
            **tasks,
            decoder=self.decoder.InitCache(batch, max_length, beam_size),
            memory=self.decoder.PrecomputeMemory(theta.decoder, encoded.memory),
            cross_mask=masks.segment_mask(first, encoded.segment_ids),
        )

    def CacheLetters(self) -> NestedMap:
        """The letters of InitCache's tensors, in its structure (see attention.py; T is 1)."""
        tasks = {"task_ids": "B"} if "task_ids" in self.Needs(self.p, decoder=True) else {}
        return NestedMap(
            **tasks,
            decoder=self.decoder.CacheLetters(),
            memory=self.decoder.MemoryLetters(),
            cross_mask="BTS",
        )

    @scoped
    def ExtendStep(
        self, theta: NestedMap, ids: tf.Tensor, cache: NestedMap, time: tf.Tensor, mask: tf.Tensor
    ) -> tuple[tf.Tensor, NestedMap]:
        """One target position for each hypothesis of the flat beam search (appendix A.1).

        Args:
            ids: int32 [B,J], the tokens at `time`.
            time: int32 scalar, the position.
            mask: bool [B,J,J*max_length], the flat positions that each hypothesis attends to,
                itself included.

        Returns:
            float32 logits [B,J,V] of the next token, and the cache.
        """
        at = tf.zeros_like(ids) + tf.reshape(time, [1, -1])
        x = self.position.Add(self.target_embedding.FProp(theta.target_embedding, ids), at)
        row = NestedMap(ids=ids)
        if "task_ids" in cache:
            row.task_ids = tf.tile(cache.task_ids[:, tf.newaxis], [1, tf.shape(ids)[1]])
        aux = NestedMap(
            self_mask=mask, cross_mask=cache.cross_mask, **self._Context(row, decoder=True)
        )
        y, decoder = self.decoder.ExtendStep(
            theta.decoder, x, cache.decoder, time, aux, cache.memory
        )
        logits = self.softmax.FProp(theta.target_embedding, y)
        return logits, NestedMap(cache, decoder=decoder)

    # --- costs

    def FlopsByPart(self, batch: NestedMap) -> dict[str, int]:
        """See BaseTask: parts such as 'encoder.moe'."""
        memory, x = ((*side.ids.shape, self.p.model_dim) for side in (batch.src, batch.tgt))
        found = experts.flops_of("encoder", self.encoder.p, memory)
        found |= experts.flops_of("decoder", self.decoder.p, x, memory)
        found["softmax"] = softmax.Softmax.FPropMeta(self.softmax.p, x).flops
        return found


def _router_of(p: HyperParams, decoder: bool) -> tuple[str, HyperParams]:
    """The name and the Params of the router of one side."""
    own = decoder and p.decoder_router is not None
    return ("decoder_router", p.decoder_router) if own else ("moe.router", p.moe.router)
