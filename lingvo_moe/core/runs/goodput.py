"""Adds up where the time of a run went, over all its segments, from its `time.jsonl`. Free of TensorFlow and JAX.

Goodput is the share of the time in which steps were done that lasted; the rest has the names of Google's
ml-goodput-measurement.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lingvo_moe.core.files.checked_lines import parse
from lingvo_moe.core.runs import time_record
from lingvo_moe.core.runs.time_record import (
    BEGIN,
    END,
    EVALUATION,
    FIRST,
    INPUT,
    KINDS,
    SAVE,
    SAVED,
    STARTUP,
    STEP,
)

WASTED = "WASTED_PROGRESS_FROM_DISRUPTION"
RECOVERY = "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION"

# Each part of the time, and what it is.
PARTS = {
    STEP: "steps that lasted: goodput",
    time_record.INITIALIZATION: "loading libraries, finding devices, connecting processes",
    time_record.PREPARATION: "data, the run's directory, initial weights",
    STARTUP: "tracing, lowering and compiling the step; by how much the first step took longer than the others",
    INPUT: "waiting for batches",
    SAVE: "waiting while a checkpoint is saved",
    time_record.RESTORE: "reading a checkpoint",
    WASTED: "steps that were lost and done again after a restart",
    RECOVERY: "from a death or a stop to the next start",
    EVALUATION: "held-out loss",
    time_record.OTHER: "ending",
}


class GoodputError(ValueError):
    """A run that says nothing of its time."""


class RecordLine(NamedTuple):
    """A line of the record, see time_record.py."""

    event: str
    step: int | None
    seconds: dict[str, float]  # by kind
    status: int | None
    began: float  # seconds since 1970

    @property
    def elapsed(self) -> float:
        """Seconds since the segment began."""
        return sum(self.seconds.values())


class Segment:
    """The lines of one command of the trainer, at least the first one.

    Attributes:
        began: seconds since 1970.
        seconds: up to the last line, by kind; `elapsed` is their sum.
        status: with which the command ended; None where it was cut short.
        stepped: the line after the first step; None where there was none.
        done: the last line while steps were done, or None.
        first: the step from which it went on; None where it did no step.
        last: the last step that it did, as far as is known.
        between_saves: the steps before each checkpoint.
        saving: seconds that training waited for these.
        excess: seconds by which the first step took longer than the others; set by `account`.
    """

    def __init__(self, lines: Sequence[RecordLine]):
        self.began, self.seconds, self.status = lines[0].began, lines[-1].seconds, lines[-1].status
        self.elapsed, self.excess = lines[-1].elapsed, 0.0
        stepped = [(x.step, x) for x in lines if x.step is not None]
        at = next((i for i, (_, x) in enumerate(stepped) if x.event == FIRST), len(stepped))
        self._lines = stepped[at:]
        self.first: int | None = None
        self.last: int | None = None
        self.stepped: RecordLine | None = None
        self.done: RecordLine | None = None
        self.between_saves: list[int] = []
        self.saving = 0.0
        if self._lines:
            first, self.stepped = self._lines[0]
            self.first, self.last = first - 1, self._lines[-1][0]
            self.done = [x for _, x in self._lines if x.event != END][-1]
            saved = [(step, x) for step, x in self._lines if x.event == SAVED]
            steps = [self.first, *(step for step, _ in saved)]
            self.between_saves = [b - a for a, b in itertools.pairwise(steps) if b > a]
            if saved:
                before, after = (x.seconds.get(SAVE, 0.0) for x in (self.stepped, saved[-1][1]))
                self.saving = after - before

    @property
    def others(self) -> int:
        """The number of steps after the first one, as far as is known."""
        return 0 if self.first is None or self.last is None else self.last - self.first - 1

    @property
    def saves(self) -> int:
        """The number of checkpoints after the first step."""
        return len(self.between_saves)

    def After(self, line: RecordLine, kind: str) -> float:
        """The seconds of a kind after a line."""
        return self.seconds.get(kind, 0.0) - line.seconds.get(kind, 0.0)

    def StepSeconds(self, step: float) -> float:
        """The seconds of its steps up to this one, without the excess of the first; between two lines in proportion."""
        if self.first is None or step <= self.first:
            return 0.0
        before_step, before = self.first, 0.0
        for here_step, line in self._lines:
            here = max(line.seconds.get(STEP, 0.0) - self.excess, 0.0)
            if here_step > step:
                share = (step - before_step) / (here_step - before_step)
                return before + share * (here - before)
            before_step, before = here_step, here
        return before


@dataclass(frozen=True)
class Goodput:
    """The time of a run by what it went into."""

    seconds: dict[str, float]  # by the names of PARTS; their sum is the total
    segments: int  # commands of the trainer
    disruptions: int  # segments that did not end by themselves and were followed by another one
    max_productive_step: int  # the last step
    step_seconds: float  # the mean of a step
    saves: int  # checkpoints while steps were done
    save_seconds: float | None  # the time that training waits for one; None where there was none
    # From the last step before a disruption to the next one, the mean; None where there was none.
    restart_seconds: float | None
    steps_between_saves: int  # 0 where there were none
    # Of the time after the first step without saves; the rest are evaluations and input.
    share_of_steps: float

    @property
    def total(self) -> float:
        """Seconds of the run in all."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """The share of steps that lasted."""
        return self.seconds[STEP] / self.total if self.total else 0.0

    @property
    def mtbf(self) -> float | None:
        """The mean seconds between disruptions; None where there was none."""
        return self.total / self.disruptions if self.disruptions else None

    @property
    def interval_seconds(self) -> float | None:
        """The seconds from the end of a save to the next save; None where there was none."""
        return self.steps_between_saves * self.step_seconds / self.share_of_steps or None


def read_segments(file: Path) -> tuple[list[Segment], int]:
    """The segments of a record, oldest first, and the number of damaged lines, which are left out.

    Raises GoodputError: there is no such file, or no line of it is whole.
    """
    if not file.is_file():
        raise GoodputError(
            f"{file}: there is no such file: the run is by an older version, or its trainer never got to its data"
        )
    segments: list[list[RecordLine]] = []
    damaged = 0
    with open(file, "rb") as lines:
        for text in lines:
            line = _line(parse(text.rstrip(b"\n")))
            if line is None:
                damaged += text.endswith(b"\n")  # a last line that a kill cut off is no damage
            elif line.event == BEGIN or not segments or segments[-1][0].began != line.began:
                segments.append([line])
            else:
                segments[-1].append(line)
    if not segments:
        raise GoodputError(f"{file}: holds no whole line; delete it: the run goes on without it")
    return [Segment(lines) for lines in segments], damaged


def _line(row: dict[str, Any] | None) -> RecordLine | None:
    """A row of the record, which anybody may have written; None where it is none."""
    if row is None:
        return None
    try:
        seconds = {str(k): float(v) for k, v in row["seconds"].items()}
        step, status = (
            None if row[name] is None else int(row[name]) for name in ("step", "status")
        )
        line = RecordLine(str(row["event"]), step, seconds, status, float(row["began"]))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None
    numbers = [line.began, *seconds.values()]
    if not all(math.isfinite(x) and x >= 0 for x in numbers) or not set(seconds) <= set(KINDS):
        return None
    return line


def account(segments: Sequence[Segment]) -> Goodput:
    """Adds up segments, at least one, oldest first."""
    seconds = dict.fromkeys(PARTS, 0.0)
    others = sum(s.others for s in segments)
    mean = _sum(segments, STEP) / others if others else 0.0
    for segment in segments:
        if (stepped := segment.stepped) and mean:
            number = segment.others
            usual = segment.After(stepped, STEP) / number if number else mean
            segment.excess = max(0.0, stepped.seconds.get(STEP, 0.0) - usual)
    lasted = math.inf  # steps up to here were not done again
    for segment in reversed(segments):
        for kind, value in segment.seconds.items():
            seconds[kind] += value
        lasting, done = segment.StepSeconds(lasted), segment.StepSeconds(math.inf)
        seconds[STARTUP] += segment.seconds.get(STEP, 0.0) - done
        seconds[STEP] += lasting - segment.seconds.get(STEP, 0.0)
        seconds[WASTED] += done - lasting
        lasted = min(lasted, math.inf if segment.first is None else segment.first)
    gaps = [_gap(*pair) for pair in itertools.pairwise(segments)]
    seconds[RECOVERY] = sum(gaps)
    saves = sum(s.saves for s in segments)
    steps = _sum(segments, STEP)
    return Goodput(
        seconds=seconds,
        segments=len(segments),
        disruptions=sum(s.status != 0 for s in segments[:-1]),
        max_productive_step=next((s.last for s in reversed(segments) if s.last is not None), 0),
        step_seconds=mean,
        saves=saves,
        save_seconds=sum(s.saving for s in segments) / saves if saves else None,
        restart_seconds=_restart_seconds(segments, gaps, mean),
        steps_between_saves=statistics.median_low(
            [n for s in segments for n in s.between_saves] or [0]
        ),
        share_of_steps=steps / (steps + _sum(segments, INPUT, EVALUATION)) if steps else 1.0,
    )


def _sum(segments: Sequence[Segment], *kinds: str) -> float:
    """The seconds of these kinds after the first steps of segments."""
    return sum(s.After(s.stepped, kind) for s in segments if s.stepped for kind in kinds)


def _gap(before: Segment, after: Segment) -> float:
    """The seconds between two segments; 0 after one that ended by itself, since nobody waited for the next."""
    return 0.0 if before.status == 0 else max(0.0, after.began - before.began - before.elapsed)


def _restart_seconds(
    segments: Sequence[Segment], gaps: Sequence[float], mean: float
) -> float | None:
    """The mean seconds from the last step before a disruption to the first one after it, which itself takes `mean`.

    Starts that were disrupted before their first step are left out.
    """
    pairs = list(zip(itertools.pairwise(segments), gaps, strict=True))
    disrupted = [(before, after, gap) for (before, after), gap in pairs if before.status != 0]
    starts = [gap + a.stepped.elapsed - mean for _, a, gap in disrupted if a.stepped]
    # What a stop takes: saving, above all.
    ends = [b.elapsed - b.done.elapsed - b.After(b.done, STEP) for b, *_ in disrupted if b.done]
    return statistics.fmean(starts) + statistics.fmean(ends or [0.0]) if starts else None
