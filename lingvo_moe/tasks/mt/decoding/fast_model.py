"""A translation model arranged once for TensorFlow's kernels: `Encode`, `InitCache` and `Step` of a search on a CPU.

`FastModel` walks the layers of an MtModel and puts others in their place, which compute the same over pre-packed
weights. `_FORMS` lists them by what a layer says that it computes (`BaseLayer.COMPUTES`). A layer that says nothing,
e.g. one derived from these, stays as it is, with its own weights and everything below it; so does another model. What
the layers between compute (residual connections, normalizations, embeddings) is stated in core and in model.py alone.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.base_layer import BaseLayer
from lingvo_moe.core.kernels import tensorflow
from lingvo_moe.core.layers.attention import MultiHeadAttention
from lingvo_moe.core.layers.feed_forward import FeedForward
from lingvo_moe.core.layers.repeat import Repeat
from lingvo_moe.core.layers.softmax import Softmax
from lingvo_moe.core.layers.transformer import TransformerBlock, TransformerLayer, TransformerStack
from lingvo_moe.core.moe.layer import MoELayer
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import single_device, use_mesh
from lingvo_moe.tasks.mt.decoding.decode_step import TranslationModel
from lingvo_moe.tasks.mt.decoding.packed_attention import PackedCrossAttention, PackedSelfAttention
from lingvo_moe.tasks.mt.decoding.packed_experts import PackedMoELayer
from lingvo_moe.tasks.mt.decoding.packed_layers import (
    PackedFeedForward,
    PackedSoftmax,
    UnrolledRepeat,
)
from lingvo_moe.tasks.mt.decoding.saved_weights import SavedWeights
from lingvo_moe.tasks.mt.model import MtModel

# From a layer's theta to the weights that its replacement takes.
_Pack = Callable[[NestedMap], NestedMap]


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
        self._packs = _computes(model) == MtModel.COMPUTES
        if kind == "int8" and not self._packs:
            raise ValueError(
                f"weights=int8 is for mt.MtModel itself; {type(model).__name__} runs as it is: take float32"
            )
        form, pack = _form(model, kind)
        # tf.Module would track layers and NestedMaps, but no closures.
        self._form, self._pack = lambda: form, pack
        self._weights = SavedWeights(pack(theta))

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
    def form(self) -> Any:
        """The model with its layers replaced. Its methods take `Tensors` as theta and must be traced while TensorFlow's
        kernels are in use."""
        return self._form()

    def Encode(self, weights: NestedMap, src: NestedMap) -> NestedMap:
        """See MtModel.Encode."""
        with _tensorflows_kernels():
            return self.form.Encode(weights, src)

    def InitCache(
        self, weights: NestedMap, encoded: NestedMap, beam_size: int, max_length: int
    ) -> tuple[NestedMap, NestedMap]:
        """See MtModel.InitCache.

        Returns:
            The cache, and the letters of each of its tensors, in the same structure: B is the row, L the step.
        """
        with _tensorflows_kernels():
            cache = self.form.InitCache(weights, encoded, beam_size, max_length)
        return cache, self.form.CacheLetters()

    def Step(
        self, weights: NestedMap, ids: tf.Tensor, cache: NestedMap, time: tf.Tensor, mask: tf.Tensor
    ) -> tuple[tf.Tensor, NestedMap]:
        """Returns logits of the next token, float32 [B,J,V], and the cache with one more position.

        Args as for MtModel.ExtendStep, with `weights` from `Tensors` for theta. The cache's memory is overwritten: the
        old cache must not be used again.
        """
        with _tensorflows_kernels():
            return self.form.ExtendStep(weights, ids, cache, time, mask)

    def OfTokens(self, weights: NestedMap, ids: tf.Tensor) -> NestedMap:
        """Returns the weights with which `Step` computes the logits of the target tokens `ids` only: [B,J,U].

        Args:
            weights: from `Tensors`.
            ids: int32 [U]. If U is unknown while tracing, it must be a multiple of 64.

        Raises:
            ValueError: the model is no MtModel.
        """
        if not self._packs:
            raise ValueError("a shortlist is for mt.MtModel itself; this model scores all tokens")
        some = self.form.softmax.OfTokens(weights.target_embedding, ids)
        return NestedMap(weights, target_embedding=some)


@contextlib.contextmanager
def _tensorflows_kernels() -> Iterator[None]:
    """Layers that stay as they are compute with TensorFlow's kernels, on one device."""
    with use_mesh(single_device()), kernels.using(tensorflow):
        yield


def _computes(layer: Any) -> str:
    """The layer's COMPUTES, which names its computation; '' for an object that is no layer of core."""
    return layer.COMPUTES if isinstance(layer, BaseLayer) else ""


def _form(layer: Any, kind: str) -> tuple[Any, _Pack]:
    """The fast form of a layer, and a function that packs its weights; the layer itself where `_FORMS` has none."""
    make = _FORMS.get(_computes(layer))
    return make(layer, kind) if make else (layer, lambda theta: theta)


def _packed(form: type) -> Callable:
    """A form that computes over weights of its own."""

    def make(layer: BaseLayer, kind: str) -> tuple[Any, _Pack]:
        packed = form(layer)
        return packed, lambda theta: packed.Pack(theta, kind)

    return make


def _moe(layer: MoELayer, kind: str) -> tuple[Any, _Pack]:
    if not PackedMoELayer.Takes(layer):
        return layer, lambda theta: theta
    return _packed(PackedMoELayer)(layer, kind)


def _repeat(layer: Repeat, kind: str) -> tuple[Any, _Pack]:
    body, pack = _form(layer.body, kind)

    def each(theta: NestedMap) -> NestedMap:
        slices = [theta.body.Transform(lambda w, i=i: w[i]) for i in range(layer.p.num_repeats)]
        return NestedMap(body=[pack(one) for one in slices])

    return UnrolledRepeat(body), each


def _block(layer: TransformerBlock, kind: str) -> tuple[Any, _Pack]:
    forms, packs = zip(*(_form(one, kind) for one in layer.layers), strict=True)

    def each(theta: NestedMap) -> NestedMap:
        pairs = zip(packs, theta.layers, strict=True)
        return NestedMap(theta, layers=[pack(one) for pack, one in pairs])

    return _with_children(layer, layers=list(forms)), each


def _layer(layer: TransformerLayer, kind: str) -> tuple[Any, _Pack]:
    forms = {"ffn": _form(layer.ffn, kind)}
    attentions = {"self_atten": PackedSelfAttention, "cross_atten": PackedCrossAttention}
    for name, form in attentions.items():
        child = layer.children.get(name)
        if _computes(child) == MultiHeadAttention.COMPUTES:
            forms[name] = _packed(form)(child, kind)
    return _of_children(layer, forms)


def _stack(layer: TransformerStack, kind: str) -> tuple[Any, _Pack]:
    return _of_children(layer, {"blocks": _form(layer.blocks, kind)})


def _model(model: MtModel, kind: str) -> tuple[Any, _Pack]:
    forms = {name: _form(model.children[name], kind) for name in ("encoder", "decoder")}
    form, pack = _of_children(model, forms)
    assert model.softmax.COMPUTES == Softmax.COMPUTES  # MtModel makes no other
    softmax = PackedSoftmax(model.softmax)

    def all_of_it(theta: NestedMap) -> NestedMap:
        return NestedMap(pack(theta), target_embedding=softmax.Pack(theta.target_embedding, kind))

    return _with_children(form, softmax=softmax), all_of_it


# By what a layer computes: (layer, kind of weights) -> (what stands in its place, how its weights are packed).
_FORMS: dict[str, Callable[[Any, str], tuple[Any, _Pack]]] = {
    FeedForward.COMPUTES: _packed(PackedFeedForward),
    MoELayer.COMPUTES: _moe,
    TransformerLayer.COMPUTES: _layer,
    TransformerBlock.COMPUTES: _block,
    Repeat.COMPUTES: _repeat,
    TransformerStack.COMPUTES: _stack,
    MtModel.COMPUTES: _model,
}


def _of_children(layer: BaseLayer, forms: dict[str, tuple[Any, _Pack]]) -> tuple[Any, _Pack]:
    """The layer with other forms of the children named, and how its weights are packed."""

    def each(theta: NestedMap) -> NestedMap:
        packed = {name: pack(theta.get(name, NestedMap())) for name, (_, pack) in forms.items()}
        return NestedMap({**theta, **packed})

    return _with_children(layer, **{name: form for name, (form, _) in forms.items()}), each


def _with_children(layer: BaseLayer, **children: Any) -> Any:
    """A copy of the layer that has other children in the place of these."""
    other = copy.copy(layer)
    other.children = NestedMap({**layer.children, **children})
    return other
