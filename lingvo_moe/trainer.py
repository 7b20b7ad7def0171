"""Trains an experiment, scores its checkpoints, or shows what it is: flags -> registry -> engine."""

import contextlib
import functools
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from lingvo_moe.analysis.search.strategies.strategy_file import AUTO
from lingvo_moe.core.config import registry
from lingvo_moe.core.console.command import flags_line, run as run_command, say
from lingvo_moe.core.console.flags import Flags, join_overrides
from lingvo_moe.core.console.interrupt import Stopped, TimeLimit
from lingvo_moe.core.console.mistakes import report
from lingvo_moe.core.console.quiet import quiet
from lingvo_moe.core.console.tensorflow_import import import_tensorflow
from lingvo_moe.core.engine.base import Compiled, Engine
from lingvo_moe.core.engine.engines import engine_class
from lingvo_moe.core.files.store import is_address
from lingvo_moe.core.input.input_errors import OtherDataError
from lingvo_moe.core.job.meeting import meet
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.runs.bucket_lock import BucketRunLock, TrainerLock, lock_of
from lingvo_moe.core.runs.run_dir import RunDir
from lingvo_moe.core.runs.run_lock import find_held_lock
from lingvo_moe.core.runs.time_record import OTHER, PREPARATION, TimeRecord
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.task.meshes import (
    check_divisible,
    check_state_is_sharded,
    largest_mesh,
    make_mesh,
)
from lingvo_moe.training.beginning import (
    Job,
    Run,
    report_program,
    undo_refused,
)
from lingvo_moe.training.checks import (
    UsageError,
    check_budget,
    check_data_dir,
    check_flags,
    full_override,
)
from lingvo_moe.training.chosen_type import warn_of_slow_type, with_chosen_type
from lingvo_moe.training.flags import parse_flags
from lingvo_moe.training.same_run import (
    check_not_to_grow,
    dense_logdir,
    evaluated_params,
    has_begun,
    override_without_unused,
    with_its_weights,
    with_model_of_source,
    with_overrides_of_run,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one job; returns the exit status.

    0: done; 1: too many steps in a row were skipped; 2: a mistake in flags, data or the user's code; 128 + n: stopped
    by signal n.

    If this process is one of several and fails, it does not return: it exits, and so do the others.
    """
    args = parse_flags(argv)
    try:
        job = described_by(args)
        work = {"inspect_params": print_params, "inspect_model": print_model, "eval": evaluate}
        return work.get(args.mode, train)(job)
    except Stopped as e:
        from lingvo_moe.core.job import ending

        say(f"{e}: stopped while it compiled, before any step; the same command begins there again")
        ending.leave(e.status)  # returns where there is no job
        ending.end(e.status)  # without the compiler, which goes on in its thread
    except KeyboardInterrupt:
        say("interrupted; the same command goes on from the last checkpoint")
        status = 130
    except Exception as e:
        status = 2
        if not report("error", e):
            if args.num_processes == 1:
                raise
            traceback.print_exc()
            status = 1
    if args.num_processes > 1:
        from lingvo_moe.core.job import ending

        ending.leave(status)
    return status


def described_by(args: Flags) -> Job:
    """Builds the experiment that the flags describe, once, and checks the flags with it."""
    limit, times = TimeLimit(args.max_minutes), begun_record(args)
    if args.num_processes > 1:  # now, so that the others learn of its end
        meet(args.coordinator_address, args.num_processes, args.process_id)
    load_tensorflow(args.engine)
    args = with_chosen_type(with_model_of_source(args), fastest_engine)
    defined = registry.AsDefined(args.model)
    if args.strategy == AUTO:
        from lingvo_moe.training.found_strategy import override_with_strategy

        override = override_with_strategy(args, defined)
    else:
        override = with_overrides_of_run(args, defined, full_override(args, defined))
    try:
        if args.mode == "eval" and args.logdir and not is_address(args.logdir):
            params = evaluated_params(args, defined, override)
        else:
            params = registry.WithOverrides(defined, override)
    except registry.RegistryError:
        check_data_dir(args, defined)  # if it is that flag, it is named
        raise
    engine = ""
    if args.mode in ("sync", "eval"):
        check_flags(args, params)
    if args.mode == "sync":
        engine = args.engine or fastest_engine(args)
        warn_of_slow_type(params.task.fprop_dtype or params.task.dtype, engine)
    return Job(args, defined, params, override, engine, limit, times)


def print_params(job: Job) -> int:
    """Mode `inspect_params`: prints all parameters with their help."""
    print(job.params.ToText(with_help=True), end="")
    return 0


def print_model(job: Job) -> int:
    """Mode `inspect_model`: prints the variables, their shardings, the optimizer and the FLOPs."""
    from lingvo_moe.core.task import inspect

    task = job.params.task.Instantiate()
    mesh = make_mesh(job.params, job.args.mesh, job.args.num_devices)
    check_divisible(job.params, task, mesh)
    inspect.print_variables(task.VariableSpecs().Flatten(), mesh)
    inspect.print_active(task)
    inspect.print_optimizer(task, mesh)
    inspect.print_flops(task, job.params.input.Instantiate().BatchSpec())
    return 0


def evaluate(job: Job) -> int:
    """Mode `eval`: scores the checkpoints of a run while its trainer writes them."""
    from lingvo_moe.core.engine import devices
    from lingvo_moe.core.job import ending
    from lingvo_moe.core.job.pace import PACE
    from lingvo_moe.core.job.watcher import watching
    from lingvo_moe.training.evaluating import evaluate_run

    args = job.args
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # accelerators are the trainer's
    if args.num_devices:
        devices.request_cpu_devices(args.num_devices)
    devices.initialize_distributed(args.coordinator_address, args.num_processes, args.process_id)
    devices.find_devices()
    ending.together(lambda: None)  # at a later meeting processes wait without an end
    with watching(0):
        PACE.Begin(0, asks=False)  # from now on the others miss this process if it is silent
        return evaluate_run(args, job.defined, job.override)


def begun_record(args: Flags) -> TimeRecord:
    """The record of this start's time; open where it goes on with a run, so that a start that is killed is seen."""
    times = TimeRecord()
    trains = args.mode == "sync" and args.process_id == 0 and not args.restart
    if not trains or not args.logdir or is_address(args.logdir):  # that is copied once it is locked
        return times
    run_dir = RunDir(args.logdir)
    if run_dir.exists and run_dir.time_file.is_file() and not find_held_lock(args.logdir):
        times.Open(run_dir.time_file)
    return times


def load_tensorflow(engine: str | None) -> None:
    """Imports TensorFlow and silences its messages about the CPU and missing GPUs."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import_tensorflow(pool=True)
    with quiet():
        import tensorflow as tf

        # Where programs run through PJRT, TensorFlow only traces: no GPU memory for it.
        if tf.config.list_physical_devices("GPU") and engine_class(engine or "pjrt").PJRT:
            tf.config.set_visible_devices([], "GPU")


def fastest_engine(args: Flags) -> str:
    """Returns the engine to use without --engine: tf_graph on one CPU device without --mesh, else pjrt."""
    if args.num_devices > 1 or args.mesh or args.num_processes > 1:
        return "pjrt"
    if args.num_devices == 1:  # of the CPU, whatever else there is
        return "tf_graph"
    from lingvo_moe.core.engine import devices

    devices.find_devices()
    alone = devices.device_count() == 1 and engine_class("pjrt").RunsOnCpu()
    return "tf_graph" if alone else "pjrt"


def train(job: Job) -> int:
    """Mode `sync`: trains to the last step or until stopped. Resumes the run in --logdir, if there is one.

    With --elastic the processes that are left of a job go on without those that were lost. Returns the exit status.
    """
    args = job.args
    check_budget(job.params.train, args.num_processes)
    # Imported here, since inspecting a model should not wait for them.
    from lingvo_moe.core.engine import devices
    from lingvo_moe.core.job import launchers, survivors
    from lingvo_moe.core.job.lost import LOST
    from lingvo_moe.core.job.watcher import LOSS_SECONDS, watching

    if note := launchers.allocation_note():
        say(note)
    if args.num_devices and engine_class(job.engine).PJRT:
        devices.request_cpu_devices(args.num_devices)
    status, place = 0, (args.coordinator_address, args.num_processes, args.process_id)
    while True:
        devices.initialize_distributed(*place, elastic=args.elastic)
        with watching(job.params.train.stall_seconds, args.elastic):
            try:
                for model in models_to_train(job):
                    if status := train_model(model):
                        break
                break
            except Exception as e:
                if not LOST.MayHaveCaused(e) or not (lost := LOST.Await(LOSS_SECONDS)):
                    raise
        # Out of the block of the exception, whose frames hold what is on the devices.
        largest = functools.partial(
            largest_mesh,
            job.params,
            job.override,
            job.args.mesh,
            devices_each=devices.local_device_count(),
        )
        place, mesh = survivors.go_on_without(lost, *place[1:], largest)
        names = "coordinator_address", "num_processes", "process_id"
        flags = job.args.With(**dict(zip(names, place)), mesh=str(mesh), restart=False)
        job = replace(job, args=flags, times=TimeRecord())
    if args.elastic:
        survivors.end_together()
    return status


def models_to_train(job: Job) -> Iterator[Job]:
    """The trainings of a job, one after another: that of the smaller model that it grows out of, and its own.

    The second one is asked for when the first has ended, and does not follow one that has not come to its end.
    """
    until, args = job.params.train.upcycle_at, job.args
    grown = args.init_from or (has_begun(RunDir(args.logdir)) and not args.restart)
    if not until and not grown:
        check_not_to_grow(args, job.params)
    if until and not grown:
        small = smaller_job(job)
        yield small
        if max(RunDir(small.args.logdir).steps) < until:
            return
        args = args.With(init_from=small.args.logdir, init_from_state=True)
        job = replace(job, args=args, times=TimeRecord())
    yield job


def smaller_job(job: Job) -> Job:
    """The training of the model that grows into that of a job, in a directory beside its own; see train.upcycle_at."""
    params = job.params.Copy()
    differ = params.task.cls.Growth(params.task).GrowsFrom()
    params.task.Set(**differ)
    override = override_without_unused(job.override, params)
    override = join_overrides(override, *(f"task.{name}={value}" for name, value in differ.items()))
    args = job.args.With(logdir=dense_logdir(job.args.logdir))
    params = registry.WithOverrides(job.defined, override)
    return replace(job, args=args, params=params, override=override)


def train_model(job: Job) -> int:
    """Trains one model, in a job whose processes are connected; returns the exit status."""
    run, engine = checked_run(job)
    with (
        lock_of(job.args.logdir) as lock,  # held until the last checkpoint is complete
        begun_in_directory(run, lock),
        loop_of(run, engine, lock) as train_steps,
    ):
        result = train_steps()
    run.times.End(result.last_step, result.status)
    if job.args.process_id == 0 and not result.status:
        say(f"written: {job.args.logdir}, up to step {result.last_step}")
        say(f"next: {run.task.NEXT.format(job.args.logdir)}")
    return int(result.status)


def checked_run(job: Job) -> tuple[Run, Engine]:
    """Makes the engine, the task and the input of a training, and checks that they go together.

    Nothing is written, and the run directory is not looked at.
    """
    from lingvo_moe.analysis.search.layouts import fastest_here, proposing
    from lingvo_moe.core.engine import devices, gpu_settings
    from lingvo_moe.core.engine.compiled_cache import enable_compilation_cache
    from lingvo_moe.core.engine.engines import make_engine
    from lingvo_moe.training.memory import Share, check_memory

    args, kind = job.args, engine_class(job.engine)
    devices.find_devices()
    enable_compilation_cache()  # before anything is compiled
    there_are = 1 if kind.ONE_DEVICE else devices.device_count()
    with proposing(args, there_are):
        if args.layout:
            override = fastest_here(args, job.override, there_are)
            laid_out = registry.WithOverrides(job.defined, override)
            job = replace(job, override=override, params=laid_out)
        params = job.params
        mesh = make_mesh(params, args.mesh, there_are)
        engine = make_engine(job.engine, mesh, args.known_faults)
        if args.dump_programs and args.process_id == 0:
            engine.DumpPrograms(args.dump_programs)
        task = params.task.Instantiate()
        inputs = params.input.Instantiate()
        check_divisible(params, task, mesh)
    check_state_is_sharded(job.override, task, mesh)
    task.CheckInput(params.task, params.input)
    on_cpu = kind.RunsOnCpu()
    if on_cpu and not args.num_devices and (unused := gpu_settings.unused_gpus()):
        say(unused)
    if args.verify:
        verify_step(job, mesh, on_cpu)
    check_memory(params, task, inputs, mesh, Share(args.num_processes, on_cpu))
    return Run(**vars(job), task=task, inputs=inputs, run_dir=RunDir(args.logdir)), engine


def verify_step(job: Job, mesh: Mesh, on_cpu: bool) -> None:
    """Compares a small copy of the training step over the mesh with one device; see verifying.py.

    Raises:
        VerifyError: names the first tensor that differs.
        UsageError: the mesh has one device, or the devices are not those of one CPU process. Other devices round
            differently.
    """
    from lingvo_moe.analysis.explain.verifying import verify_model

    if mesh.size == 1:
        raise UsageError(
            f"--verify: mesh {mesh} has one device, so there is nothing to compare; leave the flag out, or give "
            f"--num_devices or --mesh"
        )
    if not on_cpu or job.args.num_processes > 1:
        flags = flags_line(model=job.args.model, mesh=mesh, model_params_override=job.override)
        raise UsageError(
            f"--verify: needs one process on a CPU; run python -m tools.verify {flags} first"
        )
    compared = verify_model(job.args.model, mesh, job.override)
    say(f"verified over mesh {mesh}: {compared}")


@contextlib.contextmanager
def begun_in_directory(run: Run, lock: TrainerLock) -> Iterator[None]:
    """Locks the run directory with `lock`, which the caller releases, and describes the run there, with its data.

    What is refused before its first checkpoint leaves nothing of a new run behind.
    """
    from lingvo_moe.core.initializers import check_initial_values

    with contextlib.ExitStack() as stack:

        def begin() -> None:
            before = run.Prepare(lock)
            if before is not None:
                stack.push(functools.partial(undo_refused, run.run_dir, before))
                check_initial_values(run.task.VariableSpecs().Flatten())

        run.times.Switch(PREPARATION)
        try:
            share_run(lock, begin, run.Follow)
            yield
        except OtherDataError as e:
            remedy = with_its_weights(run.args.logdir, run.args.model, run.override, run.params)
            raise UsageError(f"{e}; {remedy}") from None


@contextlib.contextmanager
def loop_of(run: Run, engine: Engine, lock: TrainerLock) -> Iterator[Callable[[], NestedMap]]:
    """The training loop of a run whose directory is described and locked, with checkpoints, summaries, evaluations.

    Inside, the function runs the loop and returns what TrainLoop.Run does.
    """
    from lingvo_moe.core.engine.checkpoints import init_from
    from lingvo_moe.core.engine.checkpoints.checkpoints import Checkpointer
    from lingvo_moe.core.engine.loop.held_out_watch import HeldOutWatch, read_batches
    from lingvo_moe.core.engine.loop.summaries import Summaries
    from lingvo_moe.core.engine.loop.train_loop import TrainLoop
    from lingvo_moe.core.engine.loop.trained import Trained
    from lingvo_moe.core.job import ending
    from lingvo_moe.training.memory import peak_line
    from lingvo_moe.training.peak import job_peak

    run_dir, params, times = run.run_dir, run.params, run.times
    first_process = run.args.process_id == 0
    if first_process:
        times.Open(run_dir.time_file)
    initial = ending.together(run.InitialWeights)
    held_out = ending.together(lambda: read_batches(run.inputs, params.train))
    if first_process:
        say(run.MachineLine(engine.mesh))
    task = run.TaskInChosenForm(engine.mesh)
    started = time.monotonic()
    still_locked = lock.held if isinstance(lock, BucketRunLock) else None
    most = params.train.save_max_to_keep
    with (
        Checkpointer(run_dir.checkpoint_dir, most, lock=still_locked) as saved,
        Summaries(str(run_dir.summaries_dir), enabled=first_process) as summaries,
        contextlib.ExitStack() as stack,
        ending.announcing(),
    ):
        trained, watch = Trained(task, run.inputs, engine, params, saved, times), None
        if held_out:
            watch = HeldOutWatch(trained, held_out, run_dir, writes=first_process)
            stack.enter_context(watch)
        elif (evaluations := run_dir.evaluations) and evaluations.best:
            saved.rotation.best = evaluations.best.step  # of a run that is evaluated no more
        peak = job_peak(run.engine, engine.mesh.size, task.fprop_dtype.name)
        loop = TrainLoop(trained, summaries, initial, peak, watch, run.time_limit)

        def compiled(step: Compiled) -> None:
            summaries.Text("params", params.ToText())
            if run_dir.began_from:
                summaries.Text("began_from", init_from.describe(run_dir.began_from))
            if first_process:
                run_dir.WriteTrain(params)
                report_program(step, run_dir, started)

        yield functools.partial(loop.Run, on_compiled=compiled)
        if first_process and not loop.compiled:  # a run that had come to its end
            run_dir.WriteTrain(params)
        times.Switch(OTHER)
        if first_process and loop.compiled:
            say(peak_line(run.engine, engine.mesh, loop.compiled, task))


def share_run(lock: TrainerLock, begin: Callable[[], None], follow: Callable[[], object]) -> None:
    """Locks the run directory on process 0, prepares it there, then lets the other processes join the lock.

    `begin` is called on process 0 with the lock held, before the others look at the directory; `follow` afterwards on
    each other one.

    Raises:
        Exception: the error of `begin` or `follow` on this process.
        JobError: another process failed; all processes exit.
    """
    from lingvo_moe.core.engine import devices
    from lingvo_moe.core.job import ending

    # Apart, since at their first meeting CPU processes wait half a minute for each other, later without an end.
    ending.together(lock.Acquire, on=[0])
    ending.together(begin, on=[0])
    processes = devices.process_count()
    if processes == 1:
        return
    token = devices.from_first_process(lock.token.encode()).decode()

    def join_and_follow() -> None:
        lock.Join(token, devices.process_index())
        follow()

    ending.together(join_and_follow, on=range(1, processes))


if __name__ == "__main__":
    run_command(main)
