"""Continuations of prompts for XLA: a program that reads prompts, and one step of the search as another.

Both are functions of tensors, so that they can be lowered, run by a loop elsewhere, and planned for machines that you
do not have. `prompt_search.py` is the same search with TensorFlow's own kernels.

Letters: B row, P token of a prompt, J hypothesis, S place in the flat sequence, V vocabulary.
"""

from typing import Any

import tensorflow as tf

from lingvo_moe.core.decode import sampling
from lingvo_moe.core.decode.flat_beam_search import FlatBeamSearch, SearchOptions, StepFn
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.nested_map import NestedMap, map_structure
from lingvo_moe.core.task.step import Step
from lingvo_moe.core.tensors import dim
from lingvo_moe.tasks.lm.lm_model import LmModel
from lingvo_moe.tasks.text.decoding.programs import decoding_programs
from lingvo_moe.tasks.text.vocabulary.special_ids import BOS_ID, EOS_ID, PAD_ID


class PromptDecoder:
    """A language model and a search over continuations of prompts.

    Args:
        search: over T new tokens at most, EOS included.
        prompt_length: P, the tokens of the longest prompt, its first mark included.
        vocab_size: texts contain only the first vocab_size of the model's V tokens; None: all.
    """

    def __init__(
        self,
        model: LmModel,
        search: FlatBeamSearch,
        prompt_length: int,
        vocab_size: int | None = None,
    ):
        self.model, self.search = model, search
        # The last token of a prompt is what the first step extends caches by.
        self._before, self._vocab_size = prompt_length - 1, vocab_size or model.p.vocab_size

    def Start(
        self, theta: NestedMap, inputs: NestedMap, max_lengths_B: tf.Tensor
    ) -> tuple[NestedMap, NestedMap]:
        """Reads prompts: the state and the caches before the first step.

        Args:
            inputs: int32 `ids` [B,P], the prompts; `lengths` [B], where they end with prompts that are shorter, of so
                many tokens; with a SampledSearch `settings`, see sampling.LETTERS and PenalizedSearch.
            max_lengths_B: int32, the maximum number of new tokens of each row, EOS included; 0 skips the row.
        """
        before, rows = self._before, dim(inputs.ids, 0)
        cache = self.model.InitCache(rows, before + self.search.T)
        if before:
            at_P, at_S = tf.range(before), tf.range(before + self.search.T)
            seen = tf.tile((at_S <= at_P[:, tf.newaxis])[tf.newaxis], [rows, 1, 1])
            seen = self._InRows(seen, at_S, self._First(inputs))
            cache = self.model.ExtendStep(theta, inputs.ids[:, :-1], cache, at_P, seen)[1]
        return self.search.Start(max_lengths_B), self._ForAll(cache, inputs)

    def Step(
        self, state: NestedMap, cache: NestedMap, theta: NestedMap
    ) -> tuple[NestedMap, NestedMap]:
        """One token more of each row, or hypothesis.

        Pure. State and caches come out as they go in, so that their memory can be donated.
        """
        return self.search.Step(self._StepFn(theta), state, cache)

    def Caches(self, theta: NestedMap, inputs: NestedMap) -> NestedMap:
        """See SearchInSteps."""
        del theta
        cache = self.model.InitCache(dim(inputs.ids, 0), self._before + self.search.T)
        return self._ForAll(cache, inputs)

    def CacheLetters(self, cache: NestedMap) -> NestedMap:
        """See SearchInSteps."""
        settings = NestedMap(sampling.LETTERS, min_p="B", repetition_penalty="B")
        of_rows = {"first": "B", "settings": settings, "seen_BV": "BV"}
        more = {name: letters for name, letters in of_rows.items() if name in cache}
        return NestedMap(model=self.model.CacheLetters(), last="B", **more)

    def _First(self, inputs: NestedMap) -> tf.Tensor | None:
        """The place of each prompt's first token, [B]; None: they are equally long."""
        return self._before + 1 - inputs.lengths if "lengths" in inputs else None

    def _InRows(
        self, seen: tf.Tensor, steps_S: tf.Tensor, first_B: tf.Tensor | None
    ) -> tf.Tensor | NestedMap:
        """The mask [B,J,S] of ExtendStep without what comes before a prompt's first token, at `steps_S` of a cache."""
        if first_B is None:
            return seen
        real_BS = steps_S >= first_B[:, tf.newaxis]
        return NestedMap(mask=seen & real_BS[:, tf.newaxis], first=first_B)

    def _ForAll(self, cache: NestedMap, inputs: NestedMap) -> NestedMap:
        """A model's caches of one hypothesis as those of all, of which the first has the keys and values of prompts."""

        def padded(x: tf.Tensor, letters: str) -> tf.Tensor:
            return tf.pad(x, [[0, (self.search.J - 1) * (letter == "J")] for letter in letters])

        letters, ids = self.model.CacheLetters(), inputs.ids
        rows = NestedMap(model=map_structure(padded, cache, letters), last=ids[:, -1])
        if "lengths" in inputs:
            rows.first = self._First(inputs)
        if "settings" in inputs:
            rows.settings = inputs.settings
            read_BPV = ids[:, :, tf.newaxis] == tf.range(self._vocab_size)
            rows.seen_BV = tf.reduce_any(read_BPV, 1)
        return rows

    def _StepFn(self, theta: NestedMap) -> StepFn:
        J, before = self.search.J, self._before

        def step(ids: tf.Tensor, cache: Any, time: tf.Tensor, mask: tf.Tensor) -> tuple:
            ids = tf.where(time == 0, cache.last[:, tf.newaxis], ids)
            first_S = tf.range(before * J) % J == 0
            prompt = tf.tile(first_S[tf.newaxis, tf.newaxis], [dim(mask, 0), J, 1])
            mask = tf.concat([prompt, mask], 2)
            seen = self._InRows(mask, tf.range(dim(mask, 2)) // J, cache.get("first"))
            logits, model = self.model.ExtendStep(theta, ids, cache.model, before + time, seen)
            cache = NestedMap(cache, model=model)
            if "seen_BV" in cache:
                cache.seen_BV |= tf.range(self._vocab_size) == ids
            return logits[..., : self._vocab_size], cache

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
    prompts = NestedMap(ids=TensorSpec((rows, prompt_length), "int32"))
    return decoding_programs("prefill", decoder, prompts)
