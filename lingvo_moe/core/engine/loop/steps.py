"""The programs of a job, as the trainer runs them and the planner compiles them: one description for both."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from lingvo_moe.core.engine.base import Engine
from lingvo_moe.core.engine.kept_programs import text_of
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.input.base_input import BaseInput
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import dims_mapping
from lingvo_moe.core.task.base_task import BaseTask
from lingvo_moe.core.task.micro_batches import accumulating_step
from lingvo_moe.core.task.pipelined_step import pipelined_step
from lingvo_moe.core.task.step import Step


def train_step(task: BaseTask, inputs: BaseInput, num_micro_batches: int = 1) -> Step:
    """(state, batch) -> (state, metrics) of a task that is fed by an input.

    `num_micro_batches` counts where the task has no pipeline.

    Raises:
        ValueError: as accumulating_step and pipelined_step.
    """
    batch = batch_specs(task, inputs)
    fn: Callable[[NestedMap, NestedMap], tuple[NestedMap, NestedMap]] = task.TrainStep
    if task.PipelineParts() is not None:
        fn = pipelined_step(task, batch)
    elif num_micro_batches > 1:
        fn = accumulating_step(task, num_micro_batches, batch)

    text = _determined_by(task, inputs, num_micro_batches)
    return Step("train_step", fn, (task.StateSpecs(), batch), donate=(0,), text=text)


def held_out_step(task: BaseTask, inputs: BaseInput, average: bool) -> Step:
    """(weights, batch) -> metrics of a held-out batch; see BaseTask.HeldOutStep.

    `average`: whether the weights are the moving average of a state, instead of theta.
    """
    specs = task.StateSpecs()
    weights = specs.ema if average else specs.theta
    args = weights, batch_specs(task, inputs)
    return Step("held_out_step", task.HeldOutStep, args, text=_determined_by(task, inputs))


def _determined_by(task: BaseTask, inputs: BaseInput, num_micro_batches: int = 1) -> str:
    """The classes and parameters that the programs of a task follow from; '' for what only looks like an input."""
    if not isinstance(inputs, BaseInput):
        return ""
    return f"{text_of(task)}{text_of(inputs)}{num_micro_batches}"


def batch_specs(task: BaseTask, inputs: BaseInput) -> NestedMap:
    """The ArraySpecs of a batch, with the `split` that the task gives them."""
    split = task.p.activation_split
    return inputs.BatchSpec().Transform(lambda s: replace(s, split=dims_mapping(s.letters, split)))


def initial_step(task: BaseTask) -> Step:
    """(seed, an int32 scalar) -> the state before step 0; see BaseTask.InitState."""
    return Step("init_state", task.InitState, [TensorSpec((), "int32")], results=task.StateSpecs())


def initial_state(task: BaseTask, engine: Engine, seed: int) -> NestedMap:
    """The state before step 0, on the engine's devices. Raises as Engine.BuildStep."""
    return engine.Once(initial_step(task), np.int32(seed))
