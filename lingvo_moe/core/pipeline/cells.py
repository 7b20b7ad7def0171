"""Layers in sequence: what the stages of a pipeline are made of."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import tensorflow as tf

from lingvo_moe.core.base_layer import BaseLayer, scoped
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params as HyperParams
from lingvo_moe.core.nested_map import NestedMap

# Arguments and results of cells: tensors, NestedMaps of them, None.
Args = tuple[Any, ...]


@runtime_checkable
class HasExtras(Protocol):
    """A layer in a sequence that draws random numbers, or returns more than its outputs.

    Others compute FProp(theta, *args), which returns a tensor or a tuple.
    """

    def FPropWithExtras(
        self, theta: NestedMap, args: Args, seed: tf.Tensor | None
    ) -> tuple[Args, NestedMap]:
        """The outputs, and extras: floating-point tensors.

        Args:
            seed: int32 [2]; None in inference.

        Returns:
            The outputs, and a NestedMap of losses and metrics, means over rows of the batch. `updates` in it has the
            next values of variables that are not trainable, by their paths; see BaseTask.FProp.
        """
        ...


def fprop_with_extras(
    layer: BaseLayer, theta: NestedMap, args: Args, seed: tf.Tensor | None
) -> tuple[Args, NestedMap]:
    """Runs FPropWithExtras of a layer that has it; any other layer's FProp, with no extras."""
    if isinstance(layer, HasExtras):
        return layer.FPropWithExtras(theta, args, seed)
    result = layer.FProp(theta, *args)
    return tuple(result) if isinstance(result, (tuple, list)) else (result,), NestedMap()


def fprop_in_sequence(
    layers: Sequence[tuple[str, BaseLayer]],
    thetas: Sequence[NestedMap],
    args: Args,
    seed: tf.Tensor | None,
) -> tuple[Args, NestedMap]:
    """Applies layers one after another.

    Args:
        layers: names and layers. A layer's seed is folded with its name.

    Returns:
        The outputs of the last layer, and all extras: by the layer's name, and `updates` joined.
    """
    extras = NestedMap()
    for (name, layer), theta in zip(layers, thetas, strict=True):
        args, more = fprop_with_extras(layer, theta, args, layer.FoldSeed(seed, name))
        join_extras(extras, name, more)
    return args, extras


def metas_in_sequence(
    layers: Iterable[InstantiableParams], *shapes: Sequence[int] | None
) -> list[NestedMap]:
    """FPropMeta of each of some layers, one after another; the first one has inputs of these shapes."""
    metas = []
    for layer in layers:
        metas.append(layer.cls.FPropMeta(layer, *shapes))
        shapes = tuple(metas[-1].out_shapes)
    return metas


def meta_of_sequence(
    layers: Iterable[InstantiableParams], *shapes: Sequence[int] | None
) -> NestedMap:
    """FPropMeta of one or more layers one after another."""
    metas = metas_in_sequence(layers, *shapes)
    return NestedMap(flops=sum(meta.flops for meta in metas), out_shapes=metas[-1].out_shapes)


def join_extras(extras: NestedMap, name: str, more: NestedMap) -> None:
    """Adds a layer's extras to those of a sequence: `updates` to its updates, the rest below the layer's name."""
    rest = NestedMap({key: value for key, value in more.items() if key != "updates"})
    if rest:
        extras[name] = rest
    for path, value in more.get("updates", NestedMap()).FlattenItems():
        extras.Set(f"updates.{path}", value)


def join_all_extras(extras: NestedMap, more: NestedMap) -> None:
    """Adds all extras of a sequence, as fprop_in_sequence returns them, to those of another."""
    for name, value in more.items():
        join_extras(extras, name, NestedMap(updates=value) if name == "updates" else value)


def sub_layers(params: InstantiableParams) -> list[InstantiableParams] | None:
    """The Params of the layers that a sequence applies one after another; None for a layer that is no sequence.

    A class of sequences has a class method `SubLayers(params)` that returns them.
    """
    method = getattr(params.cls, "SubLayers", None)
    return None if method is None else method(params)


class LayerWithExtras(BaseLayer):
    """The base of layers that implement HasExtras; FProp is FPropWithExtras in inference."""

    def FProp(self, theta: NestedMap, *args: Any) -> Any:
        """Applies the layer in inference; returns its output, or a tuple of several outputs."""
        outputs, _ = self.FPropWithExtras(theta, args, None)
        return outputs[0] if len(outputs) == 1 else outputs

    @scoped
    def FPropWithExtras(
        self, theta: NestedMap, args: Args, seed: tf.Tensor | None
    ) -> tuple[Args, NestedMap]:
        """See HasExtras."""
        raise NotImplementedError(f"{type(self).__name__}.FPropWithExtras")

    def _InSequence(
        self,
        params: Sequence[InstantiableParams],
        theta: NestedMap,
        args: Args,
        seed: tf.Tensor | None,
    ) -> tuple[Args, NestedMap]:
        """Applies the children that were made of these Params, one after another: see fprop_in_sequence."""
        names = [p.name for p in params]
        layers = [(name, self.children[name]) for name in names]
        return fprop_in_sequence(layers, [theta[name] for name in names], args, seed)


class FeatureExtractionLayer(LayerWithExtras):
    """Layers in sequence, each with a name of its own: a part of a partition (Lingvo)."""

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("sub", [], "Params of the layers, each with a name.")
        return p

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        names = [sub.name for sub in self.p.sub]
        if "" in names:
            raise ValueError(f"{self.p.name}: layer {names.index('')} of sub={names} has no name")
        for sub in self.p.sub:
            self.CreateChild(sub.name, sub)

    @classmethod
    def SubLayers(cls, params: HyperParams) -> list[InstantiableParams]:
        """See `sub_layers`."""
        return list(params.sub)

    def FPropWithExtras(
        self, theta: NestedMap, args: Args, seed: tf.Tensor | None
    ) -> tuple[Args, NestedMap]:
        """See HasExtras: the outputs of the last layer."""
        return self._InSequence(self.p.sub, theta, args, seed)

    @classmethod
    def FPropMeta(cls, params: HyperParams, *input_shapes: Sequence[int]) -> NestedMap:
        """The sum of the layers."""
        return meta_of_sequence(params.sub, *input_shapes)
