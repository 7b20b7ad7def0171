"""The step at which a run ends: train.max_steps, or an earlier one, where its budget is used up."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping

from lingvo_moe.core.config.hyperparams import InstantiableParams, Params

_ROUNDING = 1e-6  # of a step
_EARLIER_STEPS = 10


class Budget:
    """Counts what a run has used, and predicts the step at which that is as much as it may use.

    train.max_units limits the task's UNITs, e.g. tokens; train.max_cpu_seconds the user and system time of all threads
    of the process. Time counts from the end of the first step after each start, since that step also compiles.

    Args:
        until: where this part of the run ends, if it ends before the whole does; 0: it does not.
        clock: gives the CPU seconds of the process.

    Attributes:
        last: the step at which the run ends, as far as is known: predicted from the steps that were done.
    """

    def __init__(
        self, train: Params, clock: Callable[[], float] = time.process_time, until: int = 0
    ):
        self._max_steps, self._until, self._clock = train.max_steps, until, clock
        self._most = {"units": train.max_units, "cpu_seconds": train.max_cpu_seconds}
        self._used = dict.fromkeys(self._most, 0.0)
        self._counted = 0.0  # the clock, when it was read last
        # The first step of this start, and what had been used after it.
        self._since: tuple[int, dict[str, float]] | None = None
        self._earlier = dict.fromkeys(self._most, 0.0)  # what a step used before this start
        self.last = train.max_steps

    @property
    def units(self) -> float:
        """The units that the run has trained on so far."""
        return self._used["units"]

    @property
    def end(self) -> int:
        """The step at which this part of the run ends, as far as is known."""
        return min(self.last, self._until or self.last)

    def Begin(self, step: int, used: Mapping[str, float]) -> None:
        """Goes on at a step with what was used before it, as GetState said."""
        self._used.update(used)
        self._earlier = {name: value / max(step, 1) for name, value in self._used.items()}
        self._Predict(step, 0, self._used)

    def GetState(self) -> dict[str, float]:
        """The units and CPU seconds that the run has used, for a checkpoint."""
        return {name: round(value, 3) for name, value in self._used.items()}

    def Count(self, step: int, units: float) -> None:
        """Counts the units since the last call, and the time. To be called after the first step, then at any."""
        counted_at = self._clock()
        self._used["units"] += units
        if self._since is None:
            self._since = step, dict(self._used)
        else:
            self._used["cpu_seconds"] += counted_at - self._counted
        self._counted = counted_at
        first, used = self._since
        self._Predict(step, step - first, used)

    @contextlib.contextmanager
    def Paused(self) -> Iterator[None]:
        """The time of the block does not count."""
        began = self._clock()
        yield
        self._counted += self._clock() - began

    def WhyDone(self, step: int) -> str:
        """The reason that a run is over after a step; '' if it goes on."""
        if step < self.end:
            return ""
        if self.end < self.last:
            return f"train.upcycle_at={self._until} is reached"
        for name, most in self._Limits().items():
            if self._used[name] >= most:
                return f"train.max_{name}={most:g} is used up"
        return f"train.max_steps={self._max_steps} is reached"

    def _Limits(self) -> dict[str, float]:
        return {name: most for name, most in self._most.items() if most}

    def _Predict(self, step: int, steps: int, before: Mapping[str, float]) -> None:
        """Sets `last` for a run that is at `step`; `before` is what had been used so many steps ago.

        The first steps after a start vary, so that the steps before it count as some more.
        """
        ends = [self._max_steps]
        for name, most in self._Limits().items():
            left, spent = most - self._used[name], self._used[name] - before[name]
            earlier = _EARLIER_STEPS if self._earlier[name] else 0
            spent += earlier * self._earlier[name]
            if left <= 0.0:
                ends.append(step)
            elif spent:
                ends.append(step + math.ceil(left * (steps + earlier) / spent - _ROUNDING))
        self.last = min(ends)


def part_of_run(task: InstantiableParams, train: Params) -> int:
    """The step at which a model makes room for the larger one that grows out of it, by train.upcycle_at; 0: none."""
    return 0 if task.cls.Growth(task).GrowsFrom() else train.upcycle_at
