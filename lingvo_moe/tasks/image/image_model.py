"""ImageClassifier: a network, a head, and the loss. Letters: B batch, Y rows, X columns, I channels, V classes."""

import math
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import tensorflow as tf

from lingvo_moe.core.base_layer import within
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams, ParamError, Params as HyperParams
from lingvo_moe.core.input.base_input import BaseInput
from lingvo_moe.core.layers.classifier import Classifier, in_top_k
from lingvo_moe.core.layers.elementwise import Dropout
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.optimizers.registry import elementwise_optimizers
from lingvo_moe.core.pipeline.cell_stack import CellParts
from lingvo_moe.core.pipeline.params import PARAMETERS
from lingvo_moe.core.pipeline.partition import PartitionError
from lingvo_moe.core.pipeline.parts import Context
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.sharding.letters import parts_of
from lingvo_moe.core.task.base_task import BaseTask, TaskError
from lingvo_moe.core.task.task_costs import TaskCosts
from lingvo_moe.core.task.task_strategy import TaskStrategy
from lingvo_moe.tasks.image.networks import PIPELINE, ResNet, network_pipeline_params

_TOP = 5
_LARGEST_IMAGE = 16  # rows and columns of a shrunk model's, unless the mesh needs more


class ImageClassifier(BaseTask):
    """Scores the classes of images.

    `FProp(theta, batch, seed)` takes uint8 `batch.images` [B, Y, X, I] and int32 `batch.labels` [B], where a
    negative label marks a row of padding, and returns the training loss and float32 metrics.
    """

    UNIT: ClassVar[str] = "images"
    SIZES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "B": ("input.batch_size",),
        "Y": ("input.image_size",),
        "X": ("input.image_size",),
        "V": ("task.num_classes",),
    }
    DIVIDED: ClassVar[str] = "BYXV"
    MAY_CHANGE: ClassVar[tuple[str, ...]] = (
        "activation_split",
        "weight_split",
        *PARAMETERS,
        "pipeline.image_size",
    )
    HELD_OUT_METRICS: ClassVar[tuple[str, ...]] = ("nll", "top1", "top5")
    NEXT = "python -m tools.evaluate_images --logdir={}"

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("num_classes", 1000, "V.", checks.SIZE)
        p.Define("channels", 3, "Channels of the images: 3, or 1 for shades of grey.", checks.SIZE)
        p.Define("network", ResNet.Params(), "From images to features; see networks.py.")
        help_text = "The network in stages of similar FLOPs, on devices of their own."
        p.Define("pipeline", network_pipeline_params(), help_text)
        p.Define("head", Classifier.Params(), "From features to classes; sizes are set from above.")
        p.Define("dropout", 0.0, "Rate on the features.", checks.SHARE)
        p.Define(
            "label_smoothing", 0.1, "Probability spread evenly over the classes.", checks.SHARE
        )
        p.Define(
            "pixel_mean", 0.5, "Subtracted from pixels, which are from 0 to 1.", checks.Number(0, 1)
        )
        p.Define("pixel_deviation", 0.25, "Pixels are divided by it.", checks.POSITIVE)
        p.Derive("network.input_channels", "channels")
        for name in (*PARAMETERS, "pipeline.image_size"):
            p.Derive(f"network.{name}", name)
        p.Derive("head.num_classes", "num_classes")
        p.Derive("head.model_dim", "network")
        p.Derive("head.label_smoothing", "label_smoothing")
        return p

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        p = self.p
        network = self._Network(p)
        if p.pipeline.stages > 1 and not self.optimizer.ELEMENTWISE:
            why = (
                f"a pipeline packs weights of different shapes into vectors, but {type(self.optimizer).__name__}'s "
                f"update depends on shapes; set task.optimizer to {elementwise_optimizers()}"
            )
            raise ParamError("task.pipeline.stages", str(p.pipeline.stages), why)
        self.CreateChild("network", network)
        self.CreateChild("dropout", Dropout.Params().Set(rate=p.dropout))
        head = p.head.Copy().Set(
            num_classes=p.num_classes,
            model_dim=network.cls.OutputChannels(network),
            label_smoothing=p.label_smoothing,
        )
        self.CreateChild("head", head)

    def Unpacked(self) -> "ImageClassifier":
        """See BaseTask: the model without a pipeline."""
        if self.p.pipeline.stages == 1:
            return self
        task = self.p.Copy()
        one = network_pipeline_params()
        return type(self)(task.Set(pipeline=one))

    @classmethod
    def _Network(cls, p: HyperParams) -> InstantiableParams:
        """The network's Params, with what follows in them from the model's."""
        return p.network.Copy().Set(input_channels=p.channels, pipeline=p.pipeline.Copy())

    @classmethod
    def Strategy(cls, task: InstantiableParams) -> TaskStrategy:
        """See BaseTask: the stages of a pipeline have different shapes."""
        return TaskStrategy(task, cells=True)

    @classmethod
    def CheckInput(cls, task: HyperParams, inputs: HyperParams) -> None:
        """See BaseTask: images have the channels that the network reads."""
        if task.channels != inputs.channels:
            raise TaskError(
                f"input.channels={inputs.channels}, but task.channels={task.channels}: set both to the same"
            )
        num = task.pipeline.micro_batches
        if inputs.batch_size % num:
            raise TaskError(
                f"task.pipeline.micro_batches={num} does not divide input.batch_size={inputs.batch_size}"
            )
        if task.pipeline.stages > 1:
            cls.CheckStages(task)

    @classmethod
    def CheckStages(cls, task: HyperParams) -> None:
        """Raises TaskError if the network has fewer layers than the pipeline stages."""
        network = cls._Network(task)
        try:
            network.cls.Partition(network)
        except PartitionError as e:
            raise TaskError(f"task.pipeline.stages={task.pipeline.stages}: {e}") from None

    @classmethod
    def Shrink(cls, task: HyperParams, inputs: HyperParams, mesh: Mesh) -> None:
        """See BaseTask: few and small images, channels and classes, and a network with one layer of each kind."""
        maps = [
            split_map
            for params in (task, task.network, task.head)
            for split_map in (params.weight_split, params.activation_split)
        ]

        def size(letters: str, least: int) -> int:
            """The smallest multiple of the letters' parts that is not below `least`."""
            count = math.lcm(*(parts_of(letter, mesh, maps) for letter in letters))
            return count * -(-least // count)

        task.Set(num_classes=size("V", 8), fprop_dtype="float32")
        stages = task.pipeline.stages
        task.network.cls.Shrink(task.network, size("IOM", 4), stages)
        if stages > 1:
            task.pipeline.Set(
                micro_batches=min(task.pipeline.micro_batches, 2), image_size=_LARGEST_IMAGE
            )
        inputs.Set(
            batch_size=size("B", 4) * task.pipeline.micro_batches,
            image_size=size("YX", min(inputs.image_size, _LARGEST_IMAGE)),
        )

    def SampleBatch(self, inputs: BaseInput, rng: np.random.RandomState) -> NestedMap:
        """See BaseTask: random pixels and classes, and a row of padding."""
        specs = inputs.BatchSpec()
        images = rng.randint(0, 256, specs.images.shape).astype(specs.images.dtype)
        labels = rng.randint(0, self.p.num_classes, specs.labels.shape).astype(specs.labels.dtype)
        labels[-1] = -1
        return NestedMap(images=images, labels=labels)

    def CheckData(self, inputs: BaseInput) -> None:
        """See BaseTask: there is a score for each class."""
        found = inputs.Artifacts().about["classes"]
        if found > self.p.num_classes:
            raise TaskError(
                f"the data has {found:,} classes, but task.num_classes={self.p.num_classes}; set "
                f"--model_params_override='task.num_classes={found}'"
            )

    def Units(self, batch: NestedMap) -> NestedMap:
        """See BaseTask: images that are not padding."""
        return NestedMap(images=tf.reduce_sum(tf.cast(batch.labels >= 0, tf.float32)))

    def FProp(
        self, theta: NestedMap, batch: NestedMap, seed: tf.Tensor | None = None
    ) -> tuple[tf.Tensor, NestedMap]:
        """Returns the loss (float32 scalar) and metrics: loss, nll (without label smoothing), top1 and top5 (the
        share of images whose class is the best-scored one, or one of the five), images, and updates; see BaseTask."""
        x = self._Pixels(batch.images)
        features, updates = self.network.FProp(theta.network, x, training=seed is not None)
        loss, metrics = self._Loss(theta, features, batch, seed)
        return loss, NestedMap(metrics, **updates)

    def PipelineParts(self) -> CellParts | None:
        """See BaseTask: the stages of the network, each a cell."""
        if self.network.cells is None:
            return None

        def loss(
            rest: NestedMap, features: tuple[tf.Tensor], context: Context
        ) -> tuple[tf.Tensor, NestedMap]:
            x = self.network.Shard(features[0], "BM")
            loss, metrics = self._Loss(rest, x, context.batch, context.seed)
            assert context.shares is not None
            return self.Terms(loss, metrics, context.shares)

        return CellParts(
            name="network",
            weights=f"network.{PIPELINE}",
            stack=self.network.cells,
            enter=lambda rest, context: (self._Pixels(context.batch.images),),
            loss=loss,
            metrics=lambda sums, loss, extras: NestedMap(sums, **extras),
            enter_is_trained=False,
        )

    @within("Loss")
    def _Loss(
        self, theta: NestedMap, features: tf.Tensor, batch: NestedMap, seed: tf.Tensor | None
    ) -> tuple[tf.Tensor, NestedMap]:
        """Loss and metrics from features [B, M]."""
        features = self.dropout.FProp(theta.dropout, features, self.FoldSeed(seed, "dropout"))
        logits = self.head.FProp(theta.head, features)
        real = tf.cast(batch.labels >= 0, tf.float32)
        images = tf.reduce_sum(real)
        per_image = real / tf.maximum(images, 1.0)
        smoothed, nll = self.head.Losses(logits, batch.labels)
        loss = tf.reduce_sum(smoothed * per_image)
        metrics = NestedMap(
            loss=loss,
            nll=tf.reduce_sum(nll * per_image),
            top1=tf.reduce_sum(in_top_k(logits, batch.labels, 1) * per_image),
            top5=tf.reduce_sum(in_top_k(logits, batch.labels, _TOP) * per_image),
            images=images,
        )
        return loss, metrics

    @within("Loss")
    def _Pixels(self, images: tf.Tensor) -> tf.Tensor:
        """The images as numbers around 0, in the type of activations."""
        x = tf.cast(self.Shard(images, "BYXI"), tf.float32) * (1 / 255)
        return tf.cast((x - self.p.pixel_mean) * (1 / self.p.pixel_deviation), self.fprop_dtype)

    def Costs(self) -> "_Costs":
        return _Costs(self)


class _Costs(TaskCosts):
    """The costs of a network and its head."""

    def __init__(self, model: ImageClassifier):
        super().__init__(model.UNIT)
        self._model = model

    def FlopsByPart(self, batch: NestedMap) -> dict[str, int]:
        """See TaskCosts: the stages of the network, and the head."""
        rows, network, head = batch.images.shape[0], self._model.network.p, self._model.head.p
        flops = network.cls.FlopsByStage(network, batch.images.shape)
        flops["head"] = Classifier.FPropMeta(head, (rows, head.model_dim)).flops
        return flops

    def StageFlops(self, batch: NestedMap) -> list[int]:
        network, stages = self._model.network.p, self._model.p.pipeline.stages
        if stages == 1:
            return []
        costs = network.cls.Partition(network).costs  # for one image of pipeline.image_size
        return [batch.images.shape[0] * sum(costs[k::stages]) for k in range(stages)]
