"""The programs of a job, as the trainer runs them and the planner compiles them: one description for both."""

from dataclasses import replace

from lingvo_moe.core.base_input import BaseInput
from lingvo_moe.core.base_task import BaseTask
from lingvo_moe.core.engine.base import Compiled, Engine
from lingvo_moe.core.engine.program import Program
from lingvo_moe.core.sharding import Mesh, dims_mapping
from lingvo_moe.core.step import Step


def train_step(task: BaseTask, inputs: BaseInput) -> Step:
    """(state, batch) -> (state, metrics) of a task that is fed by an input."""
    split = task.p.activation_split
    batch = inputs.BatchSpec().Transform(lambda s: replace(s, split=dims_mapping(s.letters, split)))
    return Step("train_step", task.TrainStep, (task.StateSpecs(), batch), donate=(0,))


def build_step(step: Step, engine: Engine) -> Compiled:
    """The step, ready to run on an engine. Raises as Engine.Build."""
    return engine.Build(step.fn, step.arg_specs, donate=step.donate, name=step.name)


def lower_step(step: Step, mesh: Mesh) -> Program:
    """The program that `build_step` compiles on an engine of this mesh. Raises as lowering.lower."""
    from lingvo_moe.core.engine.lowering import lower  # the door to TensorFlow

    return lower(step.fn, step.arg_specs, mesh, donate=step.donate, name=step.name)
