"""The weights of a translation model as variables: as they are, or packed for TensorFlow's kernels on a CPU."""

from typing import Any

import tensorflow as tf

from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.mt.decode_step import TranslationModel
from lingvo_moe.tasks.text.decoding.saved_weights import PackedWeights


class FastModel(PackedWeights):
    """A translation model and its weights; arguments and errors as of PackedWeights."""

    def __init__(self, model: TranslationModel, theta: NestedMap, kind: str = "float32"):
        super().__init__(model, theta, kind)
        self._model = lambda: model

    @property
    def model(self) -> TranslationModel:
        """The model, as it was given."""
        return self._model()

    def OfTokens(self, weights: NestedMap, ids: tf.Tensor) -> NestedMap:
        """Returns the weights with which `ExtendStep` gives the logits of the target tokens `ids` only: [B,J,U].

        Args:
            weights: from `Tensors`.
            ids: int32 [U]. If U is unknown while tracing, it must be a multiple of 64.

        Raises:
            ValueError: the model packs no weights.
        """
        if not self.are_packed:
            raise ValueError(
                f"a shortlist is for models that pack their weights; {type(self.model).__name__} scores all tokens"
            )
        model: Any = self.model
        some = model.softmax.OfTokens(weights[model.softmax_table], ids)
        return NestedMap(weights, **{model.softmax_table: some})
