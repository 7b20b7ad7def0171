"""Counts training steps that changed nothing, since their loss or gradient was not finite; waits for none of them."""

import os
from typing import Any

from lingvo_moe.core.engine.base import Engine
from lingvo_moe.core.engine.checkpoints.checkpoints import Checkpointer


class SkippedSteps:
    """The skipped steps of a run, up to the last Read. In a job of several processes each makes all calls.

    A skipped step leaves the weights as they were. So the weights of a checkpoint are known to be good once a later
    step has changed them, which it does only where it found a finite loss and gradient.

    The checkpointer keeps the newest checkpoint whose weights are known to be good.

    Attributes:
        total: of all steps of the run.
        in_row: the last steps, all of them skipped.
        updated: the last step that changed the weights, as far as is known.
    """

    def __init__(self, engine: Engine, checkpointer: Checkpointer, most: int):
        self._engine, self._checkpointer, self._most = engine, checkpointer, most
        self._counters: list[Any] = []  # arrays of the engine's
        self.total, self.in_row, self.updated = 0, 0, 0

    def Begin(self, step: int, counter: Any) -> None:
        """Takes over the count of the run's first `step` steps, a scalar of the engine's."""
        self.total, self.updated = int(self._engine.Get([counter])[0]), step

    def Add(self, counter: Any) -> None:
        """Notes the count after another step, a scalar of the engine's, which may not be computed yet."""
        self._counters.append(counter)

    def Read(self) -> None:
        """Waits for the steps that were added, and counts them."""
        for counter in self._engine.Get(self._counters):
            before, self.total = self.total, int(counter)
            self.in_row += 1
            if self.total == before:
                self.updated, self.in_row = self.updated + self.in_row, 0
        self._counters = []
        self._checkpointer.rotation.before = self.updated

    @property
    def too_many(self) -> bool:
        """Whether so many of the last steps were skipped that training ends."""
        return bool(self._most) and self.in_row >= self._most

    def Why(self) -> str:
        """Says why training ends, and what to do."""
        first, last = self.updated + 1, self.updated + self.in_row
        run = os.path.dirname(self._checkpointer.directory)
        good = [step for step in self._checkpointer.Steps() if step < self.updated]
        advice = (
            f"the newest checkpoint from which a step succeeded is that of step {good[-1]}: begin from it, with "
            f"--init_from={run} --init_from_step={good[-1]}, another --logdir and a lower learning rate"
            if good
            else "no step succeeded from any checkpoint that is kept: begin again with a lower learning rate, or look "
            "for numbers in the data that are not finite"
        )
        return (
            f"steps {first} to {last} were all skipped, since their loss or gradient was not finite "
            f"(train.max_skipped_steps={self._most}); {advice}"
        )
