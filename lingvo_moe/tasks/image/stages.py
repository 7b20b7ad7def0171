"""The stages that convolutional networks are made of. Letters: B batch, Y rows, X columns, O channels.

Each stage computes FProp(theta, x, training) -> (y, extras): [B, Y, X, channels] to [B, Y', X', O], and in
training the `updates` of its normalizations; see BaseTask.
"""

from collections.abc import Iterable, Sequence
from typing import ClassVar

import tensorflow as tf

from lingvo_moe.core.base_layer import BaseLayer, scoped, updates_of
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams
from lingvo_moe.core.config.hyperparams import Params as HyperParams
from lingvo_moe.core.layers.batch_norm import BatchNorm
from lingvo_moe.core.layers.convolution import Conv2D
from lingvo_moe.core.layers.elementwise import ELEMENTWISE, Activation
from lingvo_moe.core.layers.pooling import Pool2D
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.pipeline.cells import Args

_EXPANSION = 4  # output channels of a bottleneck, in those of its 3x3 convolution


class Stage(BaseLayer):
    """The base of stages: see above."""

    @scoped
    def FPropWithExtras(
        self, theta: NestedMap, args: Args, seed: tf.Tensor | None
    ) -> tuple[Args, NestedMap]:
        """See core/pipeline/cells.py. Stages draw nothing: they train where there is a seed."""
        y, extras = self.FProp(theta, *args, training=seed is not None)
        return (y,), extras


class ConvNorm(Stage):
    """A convolution without bias, batch normalization, an activation."""

    NAMES_ITS_PARTS: ClassVar[bool] = True

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("input_channels", 0, "Channels of the input.", check=checks.SIZE)
        p.Define("output_channels", 0, "Channels of the output.", check=checks.SIZE)
        p.Define("kernel_size", 3, "Rows and columns of the kernel.", check=checks.SIZE)
        p.Define("stride", 1, "Rows and columns from one window to the next.", check=checks.SIZE)
        p.Define("norm", BatchNorm.Params(), "The normalization; channels are set from above.")
        p.Define(
            "activation", "relu", "What follows; see Activation.", check=checks.one_of(ELEMENTWISE)
        )
        return p

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        for name, layer in self._Layers(self.p).items():
            self.CreateChild(name, layer)

    @classmethod
    def _Layers(cls, p: HyperParams) -> dict[str, InstantiableParams]:
        return {
            "conv": Conv2D.Params().Set(
                input_channels=p.input_channels,
                output_channels=p.output_channels,
                kernel_size=p.kernel_size,
                stride=p.stride,
            ),
            "norm": p.norm.Copy().Set(channels=p.output_channels),
            "activation": Activation.Params().Set(activation=p.activation),
        }

    def FProp(self, theta: NestedMap, x: tf.Tensor, training: bool) -> tuple[tf.Tensor, NestedMap]:
        """See above."""
        y, extras = self.norm.FProp(theta.norm, self.conv.FProp(theta.conv, x), training)
        return self.activation.FProp(theta.activation, y), extras

    @classmethod
    def FPropMeta(cls, params: HyperParams, *input_shapes: Sequence[int]) -> NestedMap:
        """The sum of the three."""
        return in_sequence(cls._Layers(params).values(), input_shapes[0])


class Bottleneck(Stage):
    """A residual block: 1x1, 3x3 and 1x1 convolutions beside a shortcut.

    The stride is that of the 3x3 convolution ("v1.5"; He et al. 2015 have it in the first one). Where
    the shapes of input and output differ, the shortcut is a 1x1 convolution.
    """

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("input_channels", 0, "Channels of the input.", check=checks.SIZE)
        p.Define(
            "channels",
            0,
            "Channels of the 3x3 convolution; 4 times as many leave.",
            check=checks.SIZE,
        )
        p.Define("stride", 1, "Of the 3x3 convolution.", check=checks.SIZE)
        p.Define("norm", BatchNorm.Params(), "The normalizations; channels are set from above.")
        p.Define(
            "zero_init_last_scale",
            True,
            "Whether the last normalization's scale starts at 0, so that the block starts as its shortcut.",
        )
        return p

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        for name, layer in self._Convolutions(self.p).items():
            self.CreateChild(name, layer)

    @classmethod
    def _Convolutions(cls, p: HyperParams) -> dict[str, InstantiableParams]:
        """The convolutions by name: those of the main path in order, then the shortcut, if it has one."""
        conv = ConvNorm.Params().Set(norm=p.norm)
        last = p.norm.Copy().Set(initial_scale=0.0) if p.zero_init_last_scale else p.norm
        out = _EXPANSION * p.channels
        convolutions = {
            "reduce": conv.Copy().Set(
                input_channels=p.input_channels, output_channels=p.channels, kernel_size=1
            ),
            "convolve": conv.Copy().Set(
                input_channels=p.channels, output_channels=p.channels, stride=p.stride
            ),
            "expand": conv.Copy().Set(
                input_channels=p.channels,
                output_channels=out,
                kernel_size=1,
                norm=last,
                activation="identity",
            ),
        }
        if p.stride > 1 or p.input_channels != out:
            convolutions["shortcut"] = conv.Copy().Set(
                input_channels=p.input_channels,
                output_channels=out,
                kernel_size=1,
                stride=p.stride,
                activation="identity",
            )
        return convolutions

    def FProp(self, theta: NestedMap, x: tf.Tensor, training: bool) -> tuple[tf.Tensor, NestedMap]:
        """See above."""
        y, reduce = self.reduce.FProp(theta.reduce, x, training)
        y, convolve = self.convolve.FProp(theta.convolve, y, training)
        y, expand = self.expand.FProp(theta.expand, y, training)
        extras = [reduce, convolve, expand]
        if "shortcut" in self.children:
            x, shortcut = self.shortcut.FProp(theta.shortcut, x, training)
            extras.append(shortcut)
        return tf.nn.relu(x + y), updates_of(*extras)

    @classmethod
    def FPropMeta(cls, params: HyperParams, *input_shapes: Sequence[int]) -> NestedMap:
        """The sum of the convolutions, and one addition and one activation for each element."""
        convolutions = cls._Convolutions(params)
        shortcut = convolutions.pop("shortcut", None)
        meta = in_sequence(convolutions.values(), input_shapes[0])
        out = meta.out_shapes[0]
        if shortcut is not None:
            meta.flops += ConvNorm.FPropMeta(shortcut, input_shapes[0]).flops
        relu = Activation.Params().Set(activation="relu")
        meta.flops += 2 * Activation.FPropMeta(relu, out).flops
        return meta


class ConvPool(Stage):
    """A ConvNorm and a pooling."""

    NAMES_ITS_PARTS: ClassVar[bool] = True

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("conv", ConvNorm.Params(), "The convolution.")
        p.Define("pool", Pool2D.Params(), "The pooling.")
        return p

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        self.CreateChild("conv", self.p.conv)
        self.CreateChild("pool", self.p.pool)

    def FProp(self, theta: NestedMap, x: tf.Tensor, training: bool) -> tuple[tf.Tensor, NestedMap]:
        """See above."""
        y, extras = self.conv.FProp(theta.conv, x, training)
        return self.pool.FProp(theta.pool, y), extras

    @classmethod
    def FPropMeta(cls, params: HyperParams, *input_shapes: Sequence[int]) -> NestedMap:
        """The sum of the two."""
        return in_sequence([params.conv, params.pool], input_shapes[0])


class Sequential(Stage):
    """Stages one after another."""

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("stages", [], "Params of the stages, in order.")
        return p

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        self.CreateChildren("stages", self.p.stages)

    @classmethod
    def SubLayers(cls, params: HyperParams) -> list[InstantiableParams]:
        """See core/pipeline/cells.py."""
        return list(params.stages)

    def FProp(self, theta: NestedMap, x: tf.Tensor, training: bool) -> tuple[tf.Tensor, NestedMap]:
        """See above."""
        all_extras = []
        for stage, weights in zip(self.stages, theta.stages, strict=True):
            x, extras = stage.FProp(weights, x, training)
            all_extras.append(extras)
        return x, updates_of(*all_extras)

    @classmethod
    def FPropMeta(cls, params: HyperParams, *input_shapes: Sequence[int]) -> NestedMap:
        """The sum of the stages."""
        return in_sequence(params.stages, input_shapes[0])


def in_sequence(layers: Iterable[InstantiableParams], shape: Sequence[int]) -> NestedMap:
    """FPropMeta's result for layers that run one after another; the first reads an input of `shape`."""
    flops = 0
    for layer in layers:
        meta = layer.cls.FPropMeta(layer, shape)
        flops, shape = flops + meta.flops, meta.out_shapes[0]
    return NestedMap(flops=flops, out_shapes=(tuple(shape),))
