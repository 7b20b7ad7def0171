"""Decoding of translations, whole or one step of the flat beam search at a time.

The step is what the search's loop runs, as a function of tensors: so it can be lowered as a program of
its own, run by another loop, and planned for machines that are not there.

Letters: B row, S source token, J hypothesis, V vocabulary; in caches, as in attention.py, L step of
the search, N head, K key dimension.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_moe.core.decode.flat_beam_search import FlatBeamSearch, SearchOptions, StepFn
from lingvo_moe.core.engine.specs import TensorSpec
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.op_by_op import is_op_by_op
from lingvo_moe.core.sharding import dims_mapping, single_device, use_mesh
from lingvo_moe.core.step import Step
from lingvo_moe.tasks.mt.decoding.growing_beam_search import BLOCK, GrowingBeamSearch, state_letters
from lingvo_moe.tasks.mt.decoding.shortlist_columns import (
    ALLOWED,
    LETTERS,
    ShortlistColumns,
    logits_of_lists,
    tokens_of_places,
)
from lingvo_moe.tasks.mt.input.special_ids import BOS_ID, EOS_ID, PAD_ID, UNK_ID


class Decoder:
    """A model and a search over its translations.

    Args:
        model: with `Encode`, `InitCache` and `ExtendStep` as MtModel has them.
        options: of the search.
        max_length: the most tokens of a translation, EOS included.
        vocab_size: tokens that may come out, of the model's V; None: all. PAD, BOS and UNK never do.
        shortlist: which tokens a row is scored for, by its source, where TensorFlow's own kernels run; None: all. The
            model then has `OfTokens` as MtModel has it.
    """

    def __init__(
        self,
        model: Any,
        options: SearchOptions,
        max_length: int,
        vocab_size: int | None = None,
        shortlist: ShortlistColumns | None = None,
    ):
        self.model, self.max_length = model, max_length
        self._beam_size = options.beam_size
        self._vocab_size = vocab_size or model.p.target_vocab_size
        allowed_V = np.arange(self._vocab_size) != UNK_ID
        self.search = FlatBeamSearch(max_length, options, allowed_V)
        self._shortlist = shortlist
        self._growing = GrowingBeamSearch(
            max_length, options, allowed_V if shortlist is None else ALLOWED
        )

    def Search(self, theta: NestedMap, src: NestedMap, max_lengths_B: tf.Tensor) -> NestedMap:
        """The whole search: `Start`, then `Step` until every row is done; see `flat_beam_search`.

        Where TensorFlow's own kernels run (core/op_by_op.py) rows and lengths may be unknown, and caches
        grow: see growing_beam_search.py.

        Args:
            theta: the weights; op by op also as the model's `ForInference` arranges them.
            src: int32 `ids`, `segment_ids` (1, or 0 at padding) and `segment_pos`, [B,S] each.
            max_lengths_B: int32, the most tokens of each row's translations, 0 for none.
        """
        encoded = self.model.Encode(theta, src)
        if not is_op_by_op():
            cache = self.InitCache(theta, encoded)
            return self.search.Run(self._StepFn(theta), cache, max_lengths_B)
        cache = self.model.InitCache(theta, encoded, self._beam_size, BLOCK)
        step, letters = self._StepFn(theta), self.model.CACHE_LETTERS_OP_BY_OP
        if self._shortlist is None:
            return self._growing.Run(step, cache, max_lengths_B, cache_letters(cache, letters))
        cache.shortlist, union_U = self._shortlist.Lists(src.ids)
        step = self._ShortlistStepFn(self.model.OfTokens(theta, union_U))
        letters = cache_letters(cache, {**letters, "shortlist": LETTERS})
        found = self._growing.Run(step, cache, max_lengths_B, letters)
        return NestedMap(found, ids_BKT=tokens_of_places(cache.shortlist, found.ids_BKT))

    def Start(
        self, theta: NestedMap, src: NestedMap, max_lengths_B: tf.Tensor
    ) -> tuple[NestedMap, NestedMap]:
        """The state and the caches before the first step; arguments as for `Search`."""
        encoded = self.model.Encode(theta, src)
        return self.search.Start(max_lengths_B), self.InitCache(theta, encoded)

    def Step(
        self, state: NestedMap, cache: NestedMap, theta: NestedMap
    ) -> tuple[NestedMap, NestedMap]:
        """One step: embeds the newest tokens, extends the decoder by them, expands the beams.

        Pure. State and caches come out as they go in, so that their memory can be donated.
        """
        return self.search.Step(self._StepFn(theta), state, cache)

    def InitCache(self, theta: NestedMap, encoded: NestedMap) -> NestedMap:
        """The caches before the first step, from what the model's `Encode` gave."""
        return self.model.InitCache(theta, encoded, self._beam_size, self.max_length)

    def _StepFn(self, theta: NestedMap) -> StepFn:
        def step(ids: tf.Tensor, cache: Any, time: tf.Tensor, mask: tf.Tensor) -> tuple:
            logits, cache = self.model.ExtendStep(theta, ids, cache, time, mask)
            return logits[..., : self._vocab_size], cache

        return step

    def _ShortlistStepFn(self, theta: NestedMap) -> StepFn:
        """The same over places in each row's list, with weights of the tokens of all lists."""

        def step(places: tf.Tensor, cache: Any, time: tf.Tensor, mask: tf.Tensor) -> tuple:
            ids = tokens_of_places(cache.shortlist, places)
            logits, cache = self.model.ExtendStep(theta, ids, cache, time, mask)
            return logits_of_lists(cache.shortlist, logits), cache

        return step


class DecodeSpecs:
    """What the arguments of a `Decoder.Step` of an MtModel look like, and how they are cut.

    Attributes:
        state, cache, theta: specs in the structures of Step's arguments. Rows are cut as activations
            are, heads where their letter is, theta as in training.
    """

    def __init__(self, decoder: Decoder, rows: int, source_length: int):
        p = decoder.model.p
        self._split = p.activation_split
        with use_mesh(single_device()):
            state = _traced(decoder.search.Start, tf.TensorSpec([rows], tf.int32))
            memory = tf.TensorSpec([rows, source_length, p.model_dim], decoder.model.fprop_dtype)
            segment_ids = tf.TensorSpec([rows, source_length], tf.int32)
            encoded = NestedMap(memory=memory, segment_ids=segment_ids)
            if "task_ids" in decoder.model.Needs(p, decoder=True):
                encoded.task_ids = tf.TensorSpec([rows], tf.int32)
            self.theta = decoder.model.VariableSpecs()
            cache = _traced(
                decoder.InitCache,
                self.theta.Transform(lambda s: tf.TensorSpec(s.shape, s.dtype)),
                encoded,
            )
        self.state = self._Specs(state, state_letters(state))
        self.cache = self._Specs(cache, cache_letters(cache, decoder.model.CACHE_LETTERS))

    def _Specs(self, tree: NestedMap, letters: list[str]) -> NestedMap:
        specs = []
        for names, value in zip(letters, tree.Flatten(), strict=True):
            split = dims_mapping(names, self._split)
            specs.append(TensorSpec(tuple(value.shape), value.dtype.name, split))
        return tree.Pack(specs)


def decode_step(
    task: Any, rows: int, source_length: int, beam_size: int = 4, max_length: int = 0
) -> Step:
    """The program of one step of the beam search: (state, cache, theta) -> (state, cache), donated.

    Args:
        task: an MtModel.
        rows: B, of all devices together.
        source_length: S.
        beam_size: J.
        max_length: the longest translation, for which the caches are made; 0: 2 S + 10, as the
            translator does it up to its own limit.
    """
    options = SearchOptions(beam_size, 1, bos_id=BOS_ID, eos_id=EOS_ID, pad_id=PAD_ID)
    decoder = Decoder(task, options, max_length or 2 * source_length + 10)
    specs = DecodeSpecs(decoder, rows, source_length)
    return Step("decode_step", decoder.Step, (specs.state, specs.cache, specs.theta), (0, 1))


def cache_letters(cache: NestedMap, by_part: dict[str, str]) -> list[str]:
    """The letters of each tensor of a cache, in the order of `Flatten`, from those of its parts."""
    return [by_part[re.split(r"[.\[]", path)[0]] for path, _ in cache.FlattenItems()]


def _traced(fn: Callable[..., Any], *specs: Any) -> Any:
    """What `fn` returns for arguments of these specs, without running it."""
    return tf.function(fn, autograph=False).get_concrete_function(*specs).structured_outputs
