"""A Transformer: stacks of layers over packed rows of token ids, their embeddings, loss and decoding steps.

Letters: B batch, T time, S source time, J hypotheses, P consecutive tokens, M model, V vocabulary.
"""

import contextlib
import functools
import operator
from collections.abc import Iterable
from typing import ClassVar

import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.base_layer import scoped, within
from lingvo_moe.core.config import param_text
from lingvo_moe.core.config.checks import ParamError, nearest
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params as HyperParams
from lingvo_moe.core.kernels.blockwise import FROM_LENGTH
from lingvo_moe.core.kernels.weights import Packing
from lingvo_moe.core.layers import embedding, kept, masks, positions, softmax
from lingvo_moe.core.layers.attention import AUTO, positions_of
from lingvo_moe.core.layers.repeat import Chunk
from lingvo_moe.core.moe.routers.losses_and_metrics import noting_choices, recorded_experts
from lingvo_moe.core.nested_map import NestedMap, map_structure, updates_of
from lingvo_moe.core.pipeline import params as pipeline
from lingvo_moe.core.pipeline.parts import Context, Parts, Stack
from lingvo_moe.core.task import adapters
from lingvo_moe.core.task.base_task import BaseTask
from lingvo_moe.tasks.transformer import stacks
from lingvo_moe.tasks.transformer.multi_token import MultiTokenHead
from lingvo_moe.tasks.transformer.params import BLOCK_WORDS, define_parameters
from lingvo_moe.tasks.transformer.stacks import TaskStack, layers_before, layers_of_block


class TransformerModel(BaseTask):
    """A model of one stack or two: embeddings, layers, loss, metrics and the steps of decoding.

    A subclass says in `STACKS` which stacks it has; the loss is that of the labels of the last one's rows, unless
    `CreateHead` and `LossTerms` say otherwise. `FProp` runs the stacks in order, and a pipeline in stages.
    """

    STACKS: ClassVar[tuple[TaskStack, ...]] = ()
    # The defaults of num_experts, num_groups and moe_every.
    EXPERTS: ClassVar[tuple[int, int, int]] = (0, 0, 1)

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        define_parameters(p, *cls.EXPERTS)
        return p

    def __init__(self, params: InstantiableParams):
        if params.repeat is False and params.remat != kept.FULL:
            raise ParamError(
                "task.remat",
                param_text.shown(params.remat),
                "has no effect with task.repeat=False, which keeps every activation; set task.repeat=True, or "
                f"task.remat={kept.FULL}",
            )
        if params.adapter_rank and params.pipeline.stages > 1:
            why = "goes with task.pipeline.stages=1"
            raise ParamError("task.adapter_rank", str(params.adapter_rank), why)
        if params.pipeline.stages > 1:  # of whose layers each stage has its own
            vocabularies = [params.Get(stack.vocab_size) for stack in self.STACKS]
            params = pipeline.with_stage_axes(params, V=vocabularies)
        super().__init__(params)
        self._CheckAttention()
        for stack in self.STACKS:
            if self.Table(stack) not in self.children:
                table = embedding.Embedding.Params().Set(vocab_size=self.p.Get(stack.vocab_size))
                table.Set(model_dim=self.p.model_dim, scale=self.p.embedding_scale)
                self.CreateChild(self.Table(stack), table)
        position = self.p.position.Copy()
        if issubclass(position.cls, positions.ScoreBias):
            position = positions.Positions.Params()  # embeddings take none
        position.cls.SetModelDim(position, self.p.model_dim)
        self.CreateChild("position", position)
        for stack in self.STACKS:
            self.CreateChild(stack.name, stacks.stack_params(self.p, stack))
        self.CreateHead(self.STACKS[-1])
        self._CheckRemat()

    def CreateHead(self, stack: TaskStack) -> None:
        """Creates the children that read the output of the last stack: `softmax`, and `multi_token` if there is one."""
        p = self.p
        if p.multi_token_weight:
            layer = stacks.layer_params(p, stack, layers_of_block(p))
            head = MultiTokenHead.Params().Set(model_dim=p.model_dim, norm_tpl=p.norm.Copy())
            self.CreateChild("multi_token", head.Set(layer=layer))
        table = softmax.Softmax.Params().Set(
            vocab_size=p.Get(stack.vocab_size), tied=p.tied_softmax
        )
        table.Set(model_dim=p.model_dim, label_smoothing=p.label_smoothing, scale=p.softmax_scale)
        self.CreateChild("softmax", table)

    def Table(self, stack: TaskStack) -> str:
        """The name of the child that embeds the tokens of a stack."""
        return stack.embedding

    @property
    def softmax_table(self) -> str:
        """The name of the child with the weights of the softmax: the last stack's embeddings, or the softmax itself."""
        return self.Table(self.STACKS[-1]) if self.p.tied_softmax else "softmax"

    def _CheckAttention(self) -> None:
        """Raises ParamError for what attention and first layers cannot do together with other parameters."""
        p = self.p
        if p.attention_dropout and p.attention_block not in BLOCK_WORDS:
            why = "blocks have no dropout on probabilities; set task.attention_dropout=0, or this to full"
            raise ParamError("task.attention_block", str(p.attention_block), why)
        if layers_before(p) and p.pipeline.stages > 1 and self.STACKS[-1].memory:
            why = (
                "first layers with cross-attention are in no stage of a pipeline; set task.pipeline.stages=1, or this "
                "to 0"
            )
            raise ParamError("task.dense_first_layers", str(p.dense_first_layers), why)

    def _CheckRemat(self) -> None:
        """Raises ParamError if no layer keeps what task.remat names."""
        names = self.DeclaredKeeps()
        for name in kept.names_of(self.p.remat, names):
            if name not in names:
                raise ParamError(
                    "task.remat",
                    param_text.shown(self.p.remat),
                    f"no layer of this model has {name!r}{nearest(name, names)}; the model's names are "
                    + ", ".join(names),
                )

    @classmethod
    def Needs(cls, params: HyperParams, stack: TaskStack) -> tuple[str, ...]:
        """Facts about the tokens that the router of a stack reads: see moe/routers/base.py."""
        router = stack.Router(params)[1]
        return router.cls.Needs(router) if params.num_experts else ()

    # --- training

    def Forward(self) -> Parts:
        """The forward pass: its stacks, and what stands before and after them.

        Embeddings, first layers and softmax are in no stage: all devices compute them together for each micro-batch.
        The output of the stack before passes through a decoder's stages with its micro-batch, and each normalizes it.
        """
        memory = "multi_token" in self.children and self.STACKS[-1].memory
        return Parts(
            stacks=tuple(self._Stack(stack) for stack in self.STACKS),
            takes=("memory", "x") if memory else ("x",),
            loss=self.LossTerms,
            metrics=self._Metrics,
        )

    def _Stack(self, stack: TaskStack) -> Stack:
        return Stack(
            name=stack.name,
            weights=f"{stack.name}.blocks",
            num_blocks=self.children[stack.name].p.num_blocks,
            carry={"memory": "BSM", "x": "BTM"} if stack.memory else {"x": "BTM"},
            takes={"memory": "x"} if stack.memory else {},
            enter=functools.partial(self._Enter, stack),
            run=functools.partial(self._RunBlocks, stack),
        )

    def VariableSpecs(self) -> NestedMap:
        """See BaseLayer; with adapters, which alone are trained."""
        specs, p = super().VariableSpecs(), self.p
        if not p.adapter_rank:
            return specs
        return adapters.with_adapters(specs, p.adapter_rank, p.adapter_weights)

    def Grow(self, small: NestedMap, fresh: NestedMap) -> NestedMap:
        """See BaseLayer; adapters begin as they are."""
        new = {name: fresh[name] for name in fresh if name not in self.children}
        return NestedMap(super().Grow(small, fresh), **new)

    def _InUse(self, theta: NestedMap) -> NestedMap:
        """The weights with what adapters add."""
        if not self.p.adapter_rank:
            return theta
        return adapters.adapted(theta, self.VariableSpecs(), adapters.scale_of(self.p))

    def PipelineParts(self) -> Parts | None:
        return None if self.p.pipeline.stages == 1 else self.Forward()

    def FProp(
        self, theta: NestedMap, batch: NestedMap, seed: tf.Tensor | None = None
    ) -> tuple[tf.Tensor, NestedMap]:
        """Returns the training loss (float32 scalar) and metrics: loss, nll, accuracy, tokens."""
        return self.Forward().Terms(self._InUse(theta), Context(batch, seed))

    def MicroBatchTerms(
        self, theta: NestedMap, batch: NestedMap, seed: tf.Tensor | None, shares: NestedMap
    ) -> tuple[tf.Tensor, NestedMap]:
        """See BaseTask: the parts weigh what they return by their own shares."""
        return self.Forward().Terms(self._InUse(theta), Context(batch, seed, shares))

    def _Enter(self, stack: TaskStack, theta: NestedMap, context: Context) -> NestedMap:
        x, layers = self._Embedded(stack, theta, context), self.children[stack.name]
        if layers.p.num_first and not stack.memory:
            aux = layers.WithShared(theta[stack.name], self.Aux(stack, context))
            x = self._RunFirst(stack, theta, x, aux, context)
        return NestedMap(x=x)

    def _Embedded(self, stack: TaskStack, theta: NestedMap, context: Context) -> tf.Tensor:
        seed = self.FoldSeed(context.seed, stack.seed) if stack.seed else context.seed
        seed = self.FoldSeed(seed, "embedding" if stack.seed else stack.embedding)
        return self.Embed(theta, self.Table(stack), stack.Row(context.batch), seed)

    def _RunFirst(
        self, stack: TaskStack, theta: NestedMap, x: tf.Tensor, aux: NestedMap, context: Context
    ) -> tf.Tensor:
        """Runs the first layers; those with cross-attention come with the blocks, since they need the memory."""
        seed = self.FoldSeed(context.seed, stack.name)
        return self.children[stack.name].RunFirst(theta[stack.name], x, aux, seed)

    def _RunBlocks(
        self,
        stack: TaskStack,
        weights: NestedMap,
        theta: NestedMap,
        carry: NestedMap,
        context: Context,
        chunk: Chunk,
    ) -> tuple[NestedMap, tf.Tensor, NestedMap]:
        """See pipeline.parts.Stack: the blocks add the auxiliary loss of their MoE layers, and return their extras."""
        layers, x = self.children[stack.name], carry.x
        aux = self._AuxForLayers(stack, theta, carry, context)
        if layers.p.num_first and stack.memory:
            x = self._RunFirst(stack, theta, x, aux, context)
        seed = self.FoldSeed(context.seed, stack.name)
        x, extras = layers.RunBlocks(weights, x, aux, seed, chunk)
        if not self.p.num_experts:
            return NestedMap(carry, x=x), tf.constant(0.0), NestedMap()
        return NestedMap(carry, x=x), self.p.aux_loss_weight * _aux_loss(extras.values()), extras

    def _AuxForLayers(
        self, stack: TaskStack, theta: NestedMap, carry: NestedMap, context: Context
    ) -> NestedMap:
        """`Aux` with the normalized output of the stack before, if cross-attention reads it; and with the weights that
        all layers of the stack share."""
        aux = self.Aux(stack, context)
        if stack.memory:
            before = self.children[stack.memory]
            aux.memory = before.Normalized(theta[stack.memory], carry.memory)
        return self.children[stack.name].WithShared(theta[stack.name], aux)

    @within("Inputs")
    def Embed(
        self, theta: NestedMap, table: str, row: NestedMap, seed: tf.Tensor | None
    ) -> tf.Tensor:
        """Token plus position embeddings [B,T,M], dropped out."""
        x = self.children[table].FProp(theta[table], self.Shard(row.ids, "BT"))
        x = self.position.Add(x, self.Shard(row.segment_pos, "BT"))
        return self.Shard(kernels.dropout(x, self.p.dropout, seed), "BTM")

    @within("Masks")
    def Aux(self, stack: TaskStack, context: Context) -> NestedMap:
        """Masks, paddings and context, which all layers of a stack read (see layers/transformer.py); not the memory."""
        row = stack.Row(context.batch)
        aux = NestedMap(
            self_mask=self._SelfMask(stack, row),
            paddings=masks.paddings(row.segment_ids),
            **self._Context(stack, row),
            **self._Positions(row),
        )
        if "experts" in row:
            aux.experts = tf.transpose(self.Shard(row.experts, "BTlk"), [2, 0, 1, 3])
        for before in self.STACKS:
            if before.name == stack.memory:
                sources = before.Row(context.batch).segment_ids
                aux.cross_mask = masks.segment_mask(row.segment_ids, sources)
        if self.p.num_experts and context.shares is not None:
            counts = ("tokens", "groups")
            aux.shares = NestedMap({n: context.shares[f"{stack.prefix}{n}"] for n in counts})
        return aux

    def _SelfMask(self, stack: TaskStack, row: NestedMap) -> tf.Tensor | NestedMap:
        if not stack.causal:
            return masks.segment_mask(row.segment_ids, row.segment_ids)
        tokens = NestedMap(segments=row.segment_ids, positions=row.segment_pos)
        if self.ScoresByBlocks(stack, row.segment_ids.shape[1]):
            return tokens
        return masks.causal_segment_mask_of(tokens, tokens)

    def ScoresByBlocks(self, stack: TaskStack, length: int | None) -> bool:
        """Whether self-attention in rows of that length is computed by blocks."""
        if not stack.causal:
            return False
        if self.p.attention_block != AUTO:
            return self.p.attention_block != "full"
        return (length or 0) >= FROM_LENGTH and not self.p.attention_dropout

    def _Context(self, stack: TaskStack, row: NestedMap) -> dict[str, NestedMap]:
        """`context` for the layers of a stack, if its router needs any."""
        needs = self.Needs(self.p, stack)
        return {"context": NestedMap({k: row[k] for k in needs if k in row})} if needs else {}

    def _Positions(self, row: NestedMap) -> dict[str, tf.Tensor]:
        """`positions` of a row for the layers, if self-attention goes by them."""
        p = self.p
        kinds = [kind.cls for kind in (p.attention, p.nth_attention) if kind is not None]
        if p.position.cls.IN_ATTENTION or any(kind.NEEDS_POSITIONS for kind in kinds):
            return {"positions": row.segment_pos}
        return {}

    @within("Loss")
    def LossTerms(
        self, theta: NestedMap, carry: NestedMap, context: Context
    ) -> tuple[tf.Tensor, NestedMap]:
        """See pipeline.parts.Parts: the loss of the last stack's output `carry.x` [B,T,M], and its metrics."""
        stack, table = self.STACKS[-1], theta[self.softmax_table]
        y = self.children[stack.name].Normalized(theta[stack.name], carry.x)
        loss, metrics = self.TokenLosses(table, y, stack.Row(context.batch), context.shares)
        if "multi_token" not in self.children:
            return loss, metrics
        aux = self._AuxForLayers(stack, theta, carry, context)
        more, metrics.multi_token = self._MultiTokenLoss(theta, y, aux, context)
        return loss + more, metrics

    @within("Loss")
    def TokenLosses(
        self, table: NestedMap, y: tf.Tensor, row: NestedMap, shares: NestedMap | None = None
    ) -> tuple[tf.Tensor, NestedMap]:
        """The loss of the last stack's output.

        Args:
            y: [B,T,M].
            row: int32 `labels` and `segment_ids` [B,T]; segment 0 is padding.
            shares: as in MicroBatchTerms; None for a whole batch.

        Returns:
            The label-smoothed cross-entropy a real token, and metrics: nll (unsmoothed), accuracy, tokens. With
            `shares` those of MicroBatchTerms.
        """
        real = tf.cast(row.segment_ids > 0, tf.float32)
        xent, nll, correct = self.softmax.Losses(table, y, row.labels, real)
        tokens = tf.reduce_sum(real)
        per_token = _share_of_token(tokens, shares)
        return tf.reduce_sum(xent) * per_token, NestedMap(
            nll=tf.reduce_sum(nll) * per_token,
            accuracy=tf.reduce_sum(correct) * per_token,
            tokens=tokens,
        )

    @within("Loss")
    def _MultiTokenLoss(
        self, theta: NestedMap, x: tf.Tensor, aux: NestedMap, context: Context
    ) -> tuple[tf.Tensor, NestedMap]:
        """The loss that the head for the token after the next adds; its nll, and the updates of its layer.

        Means are over all tokens, also over the last one of a text, which has no token after the next.
        """
        stack = self.STACKS[-1]
        row, seed = stack.Row(context.batch), self.FoldSeed(context.seed, "multi_token")
        table = self.Table(stack)
        tokens = self.children[table].FProp(theta[table], row.labels)
        tokens = self.position.Add(tokens, row.segment_pos + 1)
        y, extras = self.multi_token.FProp(theta.multi_token, x, tokens, aux, seed)
        ahead = [tf.pad(ids[:, 1:], [[0, 0], [0, 1]]) for ids in (row.labels, row.segment_ids)]
        real = tf.cast(row.segment_ids > 0, tf.float32)
        there = real * tf.cast(tf.equal(ahead[1], row.segment_ids), tf.float32)
        xent, nll, _ = self.softmax.Losses(theta[self.softmax_table], y, ahead[0], there)
        per_token = _share_of_token(tf.reduce_sum(real), context.shares)
        loss = self.p.multi_token_weight * per_token * tf.reduce_sum(xent)
        if extras:
            loss += self.p.aux_loss_weight * extras.aux_loss
        return loss, NestedMap(nll=per_token * tf.reduce_sum(nll), **updates_of(extras))

    def _Metrics(self, sums: NestedMap, loss: tf.Tensor, extras: NestedMap) -> NestedMap:
        """Metrics; with experts also aux_loss, `moe` by stack [L,...], and routers' updates, if any: see BaseTask."""
        metrics = NestedMap(sums, loss=loss)
        ahead = metrics.pop("multi_token", NestedMap())
        if ahead:
            metrics.multi_token_nll = ahead.nll
        if not self.p.num_experts:
            return metrics
        losses, moe, all_layers = [], NestedMap(), []
        for stack in self.STACKS:
            layers = list(extras[stack.name].values())
            losses.append(_aux_loss(layers))
            moe[stack.name] = map_structure(_in_order, *(layer.metrics for layer in layers))
            all_layers += layers
        aux_loss = functools.reduce(operator.add, losses)
        return NestedMap(metrics, aux_loss=aux_loss, moe=moe, **updates_of(*all_layers, ahead))

    @scoped
    def LogProbs(
        self,
        theta: NestedMap,
        batch: NestedMap,
        vocab_size: int | None = None,
        with_experts: bool = False,
    ) -> tuple[tf.Tensor, ...]:
        """The log-probability of each label, given what comes before it, in inference: float32 [B,T], 0 at padding; and
        whether no id is likelier than it: bool [B,T].

        Args:
            vocab_size: how many ids of the model's V the vocabulary has: the others get no probability, as in decoding;
                None for all.
            with_experts: whether the experts that the last stack's MoE layers chose come third, int32 [B,T,L,k], as
                FProp and LogProbs take them from `batch.experts`; of a decoder, in its own rows.
        """
        stack = self.STACKS[-1]
        with noting_choices() if with_experts else contextlib.nullcontext():
            carry, _, extras = self.Forward().Run(theta, Context(batch))
        y = self.children[stack.name].Normalized(theta[stack.name], carry.x)
        row, logits = stack.Row(batch), self.softmax.FProp(theta[self.softmax_table], y)
        logits = logits[..., :vocab_size]
        nll = kernels.current().cross_entropy(logits, row.labels, 0.0)
        likeliest = tf.gather(logits, row.labels, batch_dims=2) >= tf.reduce_max(logits, -1)
        results = tf.where(row.segment_ids > 0, -nll, 0.0), likeliest
        if not with_experts:
            return results
        chosen = map_structure(_in_order, *(x.metrics.choices for x in extras[stack.name].values()))
        return *results, recorded_experts(chosen, row.ids)

    # --- decoding

    def PackWeights(self, theta: NestedMap, packing: Packing) -> NestedMap:
        """See BaseLayer; the table of a tied softmax is that of embeddings."""
        packed = self.PackChildren(theta, packing)
        if self.p.tied_softmax:
            name = self.softmax_table
            packed[name] = self.softmax.PackWeights(theta[name], packing)
        return packed

    @scoped
    def ExtendStep(
        self, theta: NestedMap, ids: tf.Tensor, cache: NestedMap, time: tf.Tensor, mask: tf.Tensor
    ) -> tuple[tf.Tensor, NestedMap]:
        """One token of each text, or of each hypothesis of a flat beam search (appendix A.1); or a text's first tokens.

        Args:
            ids: int32 [B,J], the tokens at `time`; or [B,P].
            cache: as InitCache gave it, or the last step: the last stack's caches by its name; with cross-attention
                `memory` and `cross_mask`; `task_ids` [B] if the router needs them.
            time: int32 scalar, the position; or int32 [P], consecutive ones, with one hypothesis; or [B,P], see
                MultiHeadAttention.ExtendStep.
            mask: bool [B, J or P, J*length], the flat positions that each looks at, its own included; or as that of
                MultiHeadAttention.ExtendStep, with `first`.

        Returns:
            float32 logits [B, J or P, V] of the next tokens, and the cache.
        """
        stack = self.STACKS[-1]
        at = tf.zeros_like(ids) + positions_of(time, mask)
        table = self.Table(stack)
        x = self.position.Add(self.children[table].FProp(theta[table], ids), at)
        row, aux = NestedMap(ids=ids), NestedMap(self_mask=mask)
        if "task_ids" in cache:
            row.task_ids = tf.tile(cache.task_ids[:, tf.newaxis], [1, tf.shape(ids)[1]])
        if stack.memory:
            aux.cross_mask = cache.cross_mask
        aux.update(self._Context(stack, row))
        layers = self.children[stack.name]
        y, extended = layers.ExtendStep(
            theta[stack.name], x, cache[stack.name], time, aux, cache.get("memory")
        )
        logits = self.softmax.FProp(theta[self.softmax_table], y)
        return logits, NestedMap(cache, **{stack.name: extended})


def _share_of_token(tokens: tf.Tensor, shares: NestedMap | None) -> tf.Tensor:
    """The weight of a token in a mean over those of a batch, or of the batch that a micro-batch is a part of."""
    per_token = 1.0 / tf.maximum(tokens, 1.0)
    return per_token if shares is None else per_token * shares.tokens


def _aux_loss(layers: Iterable[NestedMap]) -> tf.Tensor:
    """The sum of the auxiliary losses of a stack's MoE layers, from their extras."""
    return tf.add_n([tf.reduce_sum(layer.aux_loss) for layer in layers])


def _in_order(*layers: tf.Tensor) -> tf.Tensor:
    """Interleaves the rows of a block's layers, [n,...] each: [L,...], in the order of all layers."""
    if len(layers) == 1:
        return layers[0]
    stacked = tf.stack(layers, axis=1)
    return tf.reshape(stacked, [-1, *stacked.shape[2:]])
