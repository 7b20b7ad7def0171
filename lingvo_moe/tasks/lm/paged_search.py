"""Tokens of texts of unequal length, whose keys and values lie in pages of a pool; with TensorFlow's own kernels.

Letters: B text, T new token, U page that the batch reads (core/kernels/paged.py), L token so far, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.decode.flat_beam_search import SearchOptions
from lingvo_moe.core.decode.pages import PAGE
from lingvo_moe.core.kernels import paged
from lingvo_moe.core.moe.routers.base import noting_choices
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import single_device, use_mesh
from lingvo_moe.tasks.lm.prompt_decoder import LanguageModel
from lingvo_moe.tasks.lm.prompt_search import PenalizedSearch
from lingvo_moe.tasks.text.decoding.sampled_search import log_probs_of

END = -1  # in the place of a token: the text ends
# The first arguments of both functions: the new tokens and their positions, then the fields of PagePlaces.
PLACES = (
    tf.TensorSpec([None, None], tf.int32, "ids"),
    tf.TensorSpec([None, None], tf.int32, "at"),
    tf.TensorSpec([None, None], tf.int32, "slots"),
    *(tf.TensorSpec([None], tf.int32, name) for name in ("pages", "owners", "firsts")),
)


class PagedSearch:
    """A model and its draws; methods run inside of a tf.function.

    Args:
        model: an LmModel.
        options: the marks; the beam is 1.
        allowed_V: as PromptSearch has it.
    """

    def __init__(self, model: LanguageModel, options: SearchOptions, allowed_V: np.ndarray):
        self._model, self._eos, self._size = model, options.eos_id, allowed_V.size
        self._draws = PenalizedSearch(1, options, allowed_V)

    def Pool(self, pages: int | tf.Tensor) -> NestedMap:
        """Empty pages of all layers, in the structure of the model's caches."""
        nothing = paged.PagePlaces(*[tf.zeros([0], tf.int32)] * 4)
        with use_mesh(single_device()), kernels.using(paged.kernels_of(nothing)):
            return self._model.InitCache(pages, PAGE)

    def Extend(
        self, theta: NestedMap, places: Sequence[tf.Tensor], pool: NestedMap
    ) -> tuple[tf.Tensor, NestedMap]:
        """Writes the keys and values of tokens; returns their logits [B,T,V], and the pool, which was overwritten."""
        ids_BT, at_BT, *more = places
        where = paged.PagePlaces(*more)
        with use_mesh(single_device()), kernels.using(paged.kernels_of(where)):
            return self._model.ExtendStep(theta, ids_BT, pool, at_BT, where.Mask(at_BT, PAGE))

    def Step(
        self,
        theta: NestedMap,
        places: Sequence[tf.Tensor],
        before_BL: tf.Tensor,
        settings: NestedMap,
        pool: NestedMap,
    ) -> tuple[NestedMap, tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        """Draws the next token of each text.

        Args:
            places: of the newest token of each text, T = 1.
            before_BL: int32, the tokens that a repetition penalty is for, in any order and number; none if L is 0.
            settings: as PromptSearch.Search takes them, and `step`, int32 [B], how many tokens were drawn.

        Returns:
            The pool; int32 [B], the tokens, or END; float32 [B], their log-probabilities by the model;
            of each MoE layer int32 [B,1,k], the experts of the newest tokens.
        """
        with noting_choices() as experts:
            logits, pool = self.Extend(theta, places, pool)
        with use_mesh(single_device()), kernels.using(paged.tensorflow):
            logits_BV = tf.cast(logits[:, 0, : self._size], tf.float32)
            rows = tf.shape(before_BL)[0]
            row_BL = tf.zeros_like(before_BL) + tf.range(rows)[:, tf.newaxis]
            at = tf.reshape(tf.stack([row_BL, before_BL], -1), [-1, 2])
            seen_BV = tf.scatter_nd(at, tf.ones(tf.shape(at)[:1]), [rows, self._size]) > 0
            cache = NestedMap(settings=settings, seen_BV=seen_BV)
            tokens_B = self._draws.Drawn(logits_BV, cache, settings.step)
            log_probs_B = log_probs_of(logits_BV, tokens_B[:, tf.newaxis])[:, 0]
        return pool, tf.where(tokens_B == self._eos, END, tokens_B), log_probs_B, experts
