"""The weights of a translation model as variables: as they are, or packed for TensorFlow's kernels on a CPU."""

from typing import cast

import tensorflow as tf

from lingvo_moe.core.base_layer import BaseLayer
from lingvo_moe.core.kernels.packed_weights import PackAs
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.mt.decode_step import TranslationModel
from lingvo_moe.tasks.mt.model import MtModel
from lingvo_moe.tasks.text.decoding.saved_weights import SavedWeights


class FastModel(SavedWeights):
    """A model and its weights, which are packed (`BaseLayer.PackWeights`) and read by the layers' own code.

    The model's methods take `Tensors` as theta, and must be traced while TensorFlow's kernels are in use.

    Args:
        model: an MtModel, or another one, which runs as it is.
        theta: its weights, arrays or tensors.
        kind: one of packed_weights.WEIGHTS: "float32", or "int8" for the weights of products.

    Raises:
        ValueError: int8 for a model that is no MtModel.
    """

    def __init__(self, model: TranslationModel, theta: NestedMap, kind: str = "float32"):
        packs = isinstance(model, MtModel) and type(model).PackWeights is not BaseLayer.PackWeights
        packed = cast(MtModel, model) if packs else None
        if kind == "int8" and packed is None:
            raise ValueError(
                f"weights=int8 is for mt.MtModel itself; {type(model).__name__} runs as it is: take float32"
            )

        def pack(theta: NestedMap) -> NestedMap:
            return packed.PackWeights(theta, PackAs(kind)) if packed else theta

        super().__init__(pack(theta))
        # tf.Module would track layers, but no closures.
        self._model, self._packed, self._pack = lambda: model, lambda: packed, pack

    @property
    def model(self) -> TranslationModel:
        """The model, as it was given."""
        return self._model()

    def Assign(self, theta: NestedMap) -> None:
        """Packs `theta` and assigns it."""
        super().Assign(self._pack(theta))

    def OfTokens(self, weights: NestedMap, ids: tf.Tensor) -> NestedMap:
        """Returns the weights with which `ExtendStep` gives the logits of the target tokens `ids` only: [B,J,U].

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
