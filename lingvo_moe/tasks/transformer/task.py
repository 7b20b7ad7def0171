"""TransformerTask: what trainer and planner ask of a Transformer; see BaseTask.

Letters: B batch, T time, L layers, M model, H hidden, N heads, A heads of keys and values, K key, V vocabulary.
"""

import math
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import tensorflow as tf

from lingvo_moe.core.config.hyperparams import InstantiableParams, Params as HyperParams
from lingvo_moe.core.input.base_input import BaseInput
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.pipeline import params as pipeline
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.task.base_task import BaseTask, TaskError
from lingvo_moe.tasks.transformer import experts
from lingvo_moe.tasks.transformer.costs import TransformerCosts
from lingvo_moe.tasks.transformer.growth import TransformerGrowth
from lingvo_moe.tasks.transformer.metrics import TransformerMetrics
from lingvo_moe.tasks.transformer.model import TransformerModel
from lingvo_moe.tasks.transformer.shrinking import parts, sample_rows, shrink_layers
from lingvo_moe.tasks.transformer.stacks import layers_before, layers_of_block
from lingvo_moe.tasks.transformer.strategy import TransformerStrategy


class TransformerTask(TransformerModel):
    """A Transformer as a task: its sizes, forms, growth, smallest copy and costs."""

    UNIT = "tokens"
    KIND: ClassVar[str] = "text"  # the kind of model, for messages
    EXAMPLE: ClassVar[str] = "mt.M4Demo"  # an experiment of this kind
    SIZES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **BaseTask.SIZES,
        "N": ("task.num_heads",),
        "A": ("task.num_kv_heads",),
        "M": ("task.model_dim",),
        "K": ("task.key_dim",),
        **experts.SIZES,
    }
    DIVIDED = "BGEHNAV"
    HELD_OUT_METRICS = ("nll", "accuracy")
    MAY_CHANGE: ClassVar[tuple[str, ...]] = (
        "activation_split",
        "weight_split",
        "dtype",
        "fprop_dtype",
        "repeat",
        "remat",
        *pipeline.PARAMETERS,
    )

    @classmethod
    def RoutesByTask(cls, params: HyperParams) -> bool:
        """Whether some router chooses by the source language, so that batches and requests tell it."""
        return False

    @classmethod
    def Strategy(cls, task: InstantiableParams) -> TransformerStrategy:
        return TransformerStrategy(task, cls.STACKS)

    @classmethod
    def Growth(cls, task: InstantiableParams) -> TransformerGrowth:
        return TransformerGrowth(task)

    @classmethod
    def CheckInput(cls, task: HyperParams, inputs: HyperParams) -> None:
        """See BaseTask: the model has an embedding for each id, and batches fall into equal groups."""
        super().CheckInput(task, inputs)
        for stack in cls.STACKS:
            length, ids = f"{stack.side}_length", f"{stack.side}_vocab_size"
            if inputs.Get(ids) > task.Get(stack.vocab_size):
                raise TaskError(
                    f"input.{ids}={inputs.Get(ids)} is more than task.{stack.vocab_size}={task.Get(stack.vocab_size)}: "
                    "the model has no embedding for some of the ids; set both to the same"
                )
            experts.check_groups(task, inputs.batch_size, inputs.Get(length), length)

    @classmethod
    def Shrink(cls, task: HyperParams, inputs: HyperParams, mesh: Mesh) -> None:
        """See BaseTask: few blocks of layers, heads, experts and tokens."""
        size = shrink_layers(task, mesh)
        groups = experts.shrink_experts(task, size)
        if task.num_experts:
            task.dense_first_layers = min(task.dense_first_layers, 1)
        layers, before = layers_of_block(task), layers_before(task)
        inputs.batch_size = math.lcm(parts(task, "B", mesh), groups or 1)
        for i, stack in enumerate(cls.STACKS):
            blocks = max(
                task.pipeline.stages * task.pipeline.repeats, task.Get(stack.num_layers) // layers
            )
            ids = size("V", 16 + 4 * len(cls.STACKS[i:]))
            task.Set(**{stack.num_layers: before + blocks * layers, stack.vocab_size: ids})
            length = size("T", 8) + i * parts(task, "T", mesh)
            inputs.Set(**{f"{stack.side}_length": length, f"{stack.side}_vocab_size": ids})

    def SampleBatch(self, inputs: BaseInput, rng: np.random.RandomState) -> NestedMap:
        """See BaseTask: random ids; two texts a row, and padding at its end."""
        vocab_sizes = {stack.row: self.p.Get(stack.vocab_size) for stack in self.STACKS}
        return sample_rows(inputs.BatchSpec(), vocab_sizes, rng)

    def Units(self, batch: NestedMap) -> NestedMap:
        """See BaseTask: by stack, e.g. `source_tokens`, what experts.units counts; `tokens` are those of the last."""
        units = NestedMap()
        for stack in self.STACKS:
            real = tf.cast(stack.Row(batch).segment_ids > 0, tf.float32)
            counts = experts.units(self.p, real)
            units.update({f"{stack.prefix}{name}": count for name, count in counts.items()})
        units.tokens = units[f"{stack.prefix}tokens"]
        return units

    def Metrics(self) -> TransformerMetrics:
        return TransformerMetrics(self.p, self.STACKS)

    def Costs(self) -> TransformerCosts:
        return TransformerCosts(self)
