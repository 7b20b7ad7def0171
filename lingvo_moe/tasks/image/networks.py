"""Convolutional networks, from images to features. Letters: B batch, Y rows, X columns, M features."""

import functools
from collections.abc import Sequence

import tensorflow as tf

from lingvo_moe.core.base_layer import BaseLayer
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params as HyperParams
from lingvo_moe.core.layers.batch_norm import BatchNorm
from lingvo_moe.core.layers.pooling import GlobalAveragePool, Pool2D
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.pipeline.cell_stack import CellStack
from lingvo_moe.core.pipeline.cells import metas_in_sequence, sub_layers
from lingvo_moe.core.pipeline.params import one_stage, pipeline_params
from lingvo_moe.core.pipeline.partition import (
    Partition,
    divided,
    flattened,
    partition_of,
)
from lingvo_moe.tasks.image.stages import Bottleneck, ConvNorm, ConvPool, Sequential, Stage

PIPELINE = "pipeline"  # where the theta of a network in stages has its packed weights
_SIZES = checks.ListOf(checks.SIZE, "a list of integers of at least 1")


def network_pipeline_params() -> HyperParams:
    """`pipeline_params`, for the layers of a network."""
    p = pipeline_params()
    p.Define(
        "image_size",
        224,
        "Rows and columns of the images for which FLOPs of stages are balanced; it may differ from input.image_size.",
        checks.SIZE,
    )
    p.OnlyWith("image_size", one_stage)
    return p


class Network(Stage):
    """The base of networks: stages in sequence (see stages.py), then the average of each channel."""

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("input_channels", 3, "Channels of the images; the model sets it.", checks.SIZE)
        p.Define("norm", BatchNorm.Params(), "The normalizations; channels are set from above.")
        p.Define("pipeline", network_pipeline_params(), "Stages on devices of their own.")
        return p

    @classmethod
    def Stages(cls, params: HyperParams) -> dict[str, InstantiableParams]:
        """The Params of each stage, by name."""
        raise NotImplementedError(f"{cls.__name__}.Stages")

    @classmethod
    def OutputChannels(cls, params: HyperParams) -> int:
        """M, the length of the features."""
        raise NotImplementedError(f"{cls.__name__}.OutputChannels")

    @classmethod
    def Shrink(cls, params: HyperParams, channels: int, stages: int = 1) -> None:
        """Sets the smallest sizes that still have a layer of each kind, for `BaseTask.Shrink`.

        Args:
            params: the network's, which are changed.
            channels: all numbers of channels become multiples of it.
            stages: of a pipeline, for each of which there is still a layer where the network had as many.
        """
        raise NotImplementedError(f"{cls.__name__}.Shrink")

    @classmethod
    def Layers(cls, params: HyperParams) -> dict[str, InstantiableParams]:
        """The stages, then `average`."""
        return {**cls.Stages(params), "average": GlobalAveragePool.Params()}

    @functools.cached_property
    def cells(self) -> CellStack | None:
        """The layers in stages, if Params ask for some; made when the path is known."""
        if self.p.pipeline.stages == 1:
            return None
        layers = [(path, _layer_at(self.children, path)) for path in self._LayerPaths(self.p)]
        parts = self.Partition(self.p).Parts(layers)
        return CellStack(self.path, PIPELINE, parts, self.p.weight_split)

    @classmethod
    def Partition(cls, params: HyperParams) -> Partition:
        """The layers' FLOPs for one image, divided into the stages of the pipeline, `repeats` on each of its devices.

        Raises:
            PartitionError: more stages than layers, or `splits` that are not ascending numbers of layers.
        """
        p = params.pipeline
        layers = flattened(list(cls.Layers(params).values()))
        costs = partition_of(layers, (1, p.image_size, p.image_size, params.input_channels)).costs
        return divided(costs, p.stages * p.repeats, p.splits)

    @classmethod
    def _LayerPaths(cls, params: HyperParams) -> list[str]:
        """Paths in theta and `children` of the layers that a pipeline may divide, in order."""
        paths = []
        for name, stage in cls.Layers(params).items():
            count = len(flattened(stage))
            is_one = sub_layers(stage) is None
            paths += [name] if is_one else [f"{name}.stages[{i}]" for i in range(count)]
        return paths

    def VariableSpecs(self) -> NestedMap:
        """Specs of the stages' variables, which a pipeline packs; see core/pipeline/stage_vectors.py."""
        if self.cells is None:
            return super().VariableSpecs()
        return NestedMap({PIPELINE: self.cells.specs})

    def FProp(
        self, theta: NestedMap, images: tf.Tensor, training: bool
    ) -> tuple[tf.Tensor, NestedMap]:
        """Features of images.

        Args:
            images: [B, Y, X, channels], of a static shape.
            training: see BatchNorm.

        Returns:
            Features [B, M], and extras: in training the `updates` of all normalizations.
        """
        if self.cells is None:
            return super().FProp(theta, images, training)
        seed = tf.zeros([2], tf.int32) if training else None  # Nothing is drawn from it.
        (features,), extras = self.cells.InSequence(theta[PIPELINE], (images,), seed)
        return self.Shard(features, "BM"), extras

    @classmethod
    def FlopsByStage(cls, params: HyperParams, shape: Sequence[int]) -> dict[str, int]:
        """Forward operations of each stage for images of a shape [B, Y, X, channels]."""
        layers = cls.Layers(params)
        metas = metas_in_sequence(layers.values(), shape)
        return {name: meta.flops for name, meta in zip(layers, metas, strict=True)}


class ResNet(Network):
    """A residual network of bottlenecks (He et al. 2015, "v1.5"); by default the one of 50 layers.

    Padding is SAME everywhere, so a window of stride 2 over an even number of rows begins at the first.
    """

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define(
            "base_channels", 64, "Channels of the stem; 32 times as many features.", checks.SIZE
        )
        p.Define("blocks", [3, 4, 6, 3], "Bottlenecks of each stage.", _SIZES)
        p.Define("zero_init_last_scale", True, "See Bottleneck.")
        p.Derive("norm.channels", "base_channels")
        return p

    @classmethod
    def OutputChannels(cls, params: HyperParams) -> int:
        return 4 * params.base_channels * 2 ** (len(params.blocks) - 1)

    @classmethod
    def Shrink(cls, params: HyperParams, channels: int, stages: int = 1) -> None:
        """See Network: blocks with and without stride and shortcut. Without zero_init_last_scale, which would make
        most gradients of the first step zero."""
        first = max(min(params.blocks[0], 2), min(sum(params.blocks), stages) - 3)
        blocks = [first, *(1 for _ in params.blocks[1:2])]
        params.Set(base_channels=channels, blocks=blocks, zero_init_last_scale=False)

    @classmethod
    def Stages(cls, params: HyperParams) -> dict[str, InstantiableParams]:
        """The stem (a convolution and a pooling of stride 2), and a stage for each number of `blocks`. Each stage but
        the first begins with stride 2; channels double from stage to stage."""
        p = params
        stem = ConvNorm.Params().Set(
            input_channels=p.input_channels,
            output_channels=p.base_channels,
            kernel_size=7,
            stride=2,
            norm=p.norm,
        )
        pool = Pool2D.Params().Set(kind="max", window=3, stride=2)
        stages = {"stem": ConvPool.Params().Set(conv=stem, pool=pool)}
        channels = p.base_channels
        for i, count in enumerate(p.blocks):
            width = p.base_channels * 2**i
            blocks = []
            for j in range(count):
                block = Bottleneck.Params().Set(
                    input_channels=channels,
                    channels=width,
                    stride=2 if i and not j else 1,
                    norm=p.norm,
                    zero_init_last_scale=p.zero_init_last_scale,
                )
                blocks.append(block)
                channels = 4 * width
            stages[f"stage_{i}"] = Sequential.Params().Set(stages=blocks)
        return stages


class ConvNet(Network):
    """A small network: convolutions of 3x3, each followed by a maximum of 2x2 pixels."""

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("channels", [32, 64], "Output channels of each convolution.", _SIZES)
        p.Derive("norm.channels", "channels")
        return p

    @classmethod
    def OutputChannels(cls, params: HyperParams) -> int:
        return params.channels[-1]

    @classmethod
    def Shrink(cls, params: HyperParams, channels: int, stages: int = 1) -> None:
        """See Network: two convolutions, or as many as stages beside the average."""
        count = min(len(params.channels), max(2, stages - 1))
        params.channels = [channels, *[2 * channels] * (count - 1)]

    @classmethod
    def Stages(cls, params: HyperParams) -> dict[str, InstantiableParams]:
        """A ConvPool for each of `channels`."""
        stages, inputs = {}, params.input_channels
        for i, channels in enumerate(params.channels):
            conv = ConvNorm.Params().Set(
                input_channels=inputs, output_channels=channels, norm=params.norm
            )
            stages[f"stage_{i}"] = ConvPool.Params().Set(conv=conv)
            inputs = channels
        return stages


def _layer_at(children: NestedMap, path: str) -> BaseLayer:
    """The layer at a path such as stage_0.stages[2] below a network."""
    name, _, index = path.partition(".stages[")
    return children[name].stages[int(index.rstrip("]"))] if index else children[name]
