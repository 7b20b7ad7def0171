"""The training that the flags ask for, and how it begins: its directory, its data and its first weights."""

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.console.command import say
from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.console.interrupt import TimeLimit
from lingvo_moe.core.engine.engines import engine_class
from lingvo_moe.core.input.base_input import BaseInput
from lingvo_moe.core.runs.bucket_lock import TrainerLock
from lingvo_moe.core.runs.run_description import ProgramAbout
from lingvo_moe.core.runs.run_dir import RunDir
from lingvo_moe.core.runs.time_record import TimeRecord
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.training.checks import UsageError, check_data_exists
from lingvo_moe.training.same_run import (
    check_began_from,
    check_same_input,
    check_same_run,
    has_begun,
    prepare_run_dir,
    with_source,
)

if TYPE_CHECKING:  # they import TensorFlow and JAX
    from lingvo_moe.core.engine.base import Compiled
    from lingvo_moe.core.engine.checkpoints.init_from import Beginning
    from lingvo_moe.core.engine.checkpoints.initial_weights import InitialWeights
    from lingvo_moe.core.task.base_task import BaseTask


@dataclass(frozen=True)
class Job:
    """The training that the flags ask for."""

    args: Flags  # the flags
    defined: Params  # the experiment's parameters without overrides: see registry.AsDefined
    params: Params  # the experiment's parameters: `task`, `input` and `train`
    override: str  # the overrides applied to them, as text
    engine: str  # the name of the engine: --engine, or the fastest
    time_limit: TimeLimit  # --max_minutes, from the start of the command
    times: TimeRecord  # where the time goes, from the start of the command

    def MachineLine(self, mesh: Mesh) -> str:
        """The engine and the mesh of a run, as one line, with the reasons for those that no flag names."""
        engine, devices = f"--engine={self.engine}", f"mesh {mesh}"
        if self.args.engine is None:
            on_one = "on one CPU device without --mesh"
            elsewhere = "for several devices, GPUs, TPUs and with --mesh"
            engine += (
                f", the default {on_one if engine_class(self.engine).ONE_DEVICE else elsewhere}"
            )
        if not self.args.mesh and str(mesh) != self.params.train.mesh:
            devices += f" (train.mesh={self.params.train.mesh}, resized to the devices)"
        return f"{engine}; {devices}"


@dataclass(frozen=True)
class Run(Job):
    """The training of one process of a job, and its directory."""

    # `task`, `inputs`: instantiated from `params`.
    task: "BaseTask"
    inputs: BaseInput
    run_dir: RunDir  # the directory --logdir

    def Prepare(self, lock: TrainerLock) -> set[str] | None:
        """Prepares the run directory, which is locked, and the data. Called on the job's first process.

        Returns the names that were in the directory before it described a run there; None where there was a run.
        """
        from lingvo_moe.core.console.waiting import LineProgress
        from lingvo_moe.core.engine.checkpoints import init_from

        args, run_dir, inputs = self.args, self.run_dir, self.inputs
        check_data_exists(args, self.params)
        goes_on = has_begun(run_dir) and not args.restart
        args = with_source(args, run_dir)
        if args.init_from and not goes_on:  # before a run is moved aside
            step = init_from.find_step(args.init_from, args.init_from_step)
            init_from.check_model(args.init_from, self.params.task, args.trust_run)
            last = self.params.train.max_steps
            if args.init_from_state and step >= last:
                raise UsageError(
                    f"--init_from_state: the run would go on from step {step} of {args.init_from}, but ends at "
                    f"train.max_steps={last}; give --max_steps more than {step}"
                )
        prepare_run_dir(run_dir, args.model, self.override, self.params, lock, restart=args.restart)
        if goes_on:
            check_began_from(args, run_dir)
        with LineProgress() as progress:
            inputs.Prepare(progress, run_dir.artifacts if goes_on else None)
        if not goes_on:
            inputs.CheckNewRun()
        for warning in [*inputs.Warnings(), *self.task.Warnings(self.params.train.max_steps)]:
            say(f"warning: {warning}")
        self.task.CheckData(inputs)
        if goes_on:
            return None
        about, artifacts = None, inputs.Artifacts()
        if args.init_from:
            run_before = RunDir(args.init_from, "--init_from")
            artifacts = artifacts.WithWeightsOf(run_before.artifacts)
            if args.init_from_state:
                check_same_input(run_before, self.params)
            about = self._BeginFrom(args.init_from, step, args.init_from_state).about
            say(init_from.describe(about))
        before = None if run_dir.exists else {path.name for path in run_dir.path.glob("*")}
        run_dir.Write(args.model, self.override, artifacts, about, self.params)
        return before

    def Follow(self) -> None:
        """Prepares the data on a process that is not the first, which has described the run in its directory.

        Raises UsageError: this process would train with other parameters, e.g. since its user's home is another, whose
        key does not know the run that the first one remembers the overrides of.
        """
        check_same_run(self.run_dir, self.params, "give all processes of the job the same flags")
        self.inputs.Prepare(artifacts=self.run_dir.artifacts)

    def InitialWeights(self) -> "InitialWeights | None":
        """Returns the weights from --init_from for a run that has no checkpoint yet; else None.

        Called on every process.
        """
        about = self.run_dir.began_from
        if has_begun(self.run_dir) or not about:
            return None
        return self._BeginFrom(about["logdir"], about["step"], about.get("state", False)).weights

    def _BeginFrom(self, logdir: str, step: int, keep_state: bool) -> "Beginning":
        """See init_from.begin_from."""
        from lingvo_moe.core.engine.checkpoints.init_from import begin_from

        task, artifacts = self.params.task, self.inputs.Artifacts()
        return begin_from(logdir, step, task, artifacts, self.args.trust_run, keep_state)

    def TaskInChosenForm(self, mesh: Mesh) -> "BaseTask":
        """Returns the task in the form that is trained; prints which one if the parameters leave that open.

        See recomputing.py. Called on every process: all choose the same.
        """
        from lingvo_moe.analysis.plans.recomputing import chosen_form
        from lingvo_moe.core.engine.device_memory import memory_of

        memory = memory_of(self.engine, mesh, self.args.num_processes)
        form, line = chosen_form(self.params, mesh, memory, self.engine)
        if line and self.args.process_id == 0:
            say(line)
        return form.Instantiate()


def undo_refused(
    run_dir: RunDir, before: Collection[str], error: type[BaseException] | None, *_: object
) -> None:
    """Removes a run that an error ended before its step was compiled. An exit of a context.

    `before` is the result of prepare.
    """
    refused = error is not None and issubclass(error, Exception)
    compiled = any(run_dir.summaries_dir.glob("*.tfevents.*"))  # which are made then
    if refused and not has_begun(run_dir) and not compiled:
        try:
            run_dir.Undo(before)
        except (OSError, ValueError) as e:  # the error that ended the run matters more
            say(f"warning: {run_dir.path}: what was begun there stays: {e}")


def report_program(step: "Compiled", run_dir: RunDir, started: float) -> None:
    """Prints the collectives of the compiled step and writes the run's program.json."""
    from lingvo_moe.analysis.programs.hlo.collective_list import count_collectives

    seconds = time.monotonic() - started
    if step.program is None:
        say(f"made the training step in {seconds:.0f} s")
        return
    counts = count_collectives(step.HloText())
    about: ProgramAbout = {
        "name": step.program.name,
        "mesh": str(step.program.mesh),
        "hash": step.program.hash,
        "collectives": counts,
    }
    run_dir.WriteProgram(about)
    listed = ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "no collective"
    say(f"compiled the training step in {seconds:.0f} s: {listed}")
