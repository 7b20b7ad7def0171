"""Trained: a task with what feeds it, runs it and keeps it."""

from dataclasses import dataclass, field

from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.engine.base import Engine
from lingvo_moe.core.engine.checkpoints.checkpoints import Checkpointer
from lingvo_moe.core.input.base_input import BaseInput
from lingvo_moe.core.runs.time_record import TimeRecord
from lingvo_moe.core.task.base_task import BaseTask


@dataclass(frozen=True)
class Trained:
    """The parts of a run that its training and its evaluation share."""

    task: BaseTask
    inputs: BaseInput  # prepared
    engine: Engine
    params: Params  # the experiment's
    checkpointer: Checkpointer  # the run's checkpoints
    times: TimeRecord = field(default_factory=TimeRecord)  # where the time goes

    @property
    def train(self) -> Params:
        """registry.TrainParams."""
        return self.params.train
