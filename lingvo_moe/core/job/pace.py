"""Keeps the step that this process is at, and lets all processes of a job stop after the same one."""

import threading
from collections.abc import Callable


class ProcessSteps:
    """The steps of this process. The loop begins them; in a job of several, the watcher's thread may hold and end them.

    Attributes:
        several: whether a watcher is at work.
        begun: steps of the run that have begun, 0 before the first one of this process.
        asks: whether this process wants the job to stop.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.Reset(several=False)

    def Reset(self, several: bool, tell: Callable[[], None] = lambda: None) -> None:
        """Begins a job, or what comes after one: no step has begun, and nobody wants to stop.

        `tell` is called when the first step begins: from then on the others count on this process.
        """
        self.several, self.asks, self.begun = several, False, 0
        self._tell = tell
        self._paused = False
        self._last: int | None = None

    def Begin(self, step: int, asks: bool) -> bool:
        """Begins the step after `step`, for which all is there; returns False if the run is to stop before it.

        `asks`: whether this process wants to stop. Alone it does at once. In a job it goes on until all have agreed.
        """
        if not self.several:
            return not asks
        with self._changed:
            self.asks = self.asks or asks
            while self._paused and self._last is None:
                self._changed.wait()
            if self._last is not None and step >= self._last:
                return False
            first, self.begun = not self.begun, step + 1
        if first:
            self._tell()
        return True

    def End(self) -> None:
        """Ends a run, whose steps count no longer."""
        self.begun = 0

    @property
    def paused(self) -> bool:
        """Whether no further step begins before StopAfter is called."""
        return self._paused

    def Hold(self) -> None:
        """Lets no further step begin, so that `begun` stays until StopAfter is called."""
        with self._changed:
            self._paused = True

    def StopAfter(self, last: int) -> None:
        """Lets steps begin up to the last one, which is at least `begun` of each process."""
        with self._changed:
            self._last = last
            self._changed.notify_all()


PACE = ProcessSteps()  # of this process
