"""A trace of some training steps: `train.profile_steps`, for TensorBoard's profile page and for Perfetto."""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import tensorflow as tf

from lingvo_moe.core.config.checks import steps_of
from lingvo_moe.core.console.command import say
from lingvo_moe.core.console.quiet import quiet
from lingvo_moe.core.engine.base import Engine
from lingvo_moe.core.private.jax import export_trace

_TENSORFLOW = "tensorflow"  # where TensorFlow's profiler writes, beside what is kept


class StepProfile:
    """Records steps of a run, once: a run that is resumed before them does not record them again.

    Step n is the one after which progress says n. The trace of steps 10 to 15 is in `plugins/profile/steps_10-15` below
    the directory of the summaries, with an XSpace (`.xplane.pb`) and a Chrome trace (`.trace.json.gz`). One that was
    ended by a signal has the name of the steps that it holds.

    Args:
        steps: the value of `train.profile_steps`.
        directory: of the run's summaries; None on a process that writes none, where nothing is recorded.
        engine: runs the steps: JAX's profiler records programs of PJRT, and TensorFlow's the others.
    """

    def __init__(self, steps: str, directory: Path | None, engine: Engine):
        self._text, self._steps = steps, steps_of(steps)
        self._directory = directory and directory / "plugins" / "profile"
        self._by_jax = engine.PJRT
        self._recorded: list[int] = []
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    def Begin(self, end: int) -> None:
        """Says so where a run that ends at a step does none of those asked for."""
        if self._directory is not None and self._steps and self._steps.start > end:
            say(f"train.profile_steps={self._text}: the run ends at step {end}, so it has no trace")

    def EndsAt(self, step: int) -> bool:
        """Whether a step is the last one that is recorded; its results should be there before Close is called."""
        return step == self._steps.stop - 1

    @contextlib.contextmanager
    def Step(self, step: int) -> Iterator[None]:
        """Records the step that is done in the block, if it is one of those asked for."""
        if self._directory is None or step not in self._steps:
            yield
            return
        if self._temporary is None:
            if self._Place(self._steps).is_dir():  # of an earlier start
                yield
                return
            self._Start()
        self._recorded.append(step)
        event = jax.profiler.StepTraceAnnotation if self._by_jax else tf.profiler.experimental.Trace
        with event("train", step_num=step):
            yield

    def Close(self) -> float:
        """Writes the trace, if one has begun; returns the seconds that this took."""
        start, temporary, self._temporary = time.monotonic(), self._temporary, None
        if temporary is None:
            return 0.0
        with temporary as made:
            with quiet():
                if self._by_jax:
                    jax.profiler.stop_trace()
                else:  # TensorFlow writes an XSpace alone
                    tf.profiler.experimental.stop()
                    (space,) = Path(made, _TENSORFLOW).rglob("*.xplane.pb")
                    export_trace(space.read_bytes(), made)
            (written,) = Path(made).glob("plugins/profile/*")
            place = self._Place(self._recorded)
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(written, place)
        say(f"the trace of steps {self._recorded[0]} to {self._recorded[-1]} is in {place}")
        return time.monotonic() - start

    def _Start(self) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="lingvo_moe_profile_")
        with quiet():
            if self._by_jax:
                options = jax.profiler.ProfileOptions()
                options.python_tracer_level = 0  # it would fill the trace with calls of Python
                jax.profiler.start_trace(self._temporary.name, profiler_options=options)
            else:
                tf.profiler.experimental.start(os.path.join(self._temporary.name, _TENSORFLOW))

    def _Place(self, steps: Sequence[int]) -> Path:
        assert self._directory is not None
        return self._directory / f"steps_{steps[0]}-{steps[-1]}"
