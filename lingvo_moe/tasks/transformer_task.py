"""TransformerTask: the base of tasks whose model is stacks of Transformer layers over packed rows of token ids.

Letters: B batch, T time, L layers, M model, H hidden, N heads, A heads of keys and values, K key, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.base_layer import scoped, within
from lingvo_moe.core.config import checks, param_text
from lingvo_moe.core.config.checks import ParamError, nearest
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params as HyperParams
from lingvo_moe.core.layers import (
    attention,
    embedding,
    feed_forward,
    kept,
    normalization,
    positions,
    softmax,
    transformer,
)
from lingvo_moe.core.layers.feed_forward import ACTIVATIONS
from lingvo_moe.core.layers.normalization import NORMS
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.pipeline import params as pipeline
from lingvo_moe.core.pipeline.parts import Context, Parts
from lingvo_moe.core.task.base_task import BaseTask
from lingvo_moe.core.task.forms import Forms
from lingvo_moe.tasks import experts


class TransformerTask(BaseTask):
    """Base of the translation model and the language model: sizes, layers, embeddings and the loss.

    A subclass creates its layers in `CreateLayers`, and says with `Forward` how they are run: `FProp` runs them in
    order, and a pipeline in stages.
    """

    UNIT = "tokens"
    KIND: ClassVar[str] = "text"  # of model, for messages
    EXAMPLE: ClassVar[str] = "mt.M4Demo"  # an experiment of this kind
    HAS_SOURCE: ClassVar[bool] = True  # whether a text is predicted from another one
    SIZES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **BaseTask.SIZES,
        "N": ("task.num_heads",),
        "A": ("task.num_kv_heads",),
        "M": ("task.model_dim",),
        "K": ("task.key_dim",),
        **experts.SIZES,
    }
    DIVIDED = "BGEHNAV"
    HELD_OUT_METRICS = ("nll", "accuracy")
    MAY_CHANGE: ClassVar[tuple[str, ...]] = (
        "activation_split",
        "weight_split",
        "dtype",
        "fprop_dtype",
        "repeat",
        "remat",
        *pipeline.PARAMETERS,
    )
    # The stacks, each with the parameter that sets its number of layers.
    STACKS: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        _define_sizes(p)
        _define_training(p)
        p.Derive("optimizer.learning_rate.model_dim", "model_dim")
        p.Derive("norm.model_dim", "model_dim")
        p.Derive("position.model_dim", "model_dim")
        return p

    def __init__(self, params: InstantiableParams):
        if params.repeat is False and params.remat != kept.FULL:
            raise ParamError(
                "task.remat",
                param_text.shown(params.remat),
                "has no effect with task.repeat=False, which keeps every activation; set task.repeat=True, or "
                f"task.remat={kept.FULL}",
            )
        if params.pipeline.stages > 1:  # of whose layers each stage has its own
            vocabularies = [params.Get(name.removeprefix("task.")) for name in self.SIZES["V"]]
            params = pipeline.with_stage_axes(params, V=vocabularies)
        super().__init__(params)
        self.CreateLayers()
        self._CheckRemat()

    def CreateLayers(self) -> None:
        """Creates the children `position` and `softmax`, the embeddings and the stacks."""
        raise NotImplementedError(
            f"{type(self).__name__} creates its layers in CreateLayers, which it lacks"
        )

    @classmethod
    def OptimizerParams(cls, task: HyperParams) -> InstantiableParams:
        p = super().OptimizerParams(task)
        p.learning_rate.cls.SetModelDim(p.learning_rate, task.model_dim)
        return p

    @classmethod
    def PipelineSettings(cls, task: HyperParams) -> pipeline.Settings | None:
        return pipeline.Settings.Of(task.pipeline)

    def _CheckRemat(self) -> None:
        """Raises ParamError if no layer keeps what task.remat names."""
        known = self.DeclaredKeeps()
        for name in kept.names_of(self.p.remat, known):
            if name not in known:
                raise ParamError(
                    "task.remat",
                    param_text.shown(self.p.remat),
                    f"no layer of this model has {name!r}{nearest(name, known)}; the model's names are "
                    + ", ".join(known),
                )

    @classmethod
    def RoutesByTask(cls, params: HyperParams) -> bool:
        """Whether some router chooses by the source language, so that batches and requests tell it."""
        return False

    @classmethod
    def LayersOfBlock(cls, task: HyperParams) -> int:
        """Number of different layers in a block of a stack."""
        return 1

    @classmethod
    def LayersBefore(cls, task: HyperParams) -> int:
        """Number of layers of a stack before its blocks."""
        return 0

    @classmethod
    def OpenForms(cls, task: InstantiableParams) -> Forms | None:
        """See BaseTask: task.repeat=auto leaves it open; a pipeline scans blocks then."""
        if task.repeat != "auto" or pipeline.settings_of(task):
            return None
        layers, before = cls.LayersOfBlock(task), cls.LayersBefore(task)
        keeping = task.Copy().Set(repeat=False, remat=kept.FULL)
        return Forms(
            parameter="task.repeat",
            recomputing=task.Copy().Set(repeat=True),
            keeping=keeping,
            one_block=keeping.Copy().Set(**dict.fromkeys(cls.STACKS.values(), before + layers)),
            num_blocks={
                f"{task.name or cls.__name__}.{stack}.blocks": (task.Get(number) - before) // layers
                for stack, number in cls.STACKS.items()
            },
        )

    @classmethod
    def GrowsFrom(cls, task: HyperParams) -> dict[str, Any]:
        """See BaseTask."""
        return experts.grows_from(task)

    @classmethod
    def MicroBatchSizes(cls, task: HyperParams) -> tuple[str, ...]:
        """See BaseTask."""
        return experts.micro_batch_sizes(task)

    @classmethod
    def WithoutStrategy(cls, task: InstantiableParams) -> InstantiableParams:
        """See BaseTask."""
        plain = task.Copy().Set(repeat="auto", remat=kept.FULL, shard_state="none", offload="none")
        plain.pipeline = pipeline.pipeline_params()
        experts.with_letters(plain)
        return plain.Set(dropout=0.0, attention_dropout=0.0)

    @classmethod
    def HasStages(cls, task: HyperParams) -> bool:
        """See BaseTask."""
        return not experts.exchanges_rows(task)

    @classmethod
    def Recomputing(cls, task: InstantiableParams) -> dict[str, Any]:
        """See BaseTask: nothing in a pipeline."""
        if pipeline.settings_of(task):
            return {}
        if task.repeat is False:
            return {"task.repeat": True}
        return {} if task.remat == kept.FULL else {"task.remat": kept.FULL}

    def BlockInputs(self, batch: NestedMap) -> dict[str, int]:
        """See BaseTask: model_dim numbers for each token of the stack."""
        counts = zip(self.STACKS, self.BatchCounts(batch).values(), strict=True)
        inputs = ((s, self.children[s].p.num_blocks * n * self.p.model_dim) for s, n in counts)
        return {f"{self.path}.{stack}.blocks": elements for stack, elements in inputs}

    def LargestInside(self, batch: NestedMap) -> int:
        """See BaseTask: the scores of one head."""
        rows = batch.Flatten()[0].shape[0]
        return max(tokens**2 // rows for tokens in self.BatchCounts(batch).values())

    def SizeParams(self, path: str, letter: str) -> tuple[str, ...]:
        """See BaseTask; the layers are those of the variable's stack."""
        if letter == "L":
            return tuple(f"task.{number}" for stack, number in self.STACKS.items() if stack in path)
        return super().SizeParams(path, letter)

    # --- Params of the parts

    def EmbeddingParams(self, vocab_size: int) -> InstantiableParams:
        """A table of embeddings."""
        return embedding.Embedding.Params().Set(vocab_size=vocab_size, model_dim=self.p.model_dim)

    def SoftmaxParams(self, vocab_size: int, tied: bool = True) -> InstantiableParams:
        """The softmax and its loss; `tied`: it uses a table of embeddings."""
        return softmax.Softmax.Params().Set(
            vocab_size=vocab_size,
            model_dim=self.p.model_dim,
            tied=tied,
            label_smoothing=self.p.label_smoothing,
        )

    def StackParams(self, block: list[InstantiableParams], num_blocks: int) -> InstantiableParams:
        """A stack that has a block of layers `num_blocks` times."""
        return transformer.TransformerStack.Params().Set(
            num_blocks=num_blocks,
            block=block,
            repeat=self.p.repeat is not False,  # also where the choice is open
            remat=self.p.remat,
            parts=self.p.pipeline.stages * self.p.pipeline.repeats,
            model_dim=self.p.model_dim,
            final_norm_tpl=self.p.norm.Copy(),
        )

    def LayerParams(
        self,
        ffn: InstantiableParams | None = None,
        cross: bool = False,
        atten: InstantiableParams | None = None,
    ) -> InstantiableParams:
        """A layer.

        Args:
            ffn: Params of its feed-forward layer; None: a dense one.
            cross: whether it has cross-attention.
            atten: Params of its self-attention, whose sizes are set here; None: the usual one.
        """
        p = self.p
        if atten is None:
            atten = attention.MultiHeadAttention.Params()
        if "num_kv_heads" in atten:
            atten.num_kv_heads = p.num_kv_heads
        elif p.num_kv_heads:
            why = f"has no effect with {atten.cls.__name__}, which has none; leave it 0"
            raise ParamError("task.num_kv_heads", str(p.num_kv_heads), why)
        atten.Set(
            num_heads=p.num_heads,
            dim_per_head=p.key_dim,
            position=p.position.Copy() if p.position.cls.IN_ATTENTION else None,
            atten_dropout_prob=p.attention_dropout,
        )
        if ffn is None:
            ffn = feed_forward.FeedForward.Params().Set(
                hidden_dim=p.hidden_dim, activation=p.activation, relu_dropout_prob=p.dropout
            )
        return transformer.TransformerLayer.Params().Set(
            self_atten_tpl=atten,
            cross_atten_tpl=_as_cross(atten) if cross else None,
            ffn_tpl=ffn.Set(model_dim=p.model_dim),
            norm_tpl=p.norm.Copy(),
            residual_dropout_prob=p.dropout,
        )

    def PositionParams(self) -> InstantiableParams:
        """The positions that embeddings take."""
        p = self.p.position.Copy()
        p.cls.SetModelDim(p, self.p.model_dim)
        return p

    # --- training

    def Positions(self, row: NestedMap) -> dict[str, tf.Tensor]:
        """`positions` of a row for the layers, if queries and keys take them."""
        return {"positions": row.segment_pos} if self.p.position.cls.IN_ATTENTION else {}

    def Forward(self) -> Parts:
        """The forward pass: its stacks, and what stands before and after them."""
        raise NotImplementedError(f"{type(self).__name__}.Forward")

    def PipelineParts(self) -> Parts | None:
        return None if self.p.pipeline.stages == 1 else self.Forward()

    def FProp(
        self, theta: NestedMap, batch: NestedMap, seed: tf.Tensor | None = None
    ) -> tuple[tf.Tensor, NestedMap]:
        """Returns the training loss (float32 scalar) and metrics: loss, nll, accuracy, tokens."""
        return self.Forward().Terms(theta, Context(batch, seed))

    def MicroBatchTerms(
        self, theta: NestedMap, batch: NestedMap, seed: tf.Tensor | None, shares: NestedMap
    ) -> tuple[tf.Tensor, NestedMap]:
        """See BaseTask: the parts weigh what they return by their own shares."""
        return self.Forward().Terms(theta, Context(batch, seed, shares))

    @within("Inputs")
    def Embed(
        self, theta: NestedMap, table: str, row: NestedMap, seed: tf.Tensor | None
    ) -> tf.Tensor:
        """Token plus position embeddings [B,T,M], dropped out."""
        x = self.children[table].FProp(theta[table], self.Shard(row.ids, "BT"))
        x = self.position.Add(x, self.Shard(row.segment_pos, "BT"))
        return self.Shard(kernels.dropout(x, self.p.dropout, seed), "BTM")

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
        per_token = share_of_token(tokens, shares)
        return tf.reduce_sum(xent) * per_token, NestedMap(
            nll=tf.reduce_sum(nll) * per_token,
            accuracy=tf.reduce_sum(correct) * per_token,
            tokens=tokens,
        )

    @scoped
    def LogProbs(
        self, theta: NestedMap, batch: NestedMap, vocab_size: int | None = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """The log-probability of each label, given what comes before it, in inference: float32 [B,T], 0 at padding; and
        whether no id is likelier than it: bool [B,T].

        Args:
            vocab_size: how many ids of the model's V the vocabulary has: the others get no probability, as in decoding;
                None for all.
        """
        carry, _, _ = self.Forward().Run(theta, Context(batch))
        y = self.decoder.final_norm.FProp(theta.decoder.final_norm, carry.x)
        row, logits = self.Predicted(batch), self.softmax.FProp(self._SoftmaxTable(theta), y)
        logits = logits[..., :vocab_size]
        nll = kernels.current().cross_entropy(logits, row.labels, 0.0)
        likeliest = tf.gather(logits, row.labels, batch_dims=2) >= tf.reduce_max(logits, -1)
        return tf.where(row.segment_ids > 0, -nll, 0.0), likeliest

    @staticmethod
    def Predicted(batch: NestedMap) -> NestedMap:
        """The rows of a batch whose labels are predicted."""
        return batch

    def _SoftmaxTable(self, theta: NestedMap) -> NestedMap:
        """The weights of the softmax."""
        raise NotImplementedError(f"{type(self).__name__}._SoftmaxTable")


def share_of_token(tokens: tf.Tensor, shares: NestedMap | None) -> tf.Tensor:
    """The weight of a token in a mean over those of a batch, or of the batch that a micro-batch is a part of."""
    per_token = 1.0 / tf.maximum(tokens, 1.0)
    return per_token if shares is None else per_token * shares.tokens


def _as_cross(atten: InstantiableParams) -> InstantiableParams:
    cross = atten.Copy()
    cross.cls = attention.CrossAttention
    return cross.Set(position=None)


def _define_sizes(p: InstantiableParams) -> None:
    """The sizes of layers, their activation and normalization."""
    p.Define("model_dim", 1024, "M.", checks.SIZE)
    p.Define("hidden_dim", 8192, "H, of feed-forward layers.", checks.SIZE)
    p.Define("num_heads", 16, "N, attention heads.", checks.SIZE)
    p.Define(
        "num_kv_heads",
        0,
        "A, heads of keys and values, each for num_heads / A heads; 1: multi-query attention; 0: num_heads.",
        checks.COUNT,
    )
    p.Define("key_dim", 128, "K, per head.", checks.COUNT)
    p.Define(
        "activation",
        "relu",
        "The function inside feed-forward layers and experts, e.g. swiglu: see layers/feed_forward.py.",
        checks.one_of(ACTIVATIONS),
    )
    p.Define(
        "position",
        positions.PositionalEmbedding.Params(),
        "Positions of tokens, added to their embeddings or given to queries and keys of self-attention.",
        choices=positions.POSITIONS,
    )
    p.Define("norm", normalization.LayerNorm.Params(), "Normalizations.", choices=NORMS)


def _define_training(p: InstantiableParams) -> None:
    """Regularisation, pipeline, and whether blocks are recomputed."""
    p.Define(
        "dropout", 0.1, "Rate on embeddings, residual branches and hidden layers.", checks.SHARE
    )
    p.Define("attention_dropout", 0.0, "Rate on attention probabilities.", checks.SHARE)
    p.Define("label_smoothing", 0.1, "Probability spread evenly over the vocabulary.", checks.SHARE)
    p.Define(
        "pipeline",
        pipeline.pipeline_params(),
        "Stages of layers one after the other on devices.",
    )
    p.Define(
        "repeat",
        True,
        "True: a loop scans blocks of layers over their stacked weights, and the backward pass recomputes each "
        "block. That takes less memory, and the size of the program does not grow with depth. False: blocks are "
        "unrolled and nothing is recomputed, which is faster. auto: False if the step fits into memory that way, "
        "else True; the trainer prints which. Weights and checkpoints are the same in both forms.",
        checks.FlagOr("auto"),
    )
    p.Define(
        "remat",
        kept.FULL,
        "What the loop over blocks computes again in the backward pass. full: all but the input of each block. dots: "
        "all but products with weights, which are kept. Or a list of the names of what is kept: those that the "
        "model's layers declare in KEEPS.",
        checks.NamesOr(
            (kept.FULL, kept.DOTS), (), {"none": "task.repeat=False keeps every activation"}
        ),
    )
