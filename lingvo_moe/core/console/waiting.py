"""Shows what a command does and for how long: one line that changes at a terminal, occasional lines elsewhere."""

import contextvars
import shutil
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Self, TextIO, TypeVar

from lingvo_moe.core.console.command import printable, terminal

_T = TypeVar("_T")
_TICK = 1.0  # seconds between two looks at the clock while something is waited for


class LineProgress:
    """Shows the current stage of a long preparation: call it with a line of text, then Close it.

    At a terminal each line takes the place of the one before. Elsewhere lines follow each other, at
    most one in `interval` seconds, besides the first and the last.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        interval: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._interval, self._clock = interval, clock
        self._shown_at: float | None = None
        self._held = ""

    def __enter__(self) -> "LineProgress":
        return self

    def __exit__(self, *_: object) -> None:
        self.Close()

    def __call__(self, line: str) -> None:
        called_at = self._clock()
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            terminal(self._stream).write(f"\r\x1b[2K{printable(line)[:width]}")
            terminal(self._stream).flush()
        elif self._shown_at is not None and called_at - self._shown_at < self._interval:
            self._held = line
            return
        else:
            self._write(f"{line}\n")
        self._shown_at, self._held = called_at, ""

    def Close(self, last: bool = True) -> None:
        """Ends the line at a terminal. Elsewhere shows the last line if it was held back, unless `last` is false."""
        if self._terminal and self._shown_at is not None:
            self._write("\n")
        elif self._held and last:
            self._write(f"{self._held}\n")
        self._shown_at, self._held = None, ""

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


class Waiting:
    """Shows what a command is doing and for how many seconds: call it with a phrase when it does something else.

    A thread shows it, since a compiler does not return before it is done. Elsewhere than at a terminal there is a line
    at the beginning, and then one in `interval` seconds.

    Usage:
        with Waiting("lowering train_step") as waiting:
            ...
            waiting("compiling train_step")
    """

    def __init__(
        self,
        doing: str = "",
        stream: TextIO | None = None,
        interval: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._lines, self._clock = LineProgress(stream, interval, clock), clock
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._Run, name="waiting", daemon=True)
        self._doing = ""
        if doing:
            self(doing)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._lines.Close(last=False)

    def __call__(self, doing: str) -> None:
        with self._lock:
            self._doing, self._since = doing, self._clock()
            self._lines(f"{doing} ...")

    def Watch(self, work: Callable[..., _T], *args: Any) -> _T:
        """Runs `work(*args)` in a thread, so that signals are handled meanwhile; returns its result or raises as it."""
        future: Future[_T] = Future()
        context = contextvars.copy_context()

        def run() -> None:
            try:
                future.set_result(context.run(work, *args))
            except BaseException as e:
                future.set_exception(e)

        threading.Thread(target=run, daemon=True).start()
        return future.result()

    def _Run(self) -> None:
        while not self._over.wait(_TICK):
            with self._lock:
                if self._doing:
                    self._lines(f"{self._doing} ... {self._clock() - self._since:.0f} s")
