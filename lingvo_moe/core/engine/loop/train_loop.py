"""The training loop: restore or begin, step, summarise, save, and stop cleanly.

The loop owns no numbers: the state is the engine's, the batches are the input's, and everything that
a restart needs (state, the input's position) goes into one checkpoint.
"""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from lingvo_moe.core.console.command import say
from lingvo_moe.core.console.interrupt import StopRequest, TimeLimit
from lingvo_moe.core.console.waiting import Waiting
from lingvo_moe.core.engine.base import Compiled
from lingvo_moe.core.engine.checkpoints.initial_weights import InitialWeights
from lingvo_moe.core.engine.checkpoints.packed_tensors import PackedLayout
from lingvo_moe.core.engine.loop.budget import Budget, part_of_run
from lingvo_moe.core.engine.loop.held_out_watch import HeldOutWatch
from lingvo_moe.core.engine.loop.prefetch import Prefetched
from lingvo_moe.core.engine.loop.profiling import StepProfile
from lingvo_moe.core.engine.loop.progress import Nowhere, Speed, StepProgress, StepWork
from lingvo_moe.core.engine.loop.skipped_steps import SkippedSteps
from lingvo_moe.core.engine.loop.steps import batch_specs, initial_state, train_step
from lingvo_moe.core.engine.loop.summaries import Summaries
from lingvo_moe.core.engine.loop.trained import Trained
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.input.base_input import BatchIterator
from lingvo_moe.core.job.pace import PACE
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.pipeline.blocks import describe_padding
from lingvo_moe.core.pipeline.params import settings_of
from lingvo_moe.core.runs.time_record import EVALUATION, INPUT, RESTORE, SAVE, STARTUP, STEP
from lingvo_moe.core.state.offload import items_of


class TrainLoop:
    """Trains one task on one engine.

    Args:
        initial: weights to begin with, instead of initial values; a run that goes on has no use for them.
        peak: floating-point operations that the engine's devices do in a second at most; None: not known.
        watch: evaluates on held-out data; None: never.
        time_limit: stops the loop on time; None: never.

    Attributes:
        compiled: the training step; None before it is compiled.
    """

    def __init__(
        self,
        trained: Trained,
        summaries: Summaries,
        initial: InitialWeights | None = None,
        peak: float | None = None,
        watch: HeldOutWatch | None = None,
        time_limit: TimeLimit | None = None,
    ):
        task = self._task = trained.task
        self._inputs, self._engine, self._train = trained.inputs, trained.engine, trained.train
        self._checkpointer, self._summaries = trained.checkpointer, summaries
        self._times = trained.times
        self._initial, self._watch = initial, watch
        self._profile = StepProfile(self._train.profile_steps, summaries.place, self._engine)
        most = self._train.max_skipped_steps
        self._skipped = SkippedSteps(self._engine, self._checkpointer, most)
        self._time_limit = time_limit or TimeLimit()
        self._budget = Budget(self._train, until=part_of_run(task.p, self._train))
        self._last_step: int | None = None  # as the state has it
        self.compiled: Compiled | None = None
        # Units of steps that the budget does not know of, arrays of the engine's.
        self._uncounted: list[Any] = []
        self._shown = 0.0  # units of the steps that progress has shown
        self._work = StepWork(task.Costs().StepFlops(self._inputs.BatchSpec()), peak)
        self._state_specs = task.StateSpecs()
        self._packing = PackedLayout.Of(self._state_specs, task.Unpacked().StateSpecs())

    def Run(self, on_compiled: Callable[[Compiled], None] | None = None) -> NestedMap:
        """Trains to `train.max_steps`, or until the budget, a signal, the time, the held-out loss or skipped steps end
        it.

        `on_compiled` is called with the compiled step before the first one.

        Returns:
            NestedMap(first_step, last_step, status, metrics): the exit status, 1 after too many skipped steps and
            128 + n after signal n, else 0; the last step's metrics, NumPy, or None if no step was left to do.

        Raises:
            CheckpointError: the run's checkpoints cannot be read. Nothing has been written then.
        """
        made = iter(self._inputs)
        made.rows = self._engine.OwnRows(batch_specs(self._task, self._inputs))
        batches = Prefetched(made)
        first = self._checkpointer.LatestStep()
        state: NestedMap
        with StopRequest() as stop, batches:
            if first is not None:
                with self._times.In(RESTORE):
                    state = self._restore(first, batches)
            if self._watch:
                self._watch.Begin(first)
            if first is not None:
                self._evaluate(first, state, batches)  # if it was killed before that was done
                if self._why_done(first):
                    return self._done(first)
            elif self._why_done(0):  # a run of no steps: its initial weights
                self._begin(batches)
                return self._done(0)
            # Before a new run is begun: what cannot be compiled leaves nothing behind.
            with self._times.In(STARTUP):
                step_fn = self._build_step(stop, on_compiled)
            if first is None:
                first, state = self._begin(batches)
            with Waiting("making the first batch"), self._times.In(INPUT):
                batches.Await()
            doing = "running the first step"
            if step_fn.first_call:
                doing += f", for which {step_fn.first_call}"
            self._profile.Begin(self._budget.end)
            # Of a job's processes the one that writes the summaries shows the steps.
            stream = Nowhere() if self._summaries.place is None else None
            progress = StepProgress(
                first, self._budget.end, self._task.UNIT, self._work, doing, stream
            )
            try:
                with self._times.In(STEP):
                    return self._steps(step_fn, state, first, batches, progress, stop)
            finally:
                progress.Close()
                self._profile.Close()
                with self._times.In(SAVE):
                    self._checkpointer.Wait()
                PACE.End()

    def _build_step(
        self, stop: StopRequest, on_compiled: Callable[[Compiled], None] | None
    ) -> Compiled:
        num = self._train.num_micro_batches
        parts_text = f" of {num} micro-batches (train.num_micro_batches)" if num > 1 else ""
        if (p := settings_of(self._task.p)) is not None:
            parts_text = f" of {p.micro_batches} micro-batches in {p.stages} stages, {p.schedule} (task.pipeline)"
            parts = self._task.PipelineParts()
            padding = describe_padding(parts.sizes, p.stages, p.repeats, p.splits) if parts else ""
            if padding:
                say(padding)
        if items_of(self._task.p.offload) and not self._engine.has_host_memory:
            say(
                f"train.offload={self._task.p.offload}: CPU devices have one memory, so it frees none here"
            )
        step = train_step(self._task, self._inputs, num)
        with self._Waiting(f"compiling the training step{parts_text}") as waiting, stop.AtOnce():
            step_fn = waiting.Watch(self._engine.BuildStep, step)
        if on_compiled is not None:
            on_compiled(step_fn)
        self.compiled = step_fn
        return step_fn

    def _restore(self, step: int, batches: BatchIterator) -> NestedMap:
        """The state to go on from; sets the input to where it stood."""
        state, extra = self._checkpointer.Restore(
            self._state_specs, self._engine, step, self._packing
        )
        self._go_on(step, extra, batches)
        say(f"resuming at step {step} from {self._checkpointer.directory}")
        return state

    def _begin(self, batches: BatchIterator) -> tuple[int, NestedMap]:
        """The first step and the state before it, saved at once, so that the run can be resumed."""
        specs, engine, first = self._state_specs, self._engine, 0
        with self._Waiting(f"initialising {len(specs.theta.Flatten())} variables") as waiting:
            state = initial_state(self._task, engine, self._task.p.seed)
            if self._initial is not None:
                state, extra = self._initial.Into(state, self._task, engine, self._packing)
                if self._initial.keeps_state:
                    first = self._initial.step
                    self._go_on(first, extra, batches)
                else:
                    copy = engine.Build(
                        self._task.WithCopies, [specs], donate=(0,), name="with_copies"
                    )
                    state = copy(state)
            waiting("saving the state before the first step")
            self._save(first, state, batches)
            self._checkpointer.Wait()
        return first, state

    def _go_on(self, step: int, extra: dict[str, Any], batches: BatchIterator) -> None:
        """Sets the input and the budget to where they stood when a checkpoint was saved with this `extra`."""
        batches.SetState(extra["input"])
        self._budget.Begin(step, extra.get("used", {}))
        self._shown = self._budget.units

    @contextlib.contextmanager
    def _Waiting(self, doing: str) -> Iterator[Waiting]:
        """Shows what is done inside the block, also by the engine."""
        with Waiting(doing) as waiting, self._engine.Showing(waiting):
            yield waiting

    def _why_done(self, step: int) -> str:
        """The reason that training is over after a step; '' if it goes on."""
        if self._watch and self._watch.why_stopped:
            return self._watch.why_stopped
        return self._budget.WhyDone(step)

    def _done(self, step: int) -> NestedMap:
        """Says why no step is left to do, waits for the checkpoints, and returns Run's result."""
        say(f"step {step}: {self._why_done(step)}")
        self._checkpointer.Wait()
        return NestedMap(first_step=step, last_step=step, status=0, metrics=None)

    def _evaluate(self, step: int, state: NestedMap, batches: BatchIterator) -> float:
        """Evaluates the state on held-out data if that is due, and saves a new best one; returns the seconds spent."""
        start = time.monotonic()
        watch = self._watch
        due = watch is not None and watch.Due(step, self._budget.end)
        if due:
            self._count(step)
        with self._budget.Paused(), self._times.In(EVALUATION):
            if due and watch and watch.Evaluate(step, state):
                self._save(step, state, batches)
        return time.monotonic() - start

    def _count(self, step: int) -> None:
        """Tells the budget of all steps up to this one, where it does not know of them."""
        if self._uncounted:
            units = sum(float(n) for n in self._engine.Get(self._uncounted))
            self._uncounted = []
            self._budget.Count(step, units)

    def _save(self, step: int, state: NestedMap, batches: BatchIterator) -> None:
        extra = {"input": batches.GetState(), "used": self._budget.GetState()}
        with self._times.In(SAVE):
            self._checkpointer.Save(step, state, extra, self._packing)
            self._times.Saved(step)

    def _steps(
        self,
        step_fn: Compiled,
        state: NestedMap,
        first: int,
        batches: Prefetched,
        progress: StepProgress,
        stop: StopRequest,
    ) -> NestedMap:
        train, budget, skipped = self._train, self._budget, self._skipped
        skipped.Begin(first, state.skipped)
        metrics: NestedMap | None = None
        step, batches.waited = first, 0.0
        stopped = to_save = False
        while not self._why_done(step) and not (stopped := self._stops(stop, step, batches)):
            self._set_last_step(state)
            with self._profile.Step(step + 1):
                state, device_metrics = step_fn(state, next(batches))
            step += 1
            self._uncounted.append(device_metrics[self._task.UNIT])
            if self._profile.EndsAt(step):
                self._engine.Get(self._uncounted[-1:])
                progress.Exclude(self._profile.Close())
            skipped.Add(device_metrics.skipped)
            if step % train.summary_interval_steps == 0 or step in (first + 1, budget.end):
                metrics = self._show(step, device_metrics, progress, batches.waited)
                batches.waited = 0.0
            self._times.Step(step)
            to_save = to_save or step % train.save_interval_steps == 0
            if to_save:
                skipped.Read()
                self._count(step)
            if skipped.too_many:
                break
            if (to_save and not skipped.in_row) or step == budget.end:
                self._save(step, state, batches)
                to_save = False
            progress.Exclude(self._evaluate(step, state, batches))
        signalled = stopped and self._engine.AnyProcess(stop.requested)
        skipped.Read()
        if (stopped or step < budget.end) and not skipped.too_many:
            self._count(step)
            self._save(step, state, batches)
            with self._times.In(SAVE):
                self._checkpointer.Wait()
        self._say_end(step, stopped, signalled)
        status = 128 + (stop.signal or signal.SIGTERM) if signalled else 0
        return NestedMap(
            first_step=first,
            last_step=step,
            status=1 if skipped.too_many else status,
            metrics=metrics,
        )

    def _show(
        self, step: int, device_metrics: NestedMap, progress: StepProgress, waited: float
    ) -> NestedMap:
        """Shows and writes the metrics of a step, and returns them, NumPy, with the speed.

        `waited`: seconds since the last call; those of the process that waited longest are shown.
        """
        metrics = self._engine.Get(device_metrics)
        self._skipped.Read()
        self._count(step)
        progress.last = self._budget.end
        counted = self._budget.units
        speed = progress.Update(
            step,
            float(metrics.loss),
            counted - self._shown,
            self._skipped.total,
            self._task.Metrics().ProgressNote(metrics),
            self._engine.Most(waited),
        )
        self._shown = counted
        metrics.update(_speeds(self._task.UNIT, speed))
        self._summaries.Write(step, metrics, self._task.Metrics().Layers())
        return metrics

    def _set_last_step(self, state: NestedMap) -> None:
        """Puts the step at which the run ends into a state that has a place for it, where that is not known there."""
        if "last_step" in state and self._last_step != self._budget.last:
            self._last_step = self._budget.last
            scalar = [TensorSpec((), "int32")]
            state.last_step = self._engine.Put([np.int32(self._last_step)], scalar)[0]

    def _say_end(self, step: int, stopped: bool, signalled: bool) -> None:
        """Says why training ended at a step, where that is not the last one, and how many steps were skipped."""
        skipped = self._skipped
        if skipped.too_many:
            say(f"error: {skipped.Why()}")
        elif stopped:
            why = "" if signalled else f"--max_minutes={self._time_limit.minutes:g} is over: "
            say(f"{why}stopped and saved at step {step}; the same command goes on from there")
        elif step < self._train.max_steps:
            say(f"step {step}: {self._why_done(step)}")
        if skipped.total:
            say(f"{skipped.total} of the {step} steps of the run were not finite, and were skipped")

    def _stops(self, stop: StopRequest, step: int, batches: Prefetched) -> bool:
        """Whether to stop before the next step.

        The batch of that step is there then, so that a process whose input stalls is seen not to begin it.
        """
        if not batches.ready:  # what the devices still have to compute is not waiting for input
            self._engine.Get(self._uncounted[-1:])
        with self._times.In(INPUT):
            batches.Await()
        return not PACE.Begin(step, stop.requested or self._time_limit.over)


def _speeds(unit: str, speed: Speed) -> NestedMap:
    """A speed as metrics, those that are known."""
    values = {
        f"{unit}_per_second": speed.units,
        "model_flops_per_second": speed.flops,
        "utilisation": speed.utilisation,
        "input_wait": speed.input_wait,
    }
    return NestedMap({k: np.float32(v) for k, v in values.items() if v is not None})
