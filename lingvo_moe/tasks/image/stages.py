"""The stages that convolutional networks are made of. Letters: B batch, Y rows, X columns, O channels.

Each stage computes FProp(theta, x, training) -> (y, extras): [B, Y, X, channels] to [B, Y', X', O], and in
training the `updates` of its normalizations; see BaseTask.
"""

from collections.abc import Iterable, Sequence
from typing import ClassVar

import tensorflow as tf

from lingvo_moe.core.base_layer import BaseLayer, scoped
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params as HyperParams
from lingvo_moe.core.layers.batch_norm import BatchNorm
from lingvo_moe.core.layers.convolution import Conv2D
from lingvo_moe.core.layers.elementwise import ELEMENTWISE, ActivationLayer
from lingvo_moe.core.layers.pooling import Pool2D
from lingvo_moe.core.nested_map import NestedMap, updates_of
from lingvo_moe.core.pipeline.cells import Args, meta_of_sequence

_EXPANSION = 4  # output channels of a bottleneck, in those of its 3x3 convolution


class Stage(BaseLayer):
    """The base of stages: by default the layers that `Layers` names, one after another."""

    @classmethod
    def Layers(cls, params: HyperParams) -> dict[str, InstantiableParams]:
        """The Params of each layer by the name of the child, in order; stages, or layers without extras."""
        raise NotImplementedError(f"{cls.__name__}.Layers")

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        for name, layer in self.Layers(self.p).items():
            self.CreateChild(name, layer)

    def FProp(self, theta: NestedMap, x: tf.Tensor, training: bool) -> tuple[tf.Tensor, NestedMap]:
        layers = [(self.children[name], theta[name]) for name in self.Layers(self.p)]
        return in_order(layers, x, training)

    @scoped
    def FPropWithExtras(
        self, theta: NestedMap, args: Args, seed: tf.Tensor | None
    ) -> tuple[Args, NestedMap]:
        """See core/pipeline/cells.py. Stages draw nothing: they train where there is a seed."""
        (x,) = args
        y, extras = self.FProp(theta, x, training=seed is not None)
        return (y,), extras

    @classmethod
    def FPropMeta(cls, params: HyperParams, *input_shapes: Sequence[int]) -> NestedMap:
        """The sum of the layers."""
        return meta_of_sequence(cls.Layers(params).values(), input_shapes[0])


def in_order(
    layers: Iterable[tuple[BaseLayer, NestedMap]], x: tf.Tensor, training: bool
) -> tuple[tf.Tensor, NestedMap]:
    """Applies layers with their weights one after another, and joins their updates."""
    all_extras = []
    for layer, theta in layers:
        if isinstance(layer, Stage | BatchNorm):
            x, extras = layer.FProp(theta, x, training)
            all_extras.append(extras)
        else:
            x = layer.FProp(theta, x)
    return x, updates_of(*all_extras)


class ConvNorm(Stage):
    """A convolution without bias, batch normalization, an activation."""

    NAMES_ITS_PARTS: ClassVar[bool] = True

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("input_channels", 0, "Channels of the input.", checks.SIZE)
        p.Define("output_channels", 0, "Channels of the output.", checks.SIZE)
        p.Define("kernel_size", 3, "Rows and columns of the kernel.", checks.SIZE)
        p.Define("stride", 1, "Rows and columns from one window to the next.", checks.SIZE)
        p.Define("norm", BatchNorm.Params(), "The normalization; channels are set from above.")
        p.Define(
            "activation", "relu", "What follows; see ActivationLayer.", checks.one_of(ELEMENTWISE)
        )
        return p

    @classmethod
    def Layers(cls, params: HyperParams) -> dict[str, InstantiableParams]:
        p = params
        return {
            "conv": Conv2D.Params().Set(
                input_channels=p.input_channels,
                output_channels=p.output_channels,
                kernel_size=p.kernel_size,
                stride=p.stride,
            ),
            "norm": p.norm.Copy().Set(channels=p.output_channels),
            "activation": ActivationLayer.Params().Set(activation=p.activation),
        }


class Bottleneck(Stage):
    """A residual block: 1x1, 3x3 and 1x1 convolutions beside a shortcut.

    The stride is that of the 3x3 convolution ("v1.5"; He et al. 2015 have it in the first one). Where
    the shapes of input and output differ, the shortcut is a 1x1 convolution.
    """

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("input_channels", 0, "Channels of the input.", checks.SIZE)
        p.Define(
            "channels", 0, "Channels of the 3x3 convolution; 4 times as many leave.", checks.SIZE
        )
        p.Define("stride", 1, "Of the 3x3 convolution.", checks.SIZE)
        p.Define("norm", BatchNorm.Params(), "The normalizations; channels are set from above.")
        p.Define(
            "zero_init_last_scale",
            True,
            "Whether the last normalization's scale starts at 0, so that the block starts as its shortcut.",
        )
        return p

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        if (shortcut := _shortcut(self.p)) is not None:
            self.CreateChild("shortcut", shortcut)

    @classmethod
    def Layers(cls, params: HyperParams) -> dict[str, InstantiableParams]:
        """The convolutions beside the shortcut."""
        p = params
        conv = ConvNorm.Params().Set(norm=p.norm)
        last = p.norm.Copy().Set(initial_scale=0.0) if p.zero_init_last_scale else p.norm
        return {
            "reduce": conv.Copy().Set(
                input_channels=p.input_channels, output_channels=p.channels, kernel_size=1
            ),
            "convolve": conv.Copy().Set(
                input_channels=p.channels, output_channels=p.channels, stride=p.stride
            ),
            "expand": conv.Copy().Set(
                input_channels=p.channels,
                output_channels=_EXPANSION * p.channels,
                kernel_size=1,
                norm=last,
                activation="identity",
            ),
        }

    def FProp(self, theta: NestedMap, x: tf.Tensor, training: bool) -> tuple[tf.Tensor, NestedMap]:
        y, extras = super().FProp(theta, x, training)
        if "shortcut" in self.children:
            x, shortcut = self.shortcut.FProp(theta.shortcut, x, training)
            extras = updates_of(extras, shortcut)
        return tf.nn.relu(x + y), extras

    @classmethod
    def FPropMeta(cls, params: HyperParams, *input_shapes: Sequence[int]) -> NestedMap:
        """The sum of the convolutions, and one addition and one activation for each element."""
        meta = super().FPropMeta(params, *input_shapes)
        out = meta.out_shapes[0]
        if (shortcut := _shortcut(params)) is not None:
            meta.flops += ConvNorm.FPropMeta(shortcut, input_shapes[0]).flops
        relu = ActivationLayer.Params().Set(activation="relu")
        meta.flops += 2 * ActivationLayer.FPropMeta(relu, out).flops
        return meta


def _shortcut(p: HyperParams) -> InstantiableParams | None:
    """The convolution of a Bottleneck's shortcut, if it has one."""
    out = _EXPANSION * p.channels
    if p.stride == 1 and p.input_channels == out:
        return None
    conv = ConvNorm.Params().Set(input_channels=p.input_channels, output_channels=out, norm=p.norm)
    return conv.Set(kernel_size=1, stride=p.stride, activation="identity")


class ConvPool(Stage):
    """A ConvNorm and a pooling."""

    NAMES_ITS_PARTS: ClassVar[bool] = True

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("conv", ConvNorm.Params(), "The convolution.")
        p.Define("pool", Pool2D.Params(), "The pooling.")
        return p

    @classmethod
    def Layers(cls, params: HyperParams) -> dict[str, InstantiableParams]:
        return {"conv": params.conv, "pool": params.pool}


class Sequential(Stage):
    """Stages one after another."""

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("stages", [], "Params of the stages, in order.")
        return p

    @classmethod
    def Layers(cls, params: HyperParams) -> dict[str, InstantiableParams]:
        return {}

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        self.CreateChildren("stages", self.p.stages)

    @classmethod
    def SubLayers(cls, params: HyperParams) -> list[InstantiableParams]:
        """See core/pipeline/cells.py."""
        return list(params.stages)

    def FProp(self, theta: NestedMap, x: tf.Tensor, training: bool) -> tuple[tf.Tensor, NestedMap]:
        return in_order(zip(self.stages, theta.stages, strict=True), x, training)

    @classmethod
    def FPropMeta(cls, params: HyperParams, *input_shapes: Sequence[int]) -> NestedMap:
        """The sum of the stages."""
        return meta_of_sequence(params.stages, input_shapes[0])
