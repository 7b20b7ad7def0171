"""Equal CPU seconds for every contender of benchmarks/quality_peers.py; free of any framework."""

import contextlib
import json
import time

_BETWEEN_NOTES = 15.0  # CPU seconds


class Budget:
    """Counts the CPU seconds that training takes, and says when they reach a point.

    They are those of the process, user and system, of all its threads. The clock starts after the first step, which
    also compiles, and stands still while a model is scored.

    Usage:
        budget = Budget([100.0, 200.0])
        while not budget.done:
            train_one_step()
            if budget.Due():
                with budget.Scoring():
                    ...

    Args:
        points: CPU seconds, rising, at which the model is scored. The last one ends the training.
        clock: returns the CPU seconds of the process.
    """

    def __init__(self, points, clock=time.process_time):
        self._points, self._clock = list(points), clock
        self._start = None
        self._noted = 0.0

    @property
    def used(self):
        """The CPU seconds since the end of the first step, without those of scoring."""
        return 0.0 if self._start is None else self._clock() - self._start

    @property
    def done(self):
        """Whether all points have been scored."""
        return not self._points

    @property
    def to_next(self):
        """The CPU seconds from the point that is due to the one after it."""
        return self._points[1] - self._points[0]

    def Due(self):
        """Whether a point has been reached. To be called after each step; the first call starts the clock."""
        if self._start is None:
            self._start = self._clock()
        return self.used >= self._points[0]

    @contextlib.contextmanager
    def Scoring(self):
        """Stops the clock within the block, which scores the model at the point that is due."""
        used = self.used
        yield
        self._start = self._clock() - used
        self._points.pop(0)

    def Return(self, used):
        """Sets the clock back, where training goes on from an earlier state."""
        self._start = self._clock() - used

    def Note(self, step, loss):
        """Reports the progress now and then. `loss` returns the loss of the last step."""
        if self.used >= self._noted + _BETWEEN_NOTES:
            self._noted = self.used
            report("progress", step=step, cpu_seconds=round(self.used, 1), loss=float(loss()))


def report(kind, **values):
    """Writes a line of JSON to standard output, which the command reads."""
    print(json.dumps({"kind": kind, **values}), flush=True)
