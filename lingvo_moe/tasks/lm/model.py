"""The language model: one stack of causal self-attention and feed-forward layers, as in GPipe (Huang et al. 2019),
with experts in every n-th feed-forward layer if it has some.

Letters: B batch, T time, L layers, M model, V vocabulary.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from lingvo_moe.core.base_layer import scoped, within
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.class_names import ClassesByName
from lingvo_moe.core.config.hyperparams import InstantiableParams, ParamError, Params as HyperParams
from lingvo_moe.core.input.base_input import BaseInput
from lingvo_moe.core.kernels.blockwise import BLOCK, FROM_LENGTH
from lingvo_moe.core.kernels.weights import Packing
from lingvo_moe.core.layers import masks, softmax
from lingvo_moe.core.layers.attention import AUTO, MultiHeadAttention
from lingvo_moe.core.layers.repeat import Chunk
from lingvo_moe.core.moe.losses_and_metrics import combined_metrics
from lingvo_moe.core.nested_map import NestedMap, flatten, map_structure, updates_of
from lingvo_moe.core.pipeline.parts import Context, Parts, Stack
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.task.base_task import TaskError
from lingvo_moe.tasks import experts
from lingvo_moe.tasks.lm.multi_token import MultiTokenHead
from lingvo_moe.tasks.transformer_shrinking import parts, sample_rows, shrink_layers
from lingvo_moe.tasks.transformer_task import TransformerTask, share_of_token

_CHOICES = (AUTO, "full")  # of attention_block, beside numbers
_LAYERS = "lingvo_moe.core.layers"
ATTENTIONS = ClassesByName(
    {
        "multi_head": f"{_LAYERS}.attention.MultiHeadAttention",
        "extended": f"{_LAYERS}.extended_attention.ExtendedAttention",
        "latent": f"{_LAYERS}.latent_attention.LatentAttention",
    }
)


class LmModel(TransformerTask):
    """A decoder-only Transformer, which predicts the next token of packed texts.

    `FProp(theta, batch, seed)` takes int32 `batch.{ids,labels,segment_ids,segment_pos}` [B,T], where segment 0 is
    padding, and returns the training loss and float32 metrics. A token sees those before it in its own segment.
    """

    SIZES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **TransformerTask.SIZES,
        "V": ("task.vocab_size",),
    }
    KIND = "language"
    EXAMPLE = "lm.MoEDemo"
    HAS_SOURCE = False
    STACKS: ClassVar[Mapping[str, str]] = {"decoder": "num_layers"}

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("vocab_size", 32000, "V.", checks.IDS)
        p.Define("num_layers", 6, "L, layers of self-attention + feed-forward.", checks.LAYERS)
        p.Define(
            "tied_softmax",
            True,
            "Whether the softmax uses the table of embeddings. False: it has a table of its own.",
        )
        experts.define_experts(p, num_experts=0, num_groups=0)
        p.Define(
            "moe_every",
            1,
            "With experts: every n-th layer has them, the last of each n; the others are dense.",
            checks.SIZE,
        )
        p.Define(
            "dense_first_layers",
            0,
            "With experts: how many layers, before those that `moe_every` counts, are dense.",
            checks.COUNT,
        )
        p.OnlyWith("moe_every dense_first_layers", experts.without_experts)
        _define_attention(p)
        p.Define(
            "multi_token_weight",
            0.0,
            "The weight in the loss of a head for the token after the next (multi_token.py); 0: there is none.",
            checks.NOT_NEGATIVE,
        )
        return p

    def CreateLayers(self) -> None:
        """See TransformerTask."""
        p = self.p
        if p.attention_dropout and p.attention_block not in _CHOICES:
            why = "blocks have no dropout on probabilities; set task.attention_dropout=0, or this to full"
            raise ParamError("task.attention_block", str(p.attention_block), why)
        self.CreateChild("embedding", self.EmbeddingParams(p.vocab_size))
        self.CreateChild("position", self.PositionParams())
        self.CreateChild("decoder", self._Stack())
        if p.multi_token_weight:
            layer = self._Layer(self.LayersOfBlock(p))
            head = MultiTokenHead.Params().Set(model_dim=p.model_dim, norm_tpl=p.norm.Copy())
            self.CreateChild("multi_token", head.Set(layer=layer))
        self.CreateChild("softmax", self.SoftmaxParams(p.vocab_size, tied=p.tied_softmax))

    def _Stack(self) -> InstantiableParams:
        p = self.p
        block = [self._Layer(number) for number in range(1, self.LayersOfBlock(p) + 1)]
        before = self.LayersBefore(p)
        left = p.num_layers - before
        if left < 1 or left % len(block):
            than = f", beside the {before} of task.dense_first_layers" if before else ""
            raise ParamError(
                "task.num_layers",
                str(p.num_layers),
                f"must be a multiple of {len(block)}, after which task.moe_every and task.nth_attention_every begin "
                f"again{than}",
            )
        stack = self.StackParams(block, left // len(block))
        return stack.Set(first=self._Layer(0), num_first=before) if before else stack

    def _Layer(self, number: int) -> InstantiableParams:
        """The layer of that number, from 1, in a block; 0: one of the first layers."""
        p, ffn, atten = self.p, None, self.p.attention
        if number and p.num_experts and number % p.moe_every == 0:
            ffn = experts.moe_params(p, "moe.router", p.moe.router, True, p.vocab_size)
        if number and p.nth_attention is not None and number % p.nth_attention_every == 0:
            atten = p.nth_attention
        atten = atten.Copy()
        if p.attention_block not in _CHOICES:
            atten.block = p.attention_block
        if "norm_epsilon" in atten:
            atten.norm_epsilon = p.norm.epsilon
        return self.LayerParams(ffn, atten=atten)

    @classmethod
    def LayersOfBlock(cls, task: HyperParams) -> int:
        """See TransformerTask: the layers after which experts and attention begin again."""
        return math.lcm(
            task.moe_every if task.num_experts else 1,
            task.nth_attention_every if task.nth_attention is not None else 1,
        )

    @classmethod
    def LayersBefore(cls, task: HyperParams) -> int:
        """See TransformerTask: the first layers, which are dense."""
        return task.dense_first_layers if task.num_experts else 0

    @classmethod
    def GrowsFrom(cls, task: HyperParams) -> dict[str, Any]:
        """See BaseTask: without first layers, nth_attention would be in other layers than here."""
        elsewhere = cls.LayersBefore(task) and task.nth_attention is not None
        return {} if elsewhere else super().GrowsFrom(task)

    # --- the contract of BaseTask

    def SizeParams(self, path: str, letter: str) -> tuple[str, ...]:
        if letter == "L" and "decoder.first" in path:
            return ("task.dense_first_layers",)
        return super().SizeParams(path, letter)

    def MetricLayers(self) -> dict[str, list[str]]:
        """See BaseTask: the layers with experts, counted with the dense ones from 0."""
        p = self.p
        if not p.num_experts:
            return {}
        numbers = range(self.LayersBefore(p) + p.moe_every - 1, p.num_layers, p.moe_every)
        return {"moe/decoder": [f"layer_{i}" for i in numbers]}

    @classmethod
    def CheckInput(cls, task: HyperParams, inputs: HyperParams) -> None:
        """See BaseTask: the model has an embedding for each id, and batches fall into equal groups."""
        super().CheckInput(task, inputs)
        experts.check_groups(task, inputs.batch_size, inputs.target_length, "target_length")
        if inputs.target_vocab_size > task.vocab_size:
            raise TaskError(
                f"input.target_vocab_size={inputs.target_vocab_size} is more than task.vocab_size={task.vocab_size}: "
                "the model has no embedding for some of the ids; set both to the same"
            )

    @classmethod
    def Shrink(cls, task: HyperParams, inputs: HyperParams, mesh: Mesh) -> None:
        """See BaseTask: few layers, heads, experts and tokens."""
        size = shrink_layers(task, mesh)
        groups = experts.shrink_experts(task, size)
        task.Set(vocab_size=size("V", 20))
        if task.num_experts:
            task.dense_first_layers = min(task.dense_first_layers, 1)
        layers = cls.LayersOfBlock(task)
        blocks = max(task.pipeline.stages * task.pipeline.repeats, task.num_layers // layers)
        task.num_layers = cls.LayersBefore(task) + blocks * layers
        inputs.Set(
            batch_size=math.lcm(parts(task, "B", mesh), groups or 1),
            target_length=size("T", 8),
            target_vocab_size=task.vocab_size,
        )

    def SampleBatch(self, inputs: BaseInput, rng: np.random.RandomState) -> NestedMap:
        """See BaseTask: random ids; two texts a row, and padding at its end."""
        return sample_rows(inputs.BatchSpec(), {"": self.p.vocab_size}, rng)

    def BatchCounts(self, batch: NestedMap) -> dict[str, int]:
        rows, length = batch.ids.shape
        return {"tokens": rows * length}

    def LargestInside(self, batch: NestedMap) -> int:
        """See TransformerTask: blocks of attention make no such scores."""
        return 0 if self._ByBlocks(batch.ids.shape[1]) else super().LargestInside(batch)

    def Units(self, batch: NestedMap) -> NestedMap:
        """See BaseTask: tokens that are not padding; with experts also the groups with a token."""
        return experts.units(self.p, tf.cast(batch.segment_ids > 0, tf.float32))

    # --- training

    def Forward(self) -> Parts:
        """See TransformerTask: one stack. Embedding, first layers and softmax are in no stage."""
        stack = Stack(
            name="decoder",
            weights="decoder.blocks",
            num_blocks=self.decoder.p.num_blocks,
            carry={"x": "BTM"},
            takes={},
            enter=self._Enter,
            run=self._RunBlocks,
        )
        return Parts(
            stacks=(stack,),
            takes=("x",),
            loss=self._Loss,
            metrics=self._Metrics,
        )

    def _Enter(self, theta: NestedMap, context: Context) -> NestedMap:
        seed = self.FoldSeed(context.seed, "embedding")
        x = self.Embed(theta, "embedding", context.batch, seed)
        if self.decoder.p.num_first:
            aux = self.Aux(context.batch, context.shares)
            seed = self.FoldSeed(context.seed, "decoder")
            x = self.decoder.RunFirst(theta.decoder, x, aux, seed)
        return NestedMap(x=x)

    def Positions(self, row: NestedMap) -> dict[str, tf.Tensor]:
        """See TransformerTask: also if some attention goes by them otherwise."""
        attentions = [p for p in (self.p.attention, self.p.nth_attention) if p is not None]
        if any(p.cls.NEEDS_POSITIONS for p in attentions):
            return {"positions": row.segment_pos}
        return super().Positions(row)

    def _RunBlocks(
        self, weights: NestedMap, theta: NestedMap, carry: NestedMap, context: Context, chunk: Chunk
    ) -> tuple[NestedMap, tf.Tensor, NestedMap]:
        del theta
        aux, seed = self.Aux(context.batch, context.shares), self.FoldSeed(context.seed, "decoder")
        x, extras = self.decoder.RunBlocks(weights, carry.x, aux, seed, chunk)
        if not self.p.num_experts:
            return NestedMap(x=x), tf.constant(0.0), NestedMap()
        aux_loss = tf.add_n([tf.reduce_sum(moe.aux_loss) for moe in extras.values()])
        return NestedMap(x=x), self.p.aux_loss_weight * aux_loss, extras

    def _Loss(
        self, theta: NestedMap, carry: NestedMap, context: Context
    ) -> tuple[tf.Tensor, NestedMap]:
        y = self.decoder.final_norm.FProp(theta.decoder.final_norm, carry.x)
        table = self._SoftmaxTable(theta)
        loss, metrics = self.TokenLosses(table, y, context.batch, context.shares)
        if not self.p.multi_token_weight:
            return loss, metrics
        more, metrics.multi_token = self._MultiTokenLoss(theta, table, y, context)
        return loss + more, metrics

    @within("Loss")
    def _MultiTokenLoss(
        self, theta: NestedMap, table: NestedMap, x: tf.Tensor, context: Context
    ) -> tuple[tf.Tensor, NestedMap]:
        """The loss that the head for the token after the next adds; its nll, and the updates of its layer.

        Means are over all tokens, also over the last one of a text, which has no token after the next.
        """
        batch, seed = context.batch, self.FoldSeed(context.seed, "multi_token")
        tokens = self.embedding.FProp(theta.embedding, batch.labels)
        tokens = self.position.Add(tokens, batch.segment_pos + 1)
        aux = self.Aux(batch, context.shares)
        y, extras = self.multi_token.FProp(theta.multi_token, x, tokens, aux, seed)
        ahead = [tf.pad(row[:, 1:], [[0, 0], [0, 1]]) for row in (batch.labels, batch.segment_ids)]
        real = tf.cast(batch.segment_ids > 0, tf.float32)
        there = real * tf.cast(tf.equal(ahead[1], batch.segment_ids), tf.float32)
        xent, nll, _ = self.softmax.Losses(table, y, ahead[0], there)
        per_token = share_of_token(tf.reduce_sum(real), context.shares)
        loss = self.p.multi_token_weight * per_token * tf.reduce_sum(xent)
        if extras:
            loss += self.p.aux_loss_weight * extras.aux_loss
        return loss, NestedMap(nll=per_token * tf.reduce_sum(nll), **updates_of(extras))

    def _Metrics(self, sums: NestedMap, loss: tf.Tensor, extras: NestedMap) -> NestedMap:
        """Metrics; with experts also aux_loss, `moe.decoder` [L,...], and routers' updates, if any: see BaseTask."""
        metrics = NestedMap(sums, loss=loss)
        ahead = metrics.pop("multi_token", NestedMap())
        if ahead:
            metrics.multi_token_nll = ahead.nll
        if not self.p.num_experts:
            return metrics
        layers = list(extras.decoder.values())  # each of a block, [n,...]
        aux_loss = tf.add_n([tf.reduce_sum(moe.aux_loss) for moe in layers])
        moe = NestedMap(decoder=map_structure(_in_order, *(moe.metrics for moe in layers)))
        return NestedMap(metrics, aux_loss=aux_loss, moe=moe, **updates_of(*layers, ahead))

    def CombinedMetrics(self, sums: NestedMap) -> NestedMap:
        if not self.p.num_experts:
            return sums
        return NestedMap(sums, moe=NestedMap(decoder=combined_metrics(sums.moe.decoder)))

    def _SoftmaxTable(self, theta: NestedMap) -> NestedMap:
        """See TransformerTask: those of the embedding, or its own."""
        return theta.embedding if self.p.tied_softmax else theta.softmax

    @within("Masks")
    def Aux(self, batch: NestedMap, shares: NestedMap | None = None) -> NestedMap:
        """Masks, paddings and context, which all layers read (see layers/transformer.py)."""
        rows = NestedMap(segments=batch.segment_ids, positions=batch.segment_pos)
        by_blocks = self._ByBlocks(batch.segment_ids.shape[1])
        aux = NestedMap(
            self_mask=rows if by_blocks else masks.causal_segment_mask_of(rows, rows),
            paddings=masks.paddings(batch.segment_ids),
            **self.Positions(batch),
            **self._Context(batch),
        )
        if self.p.num_experts and shares is not None:
            aux.shares = shares
        return aux

    def _ByBlocks(self, length: int | None) -> bool:
        """Whether attention is computed by blocks in rows of that length."""
        chosen = self.p.attention_block
        if chosen != AUTO:
            return chosen != "full"
        return (length or 0) >= FROM_LENGTH and not self.p.attention_dropout

    def _Context(self, row: NestedMap) -> dict[str, NestedMap]:
        """`context` for the layers, if the router needs any."""
        router = self.p.moe.router
        needs = router.cls.Needs(router) if self.p.num_experts else ()
        return {"context": NestedMap({k: row[k] for k in needs if k in row})} if needs else {}

    # --- decoding

    def PackWeights(self, theta: NestedMap, packing: Packing) -> NestedMap:
        """See BaseLayer; the table of a tied softmax is the embedding's."""
        packed = self.PackChildren(theta, packing)
        if self.p.tied_softmax:
            packed.embedding = self.softmax.PackWeights(theta.embedding, packing)
        return packed

    @scoped
    def InitCache(self, batch: int | tf.Tensor, length: int) -> list[list[NestedMap]]:
        """Empty caches for `length` tokens of `batch` texts; see TransformerStack."""
        return self.decoder.InitCache(batch, length)

    def CacheLetters(self) -> list[list[NestedMap]]:
        """The letters of InitCache's tensors."""
        return self.decoder.CacheLetters()

    @scoped
    def ExtendStep(
        self, theta: NestedMap, ids: tf.Tensor, cache: Any, time: tf.Tensor, mask: tf.Tensor
    ) -> tuple[tf.Tensor, Any]:
        """One token of each text, or of each hypothesis of the flat beam search; or the first tokens of a text at once.

        Args:
            ids: int32 [B,J], the tokens at `time`; or [B,P].
            cache: as InitCache gave it, or the last step.
            time: int32 scalar, the position; or int32 [P], consecutive ones, with one hypothesis.
            mask: bool [B, J or P, J*length], the flat positions that each looks at, its own included.

        Returns:
            float32 logits [B, J or P, V] of the next tokens, and the cache.
        """
        at = tf.zeros_like(ids) + tf.reshape(time, [1, -1])
        x = self.position.Add(self.embedding.FProp(theta.embedding, ids), at)
        aux = NestedMap(self_mask=mask, **self._Context(NestedMap(ids=ids)))
        y, cache = self.decoder.ExtendStep(theta.decoder, x, cache, time, aux)
        return self.softmax.FProp(self._SoftmaxTable(theta), y), cache

    # --- costs

    def FlopsByPart(self, batch: NestedMap) -> dict[str, int]:
        """See BaseTask: parts such as 'decoder.ffn'."""
        x = (*batch.ids.shape, self.p.model_dim)
        found = experts.flops_of("decoder", self.decoder.p, x)
        found["softmax"] = softmax.Softmax.FPropMeta(self.softmax.p, x).flops
        if self.p.multi_token_weight:
            head = MultiTokenHead.FPropMeta(self.multi_token.p, x)
            found["multi_token"] = head.flops - head.dispatch
            found["multi_token.dispatch"] = head.dispatch
            found["softmax"] *= 2
        return found

    def CacheBytes(self) -> int:
        return sum(
            x.shape.num_elements() * x.dtype.size for x in flatten(self.decoder.InitCache(1, 1))
        )


def _define_attention(p: InstantiableParams) -> None:
    """The kinds of self-attention; sizes, positions and dropout are set from above."""
    p.Define(
        "attention",
        MultiHeadAttention.Params(),
        "Self-attention of the layers.",
        choices=ATTENTIONS,
    )
    p.Define(
        "attention_block",
        "auto",
        "Tokens of a block of attention, whose memory then grows with the length of rows and not with its square "
        f"(kernels/blockwise.py). full: no blocks. auto: in rows of at least {FROM_LENGTH} tokens, unless "
        "there is attention_dropout, which blocks do not have; by the fused kernel of TPUs from v4 on "
        f"(kernels/pallas/attention.py), elsewhere in blocks of {BLOCK}.",
        checks.SizeOr(_CHOICES),
    )
    p.Define(
        "nth_attention",
        None,
        "Self-attention of every nth_attention_every-th layer, after the dense first ones; None: as of the others.",
        choices=ATTENTIONS,
    )
    p.Define("nth_attention_every", 2, "n of nth_attention.", checks.SIZE)
    p.OnlyWith(
        "nth_attention_every", lambda p: "nth_attention=None" if p.nth_attention is None else ""
    )
    sources = {
        "model_dim": "model_dim",
        "num_heads": "num_heads",
        "num_kv_heads": "num_kv_heads",
        "dim_per_head": "key_dim",
        "position": "position",
        "block": "attention_block",
        "atten_dropout_prob": "attention_dropout",
        "norm_epsilon": "norm.epsilon",
    }
    for name, source in sources.items():
        p.Derive(f"attention.{name}", source)
        p.Derive(f"nth_attention.{name}", source)


def _in_order(*layers: tf.Tensor) -> tf.Tensor:
    """Interleaves the rows of a block's layers, [n,...] each: [L,...], in the order of all layers."""
    if len(layers) == 1:
        return layers[0]
    stacked = tf.stack(layers, axis=1)
    return tf.reshape(stacked, [-1, *stacked.shape[2:]])
