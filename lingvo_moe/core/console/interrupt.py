"""Asks a run to stop at the next step, so that work is saved: on Ctrl-C, SIGTERM, or at a limit of the time."""

import contextlib
import math
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any


class Stopped(KeyboardInterrupt):
    """Raised by a signal inside `StopRequest.AtOnce`.

    Attributes:
        status: of the process: 128 + the signal's number.
    """

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


class StopRequest:
    """Within `with StopRequest() as stop:`, `stop.requested` turns True at the first signal,
    and `stop.signal` is its number. To be used in the main thread.

    A second Ctrl-C raises KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.requested = False
        self.signal = 0
        self._at_once = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    @contextlib.contextmanager
    def AtOnce(self) -> Iterator[None]:
        """Inside the block a signal, also one before it, raises Stopped: nothing is lost, and a compiler cannot be
        stopped, so that the process ends without it.
        """
        if self.requested:
            raise Stopped(self.signal)
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._at_once:
            raise Stopped(number)
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested, self.signal = True, number
        name = signal.Signals(number).name
        line = f"{name}: stopping after this step and saving; Ctrl-C again to stop now\n"
        # Not print: the signal may come while something else is being printed.
        os.write(2, line.encode())


class TimeLimit:
    """A limit of the wall clock, from when it is made.

    Attributes:
        minutes: None for no limit.
    """

    def __init__(self, minutes: float | None = None):
        self.minutes = minutes
        self._end = time.monotonic() + 60 * minutes if minutes is not None else math.inf

    @property
    def over(self) -> bool:
        """Whether it is reached."""
        return time.monotonic() >= self._end
