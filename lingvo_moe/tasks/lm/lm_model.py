"""The language model: one stack of causal self-attention and feed-forward layers, as in GPipe (Huang et al. 2019),
with experts in every n-th feed-forward layer if it has some.

Letters: B batch, T time, L layers, V vocabulary.
"""

import tensorflow as tf

from lingvo_moe.core.base_layer import scoped
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams
from lingvo_moe.core.input.base_input import BaseInput
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.task.step import Step
from lingvo_moe.tasks.transformer.costs import TransformerCosts
from lingvo_moe.tasks.transformer.stacks import TaskStack, sizes_of
from lingvo_moe.tasks.transformer.task import TransformerTask


class LmModel(TransformerTask):
    """A decoder-only Transformer, which predicts the next token of packed texts.

    `FProp(theta, batch, seed)` takes int32 `batch.{ids,labels,segment_ids,segment_pos}` [B,T], where segment 0 is
    padding, and returns the training loss and float32 metrics. A token sees those before it in its own segment.
    """

    KIND = "language"
    EXAMPLE = "lm.MoEDemo"
    STACKS = (TaskStack("decoder", "num_layers", side="target", causal=True),)
    SIZES = {**TransformerTask.SIZES, **sizes_of(STACKS)}

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("vocab_size", 32000, "V.", checks.IDS)
        p.Define("num_layers", 6, "L, layers of self-attention + feed-forward.", checks.LAYERS)
        return p

    @scoped
    def InitCache(self, batch: int | tf.Tensor, length: int) -> NestedMap:
        """Empty caches for `length` tokens of `batch` texts; see TransformerStack."""
        return NestedMap(decoder=self.decoder.InitCache(batch, length))

    def CacheLetters(self) -> NestedMap:
        """The letters of InitCache's tensors."""
        return NestedMap(decoder=self.decoder.CacheLetters())

    def DecodePrograms(
        self, inputs: BaseInput, prompt_length: int = 0, reply_length: int = 0
    ) -> tuple[Step, Step]:
        """See BaseTask: a greedy search. By default a prompt is as long as a row, and a reply as long as the prompt."""
        from lingvo_moe.tasks.lm.prompt_decoder import decode_programs  # which imports engines

        length = prompt_length or inputs.p.target_length
        return decode_programs(self, inputs.p.batch_size, length, reply_length or length)

    def Costs(self) -> TransformerCosts:
        return TransformerCosts(self, self.InitCache)
