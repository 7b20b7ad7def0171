"""Continuations of prompts, as ids: the prompts at once, then flat beam search or samples, a token a step.

Both are functions of tensors, so that they can be lowered, run by a loop elsewhere (text/decoding/mesh_search.py), and
planned for machines that you do not have. `prompt_search.py` is the same search with TensorFlow's own kernels.

Letters: B row, P token of a prompt, J hypothesis, S place in the flat sequence, V vocabulary, X = J K.
"""

from typing import Any, Protocol

import tensorflow as tf

from lingvo_moe.core.decode import sampling
from lingvo_moe.core.decode.flat_beam_search import FlatBeamSearch, SearchOptions, StepFn
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.nested_map import NestedMap, map_structure
from lingvo_moe.core.task.step import Step
from lingvo_moe.core.tensors import dim
from lingvo_moe.tasks.text.decoding.programs import decoding_programs
from lingvo_moe.tasks.text.vocabulary.special_ids import BOS_ID, EOS_ID, PAD_ID


class LanguageModel(Protocol):
    """The methods of a model that the search calls; `LmModel` documents them."""

    def InitCache(self, batch: int | tf.Tensor, length: int) -> Any: ...

    def CacheLetters(self) -> Any: ...

    def ExtendStep(
        self, theta: NestedMap, ids: tf.Tensor, cache: Any, time: tf.Tensor, mask: tf.Tensor
    ) -> tuple[tf.Tensor, Any]: ...


class PromptDecoder:
    """A language model and a search over continuations of prompts.

    Args:
        search: over T new tokens at most, EOS included.
        vocab_size: texts contain only the first vocab_size of the model's V tokens.
        prompt_length: P, the tokens of the longest prompt, its first mark included; None: caches say it, and grow.
    """

    def __init__(
        self, model: LanguageModel, search: Any, vocab_size: int, prompt_length: int | None = None
    ):
        self.model, self.search, self._vocab_size = model, search, vocab_size
        # The last token of a prompt is what the first step extends caches by.
        self._before = None if prompt_length is None else prompt_length - 1

    def Start(
        self, theta: NestedMap, inputs: NestedMap, max_lengths_B: tf.Tensor
    ) -> tuple[NestedMap, NestedMap]:
        """Reads prompts: the state and the caches before the first step.

        Args:
            inputs: int32 `ids` [B,P], the prompts; `lengths` [B], of how many tokens they are, where they end with
                shorter ones; with a SampledSearch `settings`: see sampling.sample, with min_p and repetition_penalty,
                float32 [B].
            max_lengths_B: int32, the maximum number of new tokens of each row, EOS included; 0 skips the row.
        """
        return self.search.Start(max_lengths_B), self._Read(theta, inputs, self.search.T)

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
        rows, before = dim(inputs.ids, 0), dim(inputs.ids, 1) - 1
        return self._ForAll(self.model.InitCache(rows, before + self.search.T), inputs)

    def CacheLetters(self, cache: NestedMap) -> NestedMap:
        """See SearchInSteps."""
        settings = NestedMap(sampling.LETTERS, min_p="B", repetition_penalty="B")
        of_rows = {"before": "B", "first": "B", "settings": settings, "seen_BV": "B."}
        more = {name: letters for name, letters in of_rows.items() if name in cache}
        return NestedMap(model=self.model.CacheLetters(), last="B", **more)

    def _Read(self, theta: NestedMap, inputs: NestedMap, steps: int) -> NestedMap:
        """The caches with all tokens of prompts but the last, and room for so many steps."""
        rows, before = dim(inputs.ids, 0), dim(inputs.ids, 1) - 1
        cache = self.model.InitCache(rows, before + steps)

        def read() -> Any:
            at_P, at_S = tf.range(before), tf.range(before + steps)
            seen = tf.tile((at_S <= at_P[:, tf.newaxis])[tf.newaxis], [rows, 1, 1])
            seen = _in_rows(seen, at_S, _first_of(inputs))
            return self.model.ExtendStep(theta, inputs.ids[:, :-1], cache, at_P, seen)[1]

        if not isinstance(before, int):
            cache = tf.cond(before > 0, read, lambda: cache)
        elif before:
            cache = read()
        return self._ForAll(cache, inputs)

    def _ForAll(self, cache: NestedMap, inputs: NestedMap) -> NestedMap:
        """A model's caches of one hypothesis as those of all, of which the first has the keys and values of prompts."""
        others, ids = self.search.J - 1, inputs.ids

        def padded(x: tf.Tensor, letters: str) -> tf.Tensor:
            sizes = zip(letters, x.shape.as_list(), strict=True)
            room = [[0, others * size if letter in "JX" else 0] for letter, size in sizes]
            return tf.pad(x, room) if others else x

        letters = self.model.CacheLetters()
        rows = NestedMap(model=map_structure(padded, cache, letters), last=ids[:, -1])
        if self._before is None:
            rows.before = tf.fill([dim(ids, 0)], dim(ids, 1) - 1)
        if "lengths" in inputs:
            rows.first = _first_of(inputs)
        if "settings" in inputs:
            rows.settings = inputs.settings
            row_BP = tf.zeros_like(ids) + tf.range(dim(ids, 0))[:, tf.newaxis]
            at = tf.reshape(tf.stack([row_BP, ids], -1), [-1, 2])
            nothing_BV = tf.zeros([dim(ids, 0), self._vocab_size], tf.bool)
            rows.seen_BV = tf.tensor_scatter_nd_update(
                nothing_BV, at, tf.fill(tf.shape(at)[:1], True)
            )
        return rows

    def _StepFn(self, theta: NestedMap) -> StepFn:
        J, size = self.search.J, self._vocab_size

        def step(ids: tf.Tensor, cache: Any, time: tf.Tensor, mask: tf.Tensor) -> tuple:
            ids = tf.where(time == 0, cache.last[:, tf.newaxis], ids)
            before = cache.before[0] if self._before is None else self._before
            first_S = tf.range(before * J) % J == 0
            prompt = tf.tile(first_S[tf.newaxis, tf.newaxis], [dim(mask, 0), J, 1])
            mask = tf.concat([prompt, mask], 2)
            seen = _in_rows(mask, tf.range(dim(mask, 2)) // J, cache.get("first"))
            logits, model = self.model.ExtendStep(theta, ids, cache.model, before + time, seen)
            logits, cache = logits[..., :size], NestedMap(cache, model=model)
            if "settings" in cache:
                cache.seen_BV |= tf.range(size) == ids
            return logits, cache

        return step


def _first_of(inputs: NestedMap) -> tf.Tensor | None:
    """The place of each prompt's first token, [B]; None: all have equally many."""
    return dim(inputs.ids, 1) - inputs.lengths if "lengths" in inputs else None


def _in_rows(
    seen: tf.Tensor, steps_S: tf.Tensor, first_B: tf.Tensor | None
) -> tf.Tensor | NestedMap:
    """The mask [B,J,S] of ExtendStep without what lies before prompts' first tokens; `steps_S` are those of a cache."""
    if first_B is None:
        return seen
    real_BS = steps_S >= first_B[:, tf.newaxis]
    return NestedMap(mask=seen & real_BS[:, tf.newaxis], first=first_B)


def decode_programs(
    task: Any, rows: int, prompt_length: int, max_length: int, beam_size: int = 1
) -> tuple[Step, Step]:
    """The programs that continue prompts: to read them, and one step of a greedy or a beam search; see
    `decoding_programs`.

    Args:
        task: an LmModel.
        rows: B, of all devices together.
        prompt_length: P.
        max_length: T, the most new tokens, for which there are caches.
    """
    options = SearchOptions(beam_size, 1, bos_id=BOS_ID, eos_id=EOS_ID, pad_id=PAD_ID)
    search = FlatBeamSearch(max_length, options)
    decoder = PromptDecoder(task, search, task.p.vocab_size, prompt_length)
    prompts = NestedMap(ids=TensorSpec((rows, prompt_length), "int32"))
    return decoding_programs("prefill", decoder, prompts)
