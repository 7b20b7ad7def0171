"""TransformerTask: what trainer and planner ask of a Transformer; see BaseTask.

Letters: B batch, T time, L layers, M model, H hidden, N heads, A heads of keys and values, K key, V vocabulary.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

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
    def OptimizerParams(cls, task: HyperParams) -> InstantiableParams:
        p = super().OptimizerParams(task)
        p.learning_rate.cls.SetModelDim(p.learning_rate, task.model_dim)
        return p

    @classmethod
    def PipelineSettings(cls, task: HyperParams) -> pipeline.Settings | None:
        return pipeline.Settings.Of(task.pipeline)

    @classmethod
    def RoutesByTask(cls, params: HyperParams) -> bool:
        """Whether some router chooses by the source language, so that batches and requests tell it."""
        return False

    @classmethod
    def Strategy(cls, task: InstantiableParams) -> TransformerStrategy:
        return TransformerStrategy(task, cls.STACKS)

    @classmethod
    def GrowsFrom(cls, task: HyperParams) -> dict[str, Any]:
        """See BaseTask: without first layers, nth_attention would be in other layers than here."""
        elsewhere = layers_before(task) and task.nth_attention is not None
        return {} if elsewhere else experts.grows_from(task)

    @classmethod
    def MicroBatchSizes(cls, task: HyperParams) -> tuple[str, ...]:
        return experts.micro_batch_sizes(task)

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

    def SizeParams(self, path: str, letter: str) -> tuple[str, ...]:
        """See BaseTask; the layers are those of the variable's stack."""
        if letter != "L":
            return super().SizeParams(path, letter)
        named = {f"{stack.name}.first": "dense_first_layers" for stack in self.STACKS}
        named |= {stack.name: stack.num_layers for stack in self.STACKS}
        numbers = [number for name, number in named.items() if name in path]
        return tuple(f"task.{number}" for number in numbers[:1])

    def MetricLayers(self) -> dict[str, list[str]]:
        """See BaseTask: the layers with experts, numbered among all layers of their stack.

        A translator of four and four layers, of which every second has experts, gives
        {'moe/encoder': ['layer_1', 'layer_3'], 'moe/decoder': ['layer_1', 'layer_3']}.
        """
        p = self.p
        if not p.num_experts:
            return {}
        first = layers_before(p) + p.moe_every - 1
        return {
            f"moe/{stack.name}": [
                f"layer_{i}" for i in range(first, p.Get(stack.num_layers), p.moe_every)
            ]
            for stack in self.STACKS
        }

    def ProgressNote(self, metrics: NestedMap) -> str:
        """See BaseTask: the overflow rate of the worst MoE layer."""
        shares = [
            v.max() for path, v in metrics.FlattenItems() if path.endswith(".over_capacity_ratio")
        ]
        return f"{max(shares):.1%} dropped at worst" if shares else ""

    def Costs(self) -> TransformerCosts:
        return TransformerCosts(self)
