"""Scores of a checkpoint in the way of its task."""

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lingvo_moe.core.files.artifacts import RunArtifacts
from lingvo_moe.core.input.base_input import BaseInput
from lingvo_moe.core.nested_map import NestedMap

if TYPE_CHECKING:
    from lingvo_moe.core.task.base_task import BaseTask


@dataclass(frozen=True)
class CheckpointScores:
    """Scores of a checkpoint besides the held-out loss."""

    metrics: NestedMap  # numbers by name, for TensorBoard and JSON
    text: str  # the main ones, for a line
    # What to state beside them, for TensorBoard.
    notes: Mapping[str, str] = field(default_factory=dict)


class BaseCheckpointScorer(abc.ABC):
    """Scores weights of one run in the way of its task, for `--mode=eval` and train.eval_decode_every; see
    BaseTask.CHECKPOINT_SCORER."""

    @abc.abstractmethod
    def __init__(
        self,
        task: "BaseTask",
        inputs: BaseInput,
        artifacts: RunArtifacts,
        lines: int | None = None,
        engine: Any = None,
    ):
        """
        Args:
            inputs: prepared, with held-out data.
            lines: held-out examples of each kind, e.g. of a language, at most; None for the task's own number.
            engine: the Engine over whose devices the weights lie; None: they are arrays of this host.
        """

    @abc.abstractmethod
    def __call__(self, theta: NestedMap) -> CheckpointScores:
        """Scores weights: NumPy arrays, or an engine's, which all processes of its job do."""
