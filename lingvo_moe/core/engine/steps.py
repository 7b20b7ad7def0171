"""The programs of a job, as the trainer runs them and the planner compiles them: one description for both."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lingvo_moe.core.engine.base import Compiled, Engine
from lingvo_moe.core.engine.program import Program
from lingvo_moe.core.engine.specs import TensorSpec
from lingvo_moe.core.sharding import Mesh


@dataclass(frozen=True)
class Step:
    """A function with all that `lowering.lower` asks of it but the mesh.

    Attributes:
        name: of the program.
        fn: a function of trees of tensors.
        arg_specs: a tree of specs for each argument.
        donate: numbers of the arguments whose memory the results take over.
    """

    name: str
    fn: Callable[..., Any]
    arg_specs: tuple[Any, ...]
    donate: tuple[int, ...] = ()

    def Build(self, engine: Engine) -> Compiled:
        """Ready to run on an engine."""
        return engine.Build(self.fn, self.arg_specs, donate=self.donate, name=self.name)

    def Lower(self, mesh: Mesh) -> Program:
        """The program that `Build` compiles on an engine of this mesh."""
        from lingvo_moe.core.engine.lowering import lower  # the door to TensorFlow

        return lower(self.fn, self.arg_specs, mesh, donate=self.donate, name=self.name)


def train_step(task: Any, inputs: Any) -> Step:
    """(state, batch) -> (state, metrics) of a BaseTask, fed by an input generator with `BatchSpec()`."""
    split = task.BatchSplit()
    batch = inputs.BatchSpec().Transform(lambda s: TensorSpec(s.shape, s.dtype, split))
    return Step("train_step", task.TrainStep, (task.StateSpecs(), batch), donate=(0,))
