"""Tokens of texts of unequal length, whose keys and values lie in pages of a pool; with TensorFlow's own kernels.

Letters: B text, T new token, R = B T, U page that the batch reads (core/kernels/paged.py), L token so far, V
vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.decode.flat_beam_search import SearchOptions
from lingvo_moe.core.decode.pages import PAGE
from lingvo_moe.core.kernels import paged
from lingvo_moe.core.moe.routers.losses_and_metrics import noting_choices
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import single_device, use_mesh
from lingvo_moe.core.tensors import dim
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
        with use_mesh(single_device()), kernels.using(paged.kernels_of(paged.nowhere())):
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
        """Draws the token after each of the tokens of texts.

        Args:
            places: of the newest token of each text, and of those that may follow it.
            before_BL: int32, the tokens that a repetition penalty is for, in any order and number; none if L is 0.
            settings: as PromptSearch.Search takes them, and `step`, int32 [B], how many tokens were drawn.

        Returns:
            The pool; int32 [B,T], the tokens, or END; float32 [B,T], their log-probabilities by the model;
            of each MoE layer int32 [B,T,k], the experts of the tokens of places.
        """
        with noting_choices() as experts:
            logits, pool = self.Extend(theta, places, pool)
        with use_mesh(single_device()), kernels.using(paged.tensorflow):
            rows, times = dim(logits, 0), dim(logits, 1)
            logits_RV = tf.cast(tf.reshape(logits[..., : self._size], [-1, self._size]), tf.float32)
            cache = NestedMap(settings=settings, seen_BV=self._Seen(before_BL))
            if not isinstance(times, int):  # else it is 1
                cache = cache.Transform(lambda x: tf.repeat(x, times, 0))
                cache.settings.step += tf.tile(tf.range(times), [rows])
            tokens_BT, log_probs_BT = (
                tf.reshape(x, [rows, times]) for x in self._Drawn(logits_RV, cache)
            )
        return pool, tokens_BT, log_probs_BT, experts

    def _Seen(self, before_BL: tf.Tensor) -> tf.Tensor:
        """Whether each token of the vocabulary is among some, bool [B,V]."""
        rows = dim(before_BL, 0)
        row_BL = tf.zeros_like(before_BL) + tf.range(rows)[:, tf.newaxis]
        at = tf.reshape(tf.stack([row_BL, before_BL], -1), [-1, 2])
        return tf.scatter_nd(at, tf.ones(tf.shape(at)[:1]), [rows, self._size]) > 0

    def _Drawn(self, logits_RV: tf.Tensor, cache: NestedMap) -> tuple[tf.Tensor, tf.Tensor]:
        """The tokens [R] that are drawn, or END, and their log-probabilities [R]; `cache` has settings and seen_BV."""
        tokens_R = self._draws.Drawn(logits_RV, cache, cache.settings.step)
        log_probs_R = log_probs_of(logits_RV, tokens_R[:, tf.newaxis])[:, 0]
        return tf.where(tokens_R == self._eos, END, tokens_R), log_probs_R
