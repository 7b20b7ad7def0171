"""A translation model arranged once for TensorFlow's kernels: `Encode`, `InitCache` and `Step` of a search on a CPU.

The weights of products are packed (`BaseLayer.PackWeights`); the layers compute the same with them, by the same code.
"""

import contextlib
from collections.abc import Iterator
from typing import cast

import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.base_layer import BaseLayer
from lingvo_moe.core.kernels import tensorflow
from lingvo_moe.core.kernels.packed_weights import PackAs
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import single_device, use_mesh
from lingvo_moe.tasks.mt.decoding.decode_step import TranslationModel
from lingvo_moe.tasks.mt.decoding.saved_weights import SavedWeights
from lingvo_moe.tasks.mt.model import MtModel


class FastModel(tf.Module):
    """A model and its weights, for a search that TensorFlow's kernels run. The weights are its variables.

    Args:
        model: an MtModel, or another one, which runs as it is.
        theta: its weights, arrays or tensors.
        kind: one of packed_weights.WEIGHTS: "float32", or "int8" for the weights of products.

    Raises:
        ValueError: int8 for a model that is no MtModel.
    """

    def __init__(self, model: TranslationModel, theta: NestedMap, kind: str = "float32"):
        super().__init__(name="fast_model")
        packed = _packed(model)
        if kind == "int8" and packed is None:
            raise ValueError(
                f"weights=int8 is for mt.MtModel itself; {type(model).__name__} runs as it is: take float32"
            )
        packing = PackAs(kind)
        # tf.Module would track layers and NestedMaps, but no closures.
        self._model, self._packed = lambda: model, lambda: packed
        self._pack = lambda theta: packed.PackWeights(theta, packing) if packed else theta
        self._weights = SavedWeights(self._pack(theta))

    def Assign(self, theta: NestedMap) -> None:
        """Assigns other weights of the same model.

        Raises:
            ValueError: with weights of 8 bits, which TensorFlow packs when they are first used.
        """
        self._weights.Assign(self._pack(theta))

    def Tensors(self) -> NestedMap:
        """Reads the weights into the graph that is being traced, as the argument `weights` of the methods below.

        Call it once, outside of the search's loop.
        """
        return self._weights.Tensors()

    @property
    def model(self) -> TranslationModel:
        """The model. Its methods take `Tensors` as theta and must be traced while TensorFlow's kernels are in use."""
        return self._model()

    def Encode(self, weights: NestedMap, src: NestedMap) -> NestedMap:
        """See MtModel.Encode."""
        with _tensorflows_kernels():
            return self.model.Encode(weights, src)

    def InitCache(
        self, weights: NestedMap, encoded: NestedMap, beam_size: int, max_length: int
    ) -> tuple[NestedMap, NestedMap]:
        """See MtModel.InitCache.

        Returns:
            The cache, and the letters of each of its tensors, in the same structure: B is the row, L the step.
        """
        with _tensorflows_kernels():
            cache = self.model.InitCache(weights, encoded, beam_size, max_length)
            return cache, self.model.CacheLetters()

    def Step(
        self, weights: NestedMap, ids: tf.Tensor, cache: NestedMap, time: tf.Tensor, mask: tf.Tensor
    ) -> tuple[tf.Tensor, NestedMap]:
        """Returns logits of the next token, float32 [B,J,V], and the cache with one more position.

        Args as for MtModel.ExtendStep, with `weights` from `Tensors` for theta. The cache's memory is overwritten: the
        old cache must not be used again.
        """
        with _tensorflows_kernels():
            return self.model.ExtendStep(weights, ids, cache, time, mask)

    def OfTokens(self, weights: NestedMap, ids: tf.Tensor) -> NestedMap:
        """Returns the weights with which `Step` computes the logits of the target tokens `ids` only: [B,J,U].

        Args:
            weights: from `Tensors`.
            ids: int32 [U]. If U is unknown while tracing, it must be a multiple of 64.

        Raises:
            ValueError: the model is no MtModel.
        """
        packed = self._packed()
        if packed is None:
            raise ValueError("a shortlist is for mt.MtModel itself; this model scores all tokens")
        some = packed.softmax.OfTokens(weights.target_embedding, ids)
        return NestedMap(weights, target_embedding=some)


@contextlib.contextmanager
def _tensorflows_kernels() -> Iterator[None]:
    """Layers compute with TensorFlow's kernels, on one device."""
    with use_mesh(single_device()), kernels.using(tensorflow):
        yield


def _packed(model: TranslationModel) -> MtModel | None:
    """The model if it is an MtModel whose weights can be packed."""
    packs = isinstance(model, MtModel) and type(model).PackWeights is not BaseLayer.PackWeights
    return cast(MtModel, model) if packs else None
