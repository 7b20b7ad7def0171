"""Shows the progress of training: a live bar at a terminal, occasional lines elsewhere."""

import contextlib
import io
import sys
import time
from typing import NamedTuple, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from lingvo_moe.core.console.command import terminal
from lingvo_moe.core.console.units import clock, rate
from lingvo_moe.core.console.waiting import Waiting

_WAIT_TO_SHOW = 0.01  # of the time; less does not matter


class Nowhere(io.StringIO):
    """A stream whose text nobody reads."""

    def write(self, text: str) -> int:
        return len(text)


class StepWork(NamedTuple):
    """The arithmetic of a training step."""

    flops: int = 0  # model FLOPs of one step; 0 where the task does not say
    # The most that all devices do in a second; None where that is not known.
    peak: float | None = None


class Speed(NamedTuple):
    """The speed of the steps that were done."""

    units: float  # units a second
    flops: float | None  # model FLOPs a second; None where the task does not say
    # `flops` as a share of the peak; None where either is not known, or where more was done than the peak allows, so
    # that the peak is wrong.
    utilisation: float | None
    input_wait: float = 0.0  # the share of the time in which the next step waited for its batch


class StepProgress:
    """Shows step, loss, speed and the time left.

    `doing` is shown until the first step is done; `unit` is what the speed counts, e.g. 'tokens'; `last` may change.
    """

    def __init__(
        self,
        first: int,
        last: int,
        unit: str,
        work: StepWork | None = None,
        doing: str = "running the first step",
        stream: TextIO | None = None,
    ):
        self._stream, self._unit, self._work = stream or sys.stderr, unit, work or StepWork()
        self._first, self.last = first, last
        self._seen, self._seen_at = first, time.monotonic()
        self._seconds_a_step = 0.0
        self._bar: Progress | None = None
        self._waiting = contextlib.ExitStack()  # until the first step is done
        if self._stream.isatty():
            self._bar = Progress(
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
                console=Console(file=terminal(self._stream)),
            )
            self._bar.start()
            self._task = self._bar.add_task(doing, total=last, completed=first)
        else:
            self._waiting.enter_context(Waiting(doing, self._stream))

    def Update(
        self,
        step: int,
        loss: float,
        units: float,
        skipped: int = 0,
        note: str = "",
        waited: float = 0.0,
    ) -> Speed:
        """Shows a step's loss.

        Args:
            loss: the training loss, in nats.
            units: how many were processed since the last call, padding left out.
            skipped: steps that changed nothing so far, because they were not finite.
            waited: seconds in which steps waited for their batches since the last call. They are shown where they are
                more than 1% of the time.

        Returns:
            The speed since the last call.
        """
        self._waiting.close()
        seen_at = time.monotonic()
        elapsed = max(seen_at - self._seen_at, 1e-9)
        speed = self._speed(units, step - self._seen, elapsed, waited)
        # A first step alone also traces, compiles or warms up: it says nothing of the others.
        is_first = step <= self._first + 1
        if step > self._seen and not is_first:
            latest = elapsed / (step - self._seen)
            # Half the newest figure, half the past: steady, yet it follows a machine that slows
            # down.
            past = self._seconds_a_step or latest
            self._seconds_a_step = 0.5 * past + 0.5 * latest
        self._seen, self._seen_at = step, seen_at
        text = f"loss {loss:.4f}"
        if not is_first:
            text += self._speed_text(speed)
        if self._seconds_a_step:
            text += f"  {clock(self._seconds_a_step * (self.last - step))} left"
        if speed.input_wait > _WAIT_TO_SHOW:
            text += f"  {speed.input_wait:.0%} waiting for input"
        if note:
            text += f"  {note}"
        if skipped:
            text += f"  ({skipped} not finite, skipped)"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, total=self.last, description=text)
        else:
            print(f"step {step}/{self.last}  {text}", file=self._stream, flush=True)
        return speed

    def Exclude(self, seconds: float) -> None:
        """Leaves so many seconds since the last Update out of the speed: something else was done in them."""
        self._seen_at += seconds

    def _speed(self, units: float, steps: int, elapsed: float, waited: float) -> Speed:
        """The speed of so many units and steps in so many seconds, `waited` of them without a batch."""
        flops = self._work.flops * steps / elapsed if self._work.flops else None
        peak = self._work.peak
        utilisation = None
        if flops is not None and peak is not None and flops <= peak:
            utilisation = flops / peak
        return Speed(units / elapsed, flops, utilisation, waited / elapsed)

    def _speed_text(self, speed: Speed) -> str:
        """The known parts of a speed, each after two spaces."""
        text = f"  {speed.units:,.0f} {self._unit}/s"
        if speed.flops is not None:
            text += f"  {rate(speed.flops, 'FLOP')}"
        if speed.utilisation is not None:
            text += f"  {speed.utilisation:.1%} MFU"
        return text

    def Close(self) -> None:
        """Leaves the terminal in order."""
        self._waiting.close()
        if self._bar is not None:
            self._bar.stop()
