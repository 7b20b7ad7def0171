"""Records where the time of a run goes: `time.jsonl` in its directory, a line an event.

A segment is the time of one command of the trainer. It begins with a line `begin`; each later line has the seconds
since then, by what they were spent on, so that a line that is lost takes nothing with it. The names are those of
Google's ml-goodput-measurement. A segment without a line `end` was cut short. goodput.py adds up the segments.
"""

import contextlib
import os
import time
from collections.abc import Iterator

from lingvo_moe.core.files.checked_lines import append_row, end_last_line

FILE = "time.jsonl"

STEP = "STEP"  # the training steps: what ml-goodput-measurement counts as productive
INITIALIZATION = "TPU_INITIALIZATION"
PREPARATION = "TRAINING_PREP"
STARTUP = "PROGRAM_STARTUP"
INPUT = "DATA_LOADING_SYNC"
SAVE = "UNPRODUCTIVE_CHECKPOINT_SAVE_TIME"
RESTORE = "UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME"
EVALUATION = "CUSTOM_BADPUT_EVENTS"
OTHER = "OTHER"
KINDS = (STEP, INITIALIZATION, PREPARATION, STARTUP, INPUT, SAVE, RESTORE, EVALUATION, OTHER)

# What a line is about.
BEGIN, FIRST, STEPS, SAVED, END = "begin", "first step", "steps", "saved", "end"

# Seconds between two lines of steps: at least so many, and this share of the segment, so that a long one has few lines.
_LEAST, _SHARE = 1.0, 0.001


class TimeRecord:
    """The record of a segment, which begins when this is made. Nothing is written before Open.

    Usage:
        record = TimeRecord()  # counts as initialization
        record.Switch(PREPARATION)
        record.Open(path)
        with record.In(STEP):
            with record.In(INPUT): ...
            record.Step(1)
        record.End(step=1, status=0)
    """

    def __init__(self) -> None:
        self._began, self._path = time.time(), ""
        self._seconds = dict.fromkeys(KINDS, 0.0)
        self._kind, self._since = INITIALIZATION, time.monotonic()
        self._first, self._due = True, 0.0

    def Open(self, path: str | os.PathLike) -> None:
        """Opens the file to which lines are appended, and writes the first. Raises OSError, as all that write.

        A file that is open stays so.
        """
        if self._path != os.fspath(path):
            self._path = os.fspath(path)
            end_last_line(self._path)
            self._Write(BEGIN)

    def Switch(self, kind: str) -> None:
        """Counts what follows as this kind."""
        switched = time.monotonic()
        self._seconds[self._kind] += switched - self._since
        self._kind, self._since = kind, switched

    @contextlib.contextmanager
    def In(self, kind: str) -> Iterator[None]:
        """The time of the block counts as this kind, but for that of blocks in it."""
        before = self._kind
        self.Switch(kind)
        try:
            yield
        finally:
            self.Switch(before)

    def Step(self, step: int) -> None:
        """Notes that a step was done: in a line after the first one, and then about once a second, or less often."""
        if self._first or time.monotonic() >= self._due:
            self._Write(FIRST if self._first else STEPS, step)
            self._first = False

    def Saved(self, step: int) -> None:
        """Notes that a checkpoint was begun after a step."""
        self._Write(SAVED, step)

    def End(self, step: int, status: int) -> None:
        """Notes that the segment is over, and the status with which the command ends."""
        self._Write(END, step, status)

    def _Write(self, event: str, step: int | None = None, status: int | None = None) -> None:
        if not self._path:
            return
        self.Switch(self._kind)
        seconds = {kind: round(value, 6) for kind, value in self._seconds.items() if value}
        row = {"event": event, "began": self._began, "step": step, "status": status}
        append_row(self._path, {**row, "seconds": seconds})
        self._due = self._since + max(_LEAST, _SHARE * sum(seconds.values()))
