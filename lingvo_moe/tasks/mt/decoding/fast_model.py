"""The weights of a translation model as variables: as they are, or packed for TensorFlow's kernels on a CPU."""

import re
from typing import Any, cast

import tensorflow as tf

from lingvo_moe.core.base_layer import BaseLayer
from lingvo_moe.core.kernels.eight_bit import EightBit
from lingvo_moe.core.kernels.packed_weights import PackAs
from lingvo_moe.core.kernels.weights import Heads, Packed
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.mt.decoding.decode_step import TranslationModel
from lingvo_moe.tasks.mt.model import MtModel


class SavedWeights(tf.Module):
    """One variable for each tensor of a tree of weights, plain (tensors, arrays) or packed."""

    def __init__(self, theta: NestedMap):
        super().__init__(name="weights")
        self._variables = [
            tf.Variable(value, trainable=False, name=re.sub(r"[\[\]]+", "_", path))
            for path, leaf in theta.FlattenItems()
            for value in _tensors(leaf)
        ]
        # Packed leaves without their tensors. tf.Module would track, and wrap, a NestedMap, but no closure.
        structure = theta.Transform(_empty)
        self._structure = lambda: structure

    def Tensors(self) -> NestedMap:
        """The weights as tensors of the graph that is being traced, in the structure of the tree."""
        values = map(tf.convert_to_tensor, self._variables)

        def read(leaf: Packed | None) -> Packed | tf.Tensor:
            if leaf is None:
                return next(values)
            return leaf.With(*(next(values) for _ in leaf.tensors))

        return self._structure().Transform(read)

    def Assign(self, theta: NestedMap) -> None:
        """Assigns other values to all variables, from a tree of the same structure and shapes.

        Raises:
            ValueError: some weights are of 8 bits.
        """
        leaves = theta.Flatten()
        if any(_has_8_bits(leaf) for leaf in leaves):
            raise ValueError(
                "weights of 8 bits cannot be assigned: TensorFlow packs them when they are first used and does not"
                " read them again"
            )
        values = [value for leaf in leaves for value in _tensors(leaf)]
        for variable, value in zip(self._variables, values, strict=True):
            variable.assign(value)


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


def _has_8_bits(leaf: Any) -> bool:
    return isinstance(leaf.packed if isinstance(leaf, Heads) else leaf, EightBit)


def _tensors(leaf: Any) -> tuple:
    return leaf.tensors if isinstance(leaf, Packed) else (leaf,)


def _empty(leaf: Any) -> Packed | None:
    return leaf.With(*(None for _ in leaf.tensors)) if isinstance(leaf, Packed) else None
