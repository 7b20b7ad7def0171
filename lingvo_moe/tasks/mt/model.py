"""The MoE Transformer that translates (paper section 2): encoder, decoder, and an MoE in every
second feed-forward layer.

Letters: B batch, T target time, S source time, J hypotheses, M model, V vocabulary.
"""

from collections.abc import Sequence

import tensorflow as tf

from lingvo_moe.core import randomness
from lingvo_moe.core.base_task import BaseTask
from lingvo_moe.core.hyperparams import InstantiableParams
from lingvo_moe.core.layers import attention, embedding, feed_forward, masks, softmax, transformer
from lingvo_moe.core.moe import layer as moe_layer
from lingvo_moe.core.nested_map import NestedMap


class MtModel(BaseTask):
    """An encoder-decoder Transformer from packed source rows to packed target rows.

    `FProp(theta, batch, seed)` takes int32 `batch.src.{ids,segment_ids,segment_pos}` [B,S] and
    `batch.tgt.{ids,labels,segment_ids,segment_pos}` [B,T], where segment 0 is padding, and returns
    the training loss and float32 metrics.
    """

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("source_vocab_size", 64000, "Source SentencePiece vocabulary.")
        p.Define("target_vocab_size", 32000, "Target SentencePiece vocabulary, V.")
        p.Define("model_dim", 1024, "M.")
        p.Define("hidden_dim", 8192, "H, of dense and expert feed-forward layers.")
        p.Define("num_heads", 16, "N, attention heads.")
        p.Define("key_dim", 128, "K, per head.")
        p.Define("num_encoder_layers", 18, "Encoder layers, each attention + feed-forward.")
        p.Define("num_decoder_layers", 18, "Decoder layers.")
        p.Define("num_experts", 2048, "E; 0: every feed-forward layer is dense.")
        p.Define("num_groups", 2048, "G: tokens are routed in G independent groups, in training.")
        p.Define("moe", moe_layer.MoELayer.Params(), "The MoE layer; sizes are set from above.")
        p.Define(
            "aux_loss_weight",
            0.01,
            "k: loss = nll + k * (sum of the MoE layers' auxiliary losses).",
        )
        p.Define("dropout", 0.1, "Rate on embeddings, residual branches and hidden layers.")
        p.Define("attention_dropout", 0.0, "Rate on attention probabilities.")
        p.Define("label_smoothing", 0.1, "Probability spread evenly over the vocabulary.")
        p.Define("repeat", True, "Layers are scanned over stacked weights and recomputed backward.")
        return p

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        p = self.p
        for name in ("source_embedding", "target_embedding"):
            size = p.source_vocab_size if name.startswith("source") else p.target_vocab_size
            self.CreateChild(
                name, embedding.Embedding.Params().Set(vocab_size=size, model_dim=p.model_dim)
            )
        self.CreateChild(
            "position", embedding.PositionalEmbedding.Params().Set(model_dim=p.model_dim)
        )
        self.CreateChild("encoder", self._stack(p.num_encoder_layers, decoder=False))
        self.CreateChild("decoder", self._stack(p.num_decoder_layers, decoder=True))
        self.CreateChild(
            "softmax",
            softmax.TiedSoftmax.Params().Set(
                vocab_size=p.target_vocab_size,
                model_dim=p.model_dim,
                label_smoothing=p.label_smoothing,
            ),
        )

    def _stack(self, num_layers: int, decoder: bool) -> InstantiableParams:
        """Layers in blocks: one dense layer, or a dense one and an MoE."""
        p = self.p
        block = [self._layer(moe=False, decoder=decoder)]
        if p.num_experts:
            block.append(self._layer(moe=True, decoder=decoder))
        side = "decoder" if decoder else "encoder"
        if num_layers % len(block):
            raise ValueError(
                f"{self.path}.num_{side}_layers={num_layers}: with experts, layers come in "
                "pairs (dense, MoE); give an even number"
            )
        return transformer.TransformerStack.Params().Set(
            num_blocks=num_layers // len(block),
            block=block,
            repeat=p.repeat,
            model_dim=p.model_dim,
        )

    def _layer(self, moe: bool, decoder: bool) -> InstantiableParams:
        p = self.p
        if moe:
            ffn = p.moe.Copy().Set(num_experts=p.num_experts, num_groups=p.num_groups)
        else:
            ffn = feed_forward.FeedForward.Params()
        ffn.Set(model_dim=p.model_dim, hidden_dim=p.hidden_dim, relu_dropout=p.dropout)
        atten = attention.MultiHeadAttention.Params().Set(
            model_dim=p.model_dim,
            num_heads=p.num_heads,
            key_dim=p.key_dim,
            dropout=p.attention_dropout,
        )
        return transformer.TransformerLayer.Params().Set(
            model_dim=p.model_dim,
            attention=atten,
            has_cross_attention=decoder,
            ffn_tpl=ffn,
            residual_dropout=p.dropout,
        )

    # --- training

    def FProp(
        self, theta: NestedMap, batch: NestedMap, seed: tf.Tensor | None = None
    ) -> tuple[tf.Tensor, NestedMap]:
        """Returns the loss (float32 scalar) and metrics: loss, nll, aux_loss, accuracy, tokens, and
        `moe` by stack [L,...]."""
        p = self.p
        src, tgt = batch.src, batch.tgt
        memory, encoder_extras = self._encode(theta, src, self.FoldSeed(seed, "encoder"))
        x = self._embed(theta, "target_embedding", tgt, self.FoldSeed(seed, "target_embedding"))
        aux = NestedMap(
            self_mask=masks.causal_mask(tgt.segment_ids),
            paddings=masks.paddings(tgt.segment_ids),
            memory=memory,
            cross_mask=masks.segment_mask(tgt.segment_ids, src.segment_ids),
        )
        y, decoder_extras = self.decoder.FProp(
            theta.decoder, x, aux, seed=self.FoldSeed(seed, "decoder")
        )
        out = self.softmax.FProp(theta.target_embedding, y, tgt.labels)
        real = tf.cast(tgt.segment_ids > 0, tf.float32)
        tokens = tf.reduce_sum(real)
        per_token = 1.0 / tf.maximum(tokens, 1.0)
        smoothed = tf.reduce_sum(out.xent * real) * per_token
        metrics = NestedMap(
            nll=tf.reduce_sum(out.nll * real) * per_token,
            accuracy=tf.reduce_sum(out.correct * real) * per_token,
            tokens=tokens,
        )
        loss = smoothed
        if p.num_experts:
            aux_loss = tf.constant(0.0)
            metrics.moe = NestedMap()
            for name, extras in (("encoder", encoder_extras), ("decoder", decoder_extras)):
                aux_loss += tf.reduce_sum(extras.aux_loss)
                metrics.moe[name] = extras.metrics
            metrics.aux_loss = aux_loss
            loss += p.aux_loss_weight * aux_loss
        metrics.loss = loss
        return loss, metrics

    def _embed(
        self, theta: NestedMap, table: str, row: NestedMap, seed: tf.Tensor | None
    ) -> tf.Tensor:
        """Token plus position embeddings [B,T,M], dropped out."""
        lookup = self.children[table]
        ids = self.Shard(row.ids, "BT")
        x = lookup.EmbLookup(theta[table], ids) + self.position.FProp(
            theta.position, self.Shard(row.segment_pos, "BT")
        )
        return self.Shard(randomness.dropout(x, self.p.dropout, seed), "BTM")

    def _encode(
        self, theta: NestedMap, src: NestedMap, seed: tf.Tensor | None
    ) -> tuple[tf.Tensor, NestedMap]:
        x = self._embed(theta, "source_embedding", src, self.FoldSeed(seed, "embedding"))
        aux = NestedMap(
            self_mask=masks.segment_mask(src.segment_ids, src.segment_ids),
            paddings=masks.paddings(src.segment_ids),
        )
        return self.encoder.FProp(theta.encoder, x, aux, seed=seed)

    # --- decoding

    def Encode(self, theta: NestedMap, src: NestedMap) -> NestedMap:
        """The encoder's output for unpacked rows: NestedMap(memory [B,S,M], segment_ids int32
        [B,S])."""
        memory, _ = self._encode(theta, src, None)
        return NestedMap(memory=memory, segment_ids=src.segment_ids)

    def InitCache(
        self, theta: NestedMap, encoded: NestedMap, beam_size: int, max_length: int
    ) -> NestedMap:
        """The decoder's keys and values: empty ones for `beam_size * max_length` positions, and
        those of the memory."""
        return NestedMap(
            decoder=self.decoder.InitCache(
                theta.decoder, encoded.memory, beam_size=beam_size, max_length=max_length
            ),
            cross_mask=masks.segment_mask(
                tf.ones_like(encoded.segment_ids[:, :1]), encoded.segment_ids
            ),
        )

    def ExtendStep(
        self, theta: NestedMap, ids: tf.Tensor, cache: NestedMap, time: tf.Tensor, mask: tf.Tensor
    ) -> tuple[tf.Tensor, NestedMap]:
        """One target position for each hypothesis of the flat beam search (appendix A.1).

        Args:
            theta: of the model.
            ids: int32 [B,J], the tokens at `time`.
            cache: as InitCache gave it, or the last step.
            time: int32 scalar, the position.
            mask: bool [B,J,J*max_length], the flat positions that each hypothesis attends to,
                itself included.

        Returns:
            float32 logits [B,J,V] of the next token, and the cache.
        """
        position = tf.fill(tf.shape(ids), time)
        x = self.target_embedding.EmbLookup(theta.target_embedding, ids)
        x += self.position.FProp(theta.position, position)
        aux = NestedMap(self_mask=mask, cross_mask=cache.cross_mask)
        y, decoder = self.decoder.ExtendStep(theta.decoder, x, cache.decoder, time, aux)
        logits = self.softmax.Logits(theta.target_embedding, y)
        return logits, NestedMap(decoder=decoder, cross_mask=cache.cross_mask)

    # --- specs

    def BatchSplit(self) -> tuple[str | None, ...]:
        """How a [B,T] input is cut, as `VariableSpec.split`."""
        from lingvo_moe.core.sharding import dims_mapping

        return dims_mapping("BT", self.p.activation_split)  # type: ignore[return-value]

    @classmethod
    def FPropMeta(cls, params: InstantiableParams, *input_shapes: Sequence[int]) -> NestedMap:
        """Forward operations for source [B,S] and target [B,T] rows; out_shapes is that of the
        logits."""
        model = params.Copy().Set(name=params.name or "model").Instantiate()
        (b, s), (_, t) = input_shapes
        m, v = params.model_dim, params.target_vocab_size
        enc = transformer.TransformerStack.FPropMeta(model.encoder.p, (b, s, m))
        dec = transformer.TransformerStack.FPropMeta(model.decoder.p, (b, t, m), (b, s, m))
        return NestedMap(flops=enc.flops + dec.flops + 2 * b * t * m * v, out_shapes=((b, t, v),))
