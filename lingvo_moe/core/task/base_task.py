"""BaseTask: what a task says, a model with a loss. trainable_layer.py has what follows: its state and its steps."""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from lingvo_moe.core.base_layer import within
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params as HyperParams
from lingvo_moe.core.input.base_input import BaseInput
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.pipeline.cell_stack import CellParts
from lingvo_moe.core.pipeline.parts import Parts
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.task.step import Step
from lingvo_moe.core.task.task_costs import TaskCosts
from lingvo_moe.core.task.task_growth import TaskGrowth
from lingvo_moe.core.task.task_metrics import TaskMetrics
from lingvo_moe.core.task.task_strategy import TaskStrategy
from lingvo_moe.core.task.trainable_layer import TaskError, TrainableLayer

# Methods that a task overrode in an older version, with what it overrides instead; for a release.
_MOVED = {
    "CombinedMetrics": "TaskMetrics.Combined",
    "GrowsFrom": "TaskGrowth.GrowsFrom",
    "MetricLayers": "TaskMetrics.Layers",
    "MicroBatchSizes": "TaskStrategy.MicroBatchSizes",
    "NamedRows": "TaskGrowth.NamedRows",
    "OptimizerParams": "Params, with `optimizer` set",
    "PipelineSettings": "TaskStrategy.PipelineSettings",
    "ProgressNote": "TaskMetrics.ProgressNote",
    "RowNames": "NamedRows.names",
    "SizeParams": "SIZES",
}


class BaseTask(TrainableLayer):
    """A layer whose `FProp(theta, batch, seed)` returns `(loss, metrics)`.

    `metrics` is a NestedMap of float32 tensors: scalars, [L] by layer, or [L,E] by layer and expert.
    `metrics.<UNIT>` is the number of units in the batch that count. The loss and the other metrics are means over these
    units. A task for which this is not so, and that is trained in micro-batches, overrides MicroBatchTerms.

    Variables that are not trainable get no gradient. FProp may return their next values in `metrics.updates`, a
    NestedMap by variable path (`VariableSpec.path`). This is not a metric; TrainStep removes it.

    A task has to state FProp alone. All else here has a default: facts, checks of its input, how it is computed in
    parts, and small classes for what few tasks say.
    """

    # The metric that counts the units that a step processes, e.g. 'tokens' or 'images'. Speeds are in these units.
    UNIT: ClassVar[str] = "examples"
    # A task computes its loss beside its layers; `within` names a scope for other computations of its own. The names
    # have capitals, since the functions of a program are in the order of their names: `loss` would change its hash.
    SCOPES: ClassVar[Mapping[str, str]] = {
        "Loss": "loss",
        "Masks": "attention",
        "Inputs": "embedding",
    }
    # For each einsum letter, the parameters that set the size of its dimension, e.g. {"E": ("task.num_experts",)}. A
    # letter after a part of variables' paths, e.g. "decoder.L", is the dimension of those variables alone.
    SIZES: ClassVar[Mapping[str, tuple[str, ...]]] = {"B": ("input.batch_size",)}
    # Letters of SIZES whose sizes must be divisible by the mesh axis that shards them.
    DIVIDED: ClassVar[str] = "B"
    # Parameters that may change while a run goes on: up to rounding, and to what is drawn at random in a micro-batch,
    # results stay the same, and so do the shapes of weights and slots of `Unpacked`.
    MAY_CHANGE: ClassVar[tuple[str, ...]] = ()
    # The metrics of held-out batches, means over UNITs. The best checkpoint has the lowest value of the first one.
    HELD_OUT_METRICS: ClassVar[tuple[str, ...]] = ("loss",)
    # The command for a run, {}, that has ended.
    NEXT: ClassVar[str] = "tensorboard --logdir={}"
    # A BaseCheckpointScorer (checkpoint_scorer.py), 'type/module/Class', by name since it imports the task; '' for the
    # held-out loss alone.
    CHECKPOINT_SCORER: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        for name in vars(cls).keys() & _MOVED.keys():
            raise TypeError(
                f"{cls.__name__}.{name} is read no more: give {_MOVED[name]}; see BaseTask"
            )

    # --- the loss of a batch

    @within("Loss")
    def FProp(
        self, theta: NestedMap, batch: NestedMap, seed: tf.Tensor | None = None
    ) -> tuple[tf.Tensor, NestedMap]:
        """Returns the training loss (float32 scalar) and metrics, of a batch; nothing is random without a seed."""
        raise NotImplementedError(f"{type(self).__name__}.FProp")

    def Units(self, batch: NestedMap) -> NestedMap:
        """Counts in a batch, float32 scalars by name, that loss and metrics are means over; they add up over
        micro-batches. One of them is UNIT."""
        rows = batch.Flatten()[0].shape[0]
        return NestedMap({self.UNIT: tf.constant(float(rows))})

    # --- its input

    @classmethod
    def ConfigureInput(cls, task: HyperParams, inputs: HyperParams) -> None:
        """Sets the input's Params that follow from the task's Params. Called after all overrides are applied."""

    @classmethod
    def CheckInput(cls, task: HyperParams, inputs: HyperParams) -> None:
        """Raises TaskError if the Params of the task and of the input contradict each other.

        Called before anything is built.
        """

    def CheckData(self, inputs: BaseInput) -> None:
        """Raises TaskError if the input's data does not suit the task. Called after the input's `Prepare`."""

    # --- the loss in parts: of micro-batches, in stages

    @within("Loss")
    def MicroBatchTerms(
        self, theta: NestedMap, batch: NestedMap, seed: tf.Tensor | None, shares: NestedMap
    ) -> tuple[tf.Tensor, NestedMap]:
        """FProp of a micro-batch, whose loss and metrics are terms: over micro-batches they add up to the batch's.

        Args:
            seed: int32 [2] or None, of this micro-batch.
            shares: its Units divided by those of the batch, float32 scalars.
        """
        loss, metrics = self._LossAndMetrics(self.FProp(theta, batch, seed=seed))
        return self.Terms(loss, metrics, shares)

    def PipelineParts(self) -> Parts | CellParts | None:
        """Returns the stacks of layers that core/task/pipelined_step.py trains by stages, as `p.pipeline` says
        (core/pipeline/params.py); None if there is one stage."""
        return None

    def Unpacked(self) -> "BaseTask":
        """Returns the model without packed variables (VariableSpec.packs): this task, if it packs none."""
        return self

    # --- for `tools.verify` and the planner

    @classmethod
    def Shrink(cls, task: HyperParams, inputs: HyperParams, mesh: Mesh) -> None:
        """Sets the sizes in both Params to the smallest ones that the mesh divides, for `tools.verify`.

        The computation itself stays the same, but in float32. Raises TaskError if the task does not implement it.
        """
        raise TaskError(f"{cls.__name__} cannot be verified: it has no Shrink(task, inputs, mesh)")

    def SampleBatch(self, inputs: BaseInput, rng: np.random.RandomState) -> NestedMap:
        """Returns a made-up batch of NumPy arrays in the input's format, for `tools.verify`, or raises TaskError."""
        name = type(self).__name__
        raise TaskError(f"{name} cannot be verified: it has no SampleBatch(inputs, rng)")

    def DecodePrograms(
        self, inputs: BaseInput, prompt_length: int = 0, reply_length: int = 0
    ) -> tuple[Step, Step]:
        """Returns what reads prompts, and one step of decoding, for a batch of the input's rows, for the planner.

        Args:
            prompt_length: tokens of a prompt, or of a text to translate; 0: the input's.
            reply_length: new tokens, for which caches have room; 0: as the prompt's length says.

        Raises:
            TaskError: the task has no decoder.
        """
        raise TaskError(f"{self.path}: {type(self).__name__} decodes nothing")

    # --- small classes that a task may give

    def Costs(self) -> TaskCosts:
        """Returns what a step costs."""
        return TaskCosts(self.UNIT)

    def Metrics(self) -> TaskMetrics:
        """Returns what its metrics are beside means, and how they are shown."""
        return TaskMetrics()

    @classmethod
    def Strategy(cls, task: InstantiableParams) -> TaskStrategy:
        """Returns which forms a task of these Params can take on devices."""
        return TaskStrategy(task)

    @classmethod
    def Growth(cls, task: InstantiableParams) -> TaskGrowth:
        """Returns the models whose weights a task of these Params takes over."""
        return TaskGrowth(task)
