"""Continuations of prompts for XLA: a program that reads prompts, and one step of the search as another.

Both are functions of tensors, so that they can be lowered, run by a loop elsewhere, and planned for machines that you
do not have. `prompt_search.py` is the same search with TensorFlow's own kernels.

Letters: B row, P token of a prompt, J hypothesis, S place in the flat sequence, V vocabulary.
"""

from typing import Any

import tensorflow as tf

from lingvo_moe.core.decode.flat_beam_search import FlatBeamSearch, SearchOptions, StepFn
from lingvo_moe.core.nested_map import NestedMap, map_structure
from lingvo_moe.core.task.step import Step
from lingvo_moe.core.tensors import dim
from lingvo_moe.tasks.lm.lm_model import LmModel
from lingvo_moe.tasks.text.decoding.programs import decoding_programs
from lingvo_moe.tasks.text.vocabulary.special_ids import BOS_ID, EOS_ID, PAD_ID


class PromptDecoder:
    """A language model and a search over continuations of prompts that have equally many tokens.

    Args:
        search: over T new tokens at most, EOS included.
        prompt_length: P, the tokens of a prompt, its first mark included.
    """

    def __init__(self, model: LmModel, search: FlatBeamSearch, prompt_length: int):
        self.model, self.search = model, search
        # The last token of a prompt is what the first step extends caches by.
        self._before = prompt_length - 1

    def Start(
        self, theta: NestedMap, ids_BP: tf.Tensor, max_lengths_B: tf.Tensor
    ) -> tuple[NestedMap, NestedMap]:
        """Reads prompts: the state and the caches before the first step.

        Args:
            ids_BP: int32, the prompts.
            max_lengths_B: int32, the maximum number of new tokens of each row, EOS included; 0 skips the row.
        """
        rows, before = dim(ids_BP, 0), self._before
        cache = self.model.InitCache(rows, before + self.search.T)
        if before:
            at_P = tf.range(before)
            mask_PS = tf.range(before + self.search.T) <= at_P[:, tf.newaxis]
            mask = tf.tile(mask_PS[tf.newaxis], [rows, 1, 1])
            cache = self.model.ExtendStep(theta, ids_BP[:, :-1], cache, at_P, mask)[1]
        return self.search.Start(max_lengths_B), self._ForAll(cache, ids_BP)

    def Step(
        self, state: NestedMap, cache: NestedMap, theta: NestedMap
    ) -> tuple[NestedMap, NestedMap]:
        """One token more of each row, or hypothesis.

        Pure. State and caches come out as they go in, so that their memory can be donated.
        """
        return self.search.Step(self._StepFn(theta), state, cache)

    def Caches(self, theta: NestedMap, shape: tuple[int, int]) -> NestedMap:
        """See SearchInSteps."""
        del theta
        cache = self.model.InitCache(shape[0], self._before + self.search.T)
        return self._ForAll(cache, tf.zeros(shape, tf.int32))

    def CacheLetters(self) -> NestedMap:
        """The letters of the caches' tensors."""
        return NestedMap(model=self.model.CacheLetters(), last="B")

    def _ForAll(self, cache: NestedMap, ids_BP: tf.Tensor) -> NestedMap:
        """A model's caches of one hypothesis as those of all, of which the first has the keys and values of prompts."""

        def padded(x: tf.Tensor, letters: str) -> tf.Tensor:
            return tf.pad(x, [[0, (self.search.J - 1) * (letter == "J")] for letter in letters])

        letters = self.model.CacheLetters()
        return NestedMap(model=map_structure(padded, cache, letters), last=ids_BP[:, -1])

    def _StepFn(self, theta: NestedMap) -> StepFn:
        J, before = self.search.J, self._before

        def step(ids: tf.Tensor, cache: Any, time: tf.Tensor, mask: tf.Tensor) -> tuple:
            ids = tf.where(time == 0, cache.last[:, tf.newaxis], ids)
            first_S = tf.range(before * J) % J == 0
            prompt = tf.tile(first_S[tf.newaxis, tf.newaxis], [dim(mask, 0), J, 1])
            mask = tf.concat([prompt, mask], 2)
            logits, model = self.model.ExtendStep(theta, ids, cache.model, before + time, mask)
            return logits, NestedMap(cache, model=model)

        return step


def decode_programs(
    task: LmModel, rows: int, prompt_length: int, max_length: int, beam_size: int = 1
) -> tuple[Step, Step]:
    """The programs that continue prompts: to read them, and one step of a greedy or a beam search; see
    `decoding_programs`.

    Args:
        rows: B, of all devices together.
        prompt_length: P.
        max_length: T, the most new tokens, for which there are caches.
    """
    options = SearchOptions(beam_size, 1, bos_id=BOS_ID, eos_id=EOS_ID, pad_id=PAD_ID)
    decoder = PromptDecoder(task, FlatBeamSearch(max_length, options), prompt_length)
    return decoding_programs("prefill", decoder, None, (rows, prompt_length))
