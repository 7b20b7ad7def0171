"""Schedules: in which tick each stage does which work for which micro-batch.

All stages run in lockstep, a tick at a time. A kind of work (the forward pass of a stack of layers, its backward
pass, ...) exists in a run of consecutive ticks; within it, a stage works a tick later than the one that it gets its
input from. Ticks with the same kinds of work form one loop, so a program has a few loops, whose number does not depend
on the number of stages or micro-batches.

Letters: K stages, M micro-batches, V repeats (a device holds V parts of the stack: a micro-batch passes all stages V
times), T ticks of a kind of work that passes through the stages, V M + K - 1.
"""

import itertools
from dataclasses import dataclass
from enum import Enum

STAGE = "stage"  # the mesh axis of stages
DATA = "data"  # that along which devices hold copies of a stage, each for a micro-batch of its own
FORWARD, BACKWARD, WEIGHTS, LOSS = "forward", "backward", "weight_gradients", "loss"
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1")


class ScheduleError(ValueError):
    """Raised for numbers of stages, micro-batches and repeats that no schedule has."""


class Order(Enum):
    """The order in which the stages get to a micro-batch."""

    FROM_FIRST = 1
    FROM_LAST = -1
    TOGETHER = 0


@dataclass(frozen=True)
class Work:
    """One kind of work."""

    kind: str  # FORWARD, BACKWARD, WEIGHTS or LOSS
    stack: int  # the number of the stack of layers
    start: int  # the first tick, in which the first stage in order gets to the first micro-batch
    ticks: int  # the number of ticks in which it exists
    order: Order  # the order of the stages

    @property
    def stop(self) -> int:
        """The tick after the last."""
        return self.start + self.ticks


@dataclass(frozen=True)
class Phase:
    """Consecutive ticks with the same kinds of work, start to stop - 1: one loop."""

    start: int
    stop: int
    works: tuple[Work, ...]


@dataclass(frozen=True)
class Schedule:
    """The work of a step."""

    stages: int  # K
    micro_batches: int  # M
    repeats: int  # V
    works: tuple[Work, ...]  # every kind of work, in the order in which a tick does them
    stacks: int  # how many stacks of layers follow each other

    def WorkOf(self, kind: str, stack: int) -> Work:
        return next(w for w in self.works if (w.kind, w.stack) == (kind, stack))

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients of weights are a kind of work of their own."""
        return any(w.kind == WEIGHTS for w in self.works)

    def Phases(self) -> list[Phase]:
        """The loops, in order."""
        bounds = sorted({tick for w in self.works for tick in (w.start, w.stop)})
        phases = []
        for start, stop in itertools.pairwise(bounds):
            works = tuple(w for w in self.works if w.start <= start < w.stop)
            phases.append(Phase(start, stop, works))
        return phases

    def InputsKept(self, stack: int) -> int:
        """The number of ticks for which a stage keeps its input, from the forward pass to its last use, inclusive."""
        last = WEIGHTS if self.splits_backward else BACKWARD
        forward = self.WorkOf(FORWARD, stack)
        gap = self.WorkOf(last, stack).start - forward.start
        ticks = gap + (1 if self.splits_backward else self.stages * self.repeats)
        return min(ticks, forward.ticks)

    def GradientsKept(self, stack: int) -> int:
        """The number of ticks for which a stage keeps the gradient of its output, if weights come later; else 0."""
        if not self.splits_backward:
            return 0
        return self.WorkOf(WEIGHTS, stack).start - self.WorkOf(BACKWARD, stack).start + 1

    @property
    def outputs_kept(self) -> int:
        """The number of ticks for which the last stage's output is kept until its loss is computed, both included."""
        last = self.WorkOf(FORWARD, self.stacks - 1)
        out = last.start + self.stages * self.repeats - 1
        return self.WorkOf(LOSS, self.stacks - 1).start - out + 1


def make_schedule(
    name: str, stages: int, micro_batches: int, repeats: int = 1, stacks: int = 1
) -> Schedule:
    """The schedule of a step.

    In lockstep every kind of work costs its T ticks, wherever they are, so 1F1B has GPipe's bubble, (K-1)/(T), and
    keeps the inputs of at most 2K-1 micro-batches a stage and stack instead of M. Of several stacks (encoder, decoder)
    each starts when the first micro-batch leaves the one before.

    Args:
        name: one of SCHEDULES. gpipe: all forward passes, then all backward passes. 1f1b: a micro-batch's backward pass
            as soon as its loss is known. interleaved: 1f1b for V > 1. zb_h1: 1f1b whose backward pass computes the
            gradients of inputs; those of weights follow in M ticks that all stages share ("Zero Bubble Pipeline
            Parallelism", arXiv 2401.10241, section 2.1, ZB-H1; there stages are not in lockstep, and the bubble is a
            third of 1F1B's).

    Raises:
        ScheduleError: numbers that the schedule does not have.
    """
    K, M, V = stages, micro_batches, repeats
    _check(name, K, M, V)
    ticks, through = V * M + K - 1, V * K
    forward = [Work(FORWARD, j, j * through, ticks, Order.FROM_FIRST) for j in range(stacks)]
    first_loss = stacks * through - 1
    if name == "gpipe":
        first_loss = forward[-1].stop
    # With V > 1, the last stage finishes a micro-batch in K of V K ticks.
    loss = Work(LOSS, stacks - 1, first_loss, V * M - (V - 1) * K, Order.TOGETHER)
    backward = [
        Work(BACKWARD, j, first_loss + (stacks - 1 - j) * through, ticks, Order.FROM_LAST)
        for j in reversed(range(stacks))
    ]
    weights = [
        Work(WEIGHTS, w.stack, w.start + K - 1, M, Order.TOGETHER)
        for w in backward
        if name == "zb_h1"
    ]
    return Schedule(K, M, V, (*forward, loss, *backward, *weights), stacks)


def _check(name: str, stages: int, micro_batches: int, repeats: int) -> None:
    if name not in SCHEDULES:
        raise ScheduleError(f"schedule={name!r}: choose one of {', '.join(SCHEDULES)}")
    for what, size in (("stages", stages), ("micro_batches", micro_batches), ("repeats", repeats)):
        if size < 1:
            raise ScheduleError(f"{what}={size}: must be 1 or more")
    if repeats > 1 and name not in ("gpipe", "interleaved"):
        raise ScheduleError(
            f"schedule={name} has repeats=1, got {repeats}; schedule=interleaved takes more, or gpipe"
        )
    if name == "interleaved" and repeats == 1:
        raise ScheduleError(
            "schedule=interleaved needs repeats=2 or more; with 1 it is schedule=1f1b"
        )
    if repeats > 1 and micro_batches % stages:
        raise ScheduleError(
            f"micro_batches={micro_batches}: with repeats={repeats} it must be a multiple of stages={stages}, since "
            "micro-batches pass the stages in groups of that many"
        )
