"""The language model: one stack of causal self-attention and feed-forward layers, as in GPipe (Huang et al. 2019).

Letters: B batch, T time, L layers, M model, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import tensorflow as tf

from lingvo_moe.core.base_layer import scoped
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams
from lingvo_moe.core.config.hyperparams import Params as HyperParams
from lingvo_moe.core.input.base_input import BaseInput
from lingvo_moe.core.layers import masks, softmax, transformer
from lingvo_moe.core.layers.repeat import Chunk
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.pipeline import params as pipeline
from lingvo_moe.core.pipeline.parts import Context, Parts, Stack
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.task.base_task import TaskError
from lingvo_moe.tasks.transformer_shrinking import parts, sample_rows, shrink_layers
from lingvo_moe.tasks.transformer_task import TransformerTask


class LmModel(TransformerTask):
    """A decoder-only Transformer, which predicts the next token of packed texts.

    `FProp(theta, batch, seed)` takes int32 `batch.{ids,labels,segment_ids,segment_pos}` [B,T], where segment 0 is
    padding, and returns the training loss and float32 metrics. A token sees those before it in its own segment.
    """

    SIZES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **TransformerTask.SIZES,
        "H": ("task.hidden_dim",),
        "V": ("task.vocab_size",),
    }
    DIVIDED = "BHNAV"
    STACKS: ClassVar[Mapping[str, str]] = {"decoder": "num_layers"}

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("vocab_size", 32000, "V.", check=checks.IDS)
        p.Define(
            "num_layers", 6, "L, layers of self-attention + feed-forward.", check=checks.LAYERS
        )
        p.Define(
            "tied_softmax",
            True,
            "Whether the softmax uses the table of embeddings. False: it has a table of its own.",
        )
        return p

    def __init__(self, params: InstantiableParams):
        if params.pipeline.stages > 1:  # of whose layers each stage has its own
            params = pipeline.with_stage_axes(params, V=(params.vocab_size,))
        super().__init__(params)
        p = self.p
        self.CreateChild("embedding", self.EmbeddingParams(p.vocab_size))
        self.CreateChild("position", self.PositionParams())
        self.CreateChild("decoder", self.StackParams([self.LayerParams()], p.num_layers))
        self.CreateChild("softmax", self.SoftmaxParams(p.vocab_size, tied=p.tied_softmax))

    # --- the contract of BaseTask

    @classmethod
    def CheckInput(cls, task: HyperParams, inputs: HyperParams) -> None:
        """See BaseTask: the model has an embedding for each id."""
        super().CheckInput(task, inputs)
        if inputs.target_vocab_size > task.vocab_size:
            raise TaskError(
                f"input.target_vocab_size={inputs.target_vocab_size} is more than task.vocab_size={task.vocab_size}: "
                "the model has no embedding for some of the ids; set both to the same"
            )

    @classmethod
    def Shrink(cls, task: HyperParams, inputs: HyperParams, mesh: Mesh) -> None:
        """See BaseTask: few layers, heads and tokens."""
        size = shrink_layers(task, mesh)
        task.Set(vocab_size=size("V", 20))
        inputs.Set(
            batch_size=parts(task, "B", mesh),
            target_length=size("T", 8),
            target_vocab_size=task.vocab_size,
        )

    def SampleBatch(self, inputs: BaseInput, rng: np.random.RandomState) -> NestedMap:
        """See BaseTask: random ids; two texts a row, and padding at its end."""
        return sample_rows(inputs.BatchSpec(), {"": self.p.vocab_size}, rng)

    def BatchCounts(self, batch: NestedMap) -> dict[str, int]:
        """See BaseTask."""
        rows, length = batch.ids.shape
        return {"tokens": rows * length}

    def LeastActivationBytes(self, batch: NestedMap) -> int:
        """See BaseTask: embeddings, and one head's attention in one layer, of two bytes a number."""
        rows, length = batch.ids.shape
        return 2 * rows * length * (self.p.model_dim + length)

    def Units(self, batch: NestedMap) -> NestedMap:
        """See BaseTask: tokens that are not padding."""
        return NestedMap(tokens=tf.reduce_sum(tf.cast(batch.segment_ids > 0, tf.float32)))

    # --- training

    def Forward(self) -> Parts:
        """See TransformerTask: one stack. Embedding and softmax are in no stage."""
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
            metrics=lambda sums, loss, extras: NestedMap(sums, loss=loss),
        )

    def _Enter(self, theta: NestedMap, context: Context) -> NestedMap:
        seed = self.FoldSeed(context.seed, "embedding")
        return NestedMap(x=self.Embed(theta, "embedding", context.batch, seed))

    def _RunBlocks(
        self, weights: NestedMap, theta: NestedMap, carry: NestedMap, context: Context, chunk: Chunk
    ) -> tuple[NestedMap, tf.Tensor, NestedMap]:
        del theta
        seed, aux = self.FoldSeed(context.seed, "decoder"), self.Aux(context.batch)
        x, _ = self.decoder.RunBlocks(weights, carry.x, aux, seed, chunk)
        return NestedMap(x=x), tf.constant(0.0), NestedMap()

    def _Loss(
        self, theta: NestedMap, carry: NestedMap, context: Context
    ) -> tuple[tf.Tensor, NestedMap]:
        y = self.decoder.final_norm.FProp(theta.decoder.final_norm, carry.x)
        return self.TokenLosses(self.SoftmaxTable(theta), y, context.batch, context.shares)

    @scoped
    def SoftmaxTable(self, theta: NestedMap) -> NestedMap:
        """The weights of the softmax: those of the embedding, or its own."""
        return theta.embedding if self.p.tied_softmax else theta.softmax

    def Aux(self, batch: NestedMap) -> NestedMap:
        """Masks and paddings, which all layers read (see layers/transformer.py)."""
        return NestedMap(
            self_mask=masks.causal_segment_mask(batch.segment_ids, batch.segment_pos),
            paddings=masks.paddings(batch.segment_ids),
            **self.Positions(batch),
        )

    # --- costs

    def FlopsByPart(self, batch: NestedMap) -> dict[str, int]:
        """See BaseTask."""
        return self.Flops(batch.ids.shape)

    def Flops(self, rows: Sequence[int]) -> dict[str, int]:
        """Forward operations by part of the model, e.g. 'decoder.ffn', for rows of shape [B,T]."""
        x = (*rows, self.p.model_dim)
        (layer,) = transformer.TransformerStack.FlopsByLayer(self.decoder.p, x)
        found = {f"decoder.{name}": flops for name, flops in layer.items()}
        found["softmax"] = softmax.Softmax.FPropMeta(self.softmax.p, x).flops
        return found

    @classmethod
    def FPropMeta(cls, params: HyperParams, *input_shapes: Sequence[int]) -> NestedMap:
        """Forward operations for rows [B,T]; out_shapes is that of the logits."""
        (rows,) = input_shapes
        flops = sum(params.cls(params).Flops(rows).values())
        return NestedMap(flops=flops, out_shapes=((*rows, params.vocab_size),))
