"""The one entry point for jobs: flags -> registry -> engine."""

import argparse
import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lingvo_moe.core import registry
from lingvo_moe.core.class_names import TRUST_RUN_HELP
from lingvo_moe.core.command import run as run_command
from lingvo_moe.core.command import say
from lingvo_moe.core.engine.base import ENGINES, ONE_DEVICE_ENGINES
from lingvo_moe.core.hyperparams import Params
from lingvo_moe.core.partitioner import known_faults
from lingvo_moe.core.quiet import quiet
from lingvo_moe.core.run_lock import RunLock
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.suggest import did_you_mean
from lingvo_moe.tasks.mt.runs.run_dir import RunDir
from lingvo_moe.trainer_checks import (
    UsageError,
    check_began_from,
    check_divisible,
    check_flags,
    check_numbers,
    check_sizes,
    check_tasks,
    has_begun,
    prepare_run_dir,
)

_ABOUT = """Trains an experiment, goes on with a run, or shows what an experiment is.

    python -m lingvo_moe.trainer --model=mt.M4Demo --data_dir=DATA --logdir=RUN --engine=tf_graph
    python -m lingvo_moe.trainer --model=mt.M4Demo --data_dir=DATA --logdir=RUN --num_devices=8
    python -m lingvo_moe.trainer --model=mt.M4MoE2048E36L --mode=inspect_model

The first is the fastest on a CPU, the second shows a CPU as eight devices. Ctrl-C saves; the same command goes on. DATA
is what tools.prepare makes, docs/experiments.md lists the experiments, and docs/guide.md leads from data to a server.
"""
MODES = ("sync", "inspect_model", "inspect_params")


def make_parser() -> argparse.ArgumentParser:
    """The flags, with help that suffices."""
    parser = argparse.ArgumentParser(
        prog="python -m lingvo_moe.trainer",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", default="", help="experiment, e.g. mt.M4Demo or mt.M4MoE2048E36L")
    add(
        "--mode",
        default="sync",
        help=f"one of {', '.join(MODES)}: train (and resume), or print (%(default)s)",
    )
    add("--logdir", default="", help="directory of the run: checkpoints, summaries, vocabularies")
    add(
        "--data_dir",
        default="",
        help="what tools.prepare made, or <lang>.tsv[.gz] files; see docs/data.md",
    )
    add("--engine", default="pjrt", help=f"one of {', '.join(ENGINES)} (%(default)s)")
    add(
        "--num_devices",
        type=int,
        default=0,
        help="virtual CPU devices, of each process where there are several; 0: all there are (%(default)s)",
    )
    add("--mesh", default="", help="axis:size,...; default: train.mesh, over all devices")
    add("--max_steps", type=int, default=None, help="shorthand for train.max_steps")
    add(
        "--model_params_override",
        default="",
        help="path=value;path=value, e.g. task.num_experts=16; --mode=inspect_params prints all paths",
    )
    add(
        "--restart",
        action="store_true",
        help="begin at step 0 although --logdir holds a run, which is moved aside",
    )
    add(
        "--init_from",
        default="",
        metavar="RUN",
        help="begin with the weights of another run's newest checkpoint: rows of embeddings go by their pieces, "
        "what is new, and the optimiser, begins anew; vocabularies may be others, sizes of layers not",
    )
    add("--init_from_step", type=int, default=None, help="another checkpoint of that run")
    add("--trust_run", action="store_true", help=f"with --init_from: {TRUST_RUN_HELP}")
    add("--known_faults", default=known_faults.ERROR, help=known_faults.FLAG_HELP)
    add("--coordinator_address", default="", help="host:port of process 0, for several processes")
    add("--num_processes", type=int, default=1, help="processes of this job (%(default)s)")
    add("--process_id", type=int, default=0, help="this process, from 0")
    return parser


def parse_flags(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags' values. Ends the process with status 2 for flags that do not exist."""
    parser = make_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        known = [flag for action in parser._actions for flag in action.option_strings]
        hints = [
            f"{flag}{did_you_mean(flag, known)}" if flag.startswith("--") else flag
            for flag in (text.split("=")[0] for text in unknown)
        ]
        parser.error(f"unknown: {', '.join(hints)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one job; returns the exit status: 0 done, 2 a mistake in flags or data, 128 + n stopped by signal n.

    Where this process is one of several and fails, it does not return: it ends, and the others with it.
    """
    args = parse_flags(argv)
    try:
        return run(args)
    except (ValueError, OSError) as e:
        say(f"error: {e}")
        status = 2
    except KeyboardInterrupt:
        say("interrupted; the same command goes on from the last checkpoint")
        status = 130
    except Exception:
        if args.num_processes == 1:
            raise
        traceback.print_exc()
        status = 1
    if args.num_processes > 1:
        from lingvo_moe.core.engine import job

        job.leave(status)
    return status


def run(args: argparse.Namespace) -> int:
    """As main, without turning errors into messages."""
    if not args.model:
        raise UsageError("--model is needed: an experiment, e.g. --model=mt.M4Demo")
    check_numbers(args)
    known_faults.check_action(args.known_faults, "--known_faults")
    for flag, known in (("mode", MODES), ("engine", ENGINES)):
        value = getattr(args, flag)
        if value not in known:
            raise UsageError(f"--{flag}={value}: no such {flag}{did_you_mean(value, known)}")
    override = full_override(args)
    import_tensorflow(args.engine)
    params = registry.GetParams(args.model, override)
    if args.mode == "inspect_params":
        print(params.ToText(), end="")
        return 0
    if args.mode == "inspect_model":
        from lingvo_moe.core import inspect

        task = params.task.Instantiate()
        mesh = make_mesh(params, args.mesh, args.num_devices)
        check_divisible(params, task, mesh)
        inspect.print_variables(task.VariableSpecs().Flatten(), mesh)
        return 0
    check_flags(args, params)
    return train(args, params, override)


def import_tensorflow(engine: str) -> None:
    """Imports TensorFlow without its lines about the CPU and about GPUs that are not there."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if "tensorflow" in sys.modules:
        return
    with quiet():
        import tensorflow as tf

        # Where programs run through PJRT, TensorFlow only traces: no GPU memory for it.
        if tf.config.list_physical_devices("GPU") and engine == "pjrt":
            tf.config.set_visible_devices([], "GPU")


def find_devices() -> None:
    """Lets JAX look for devices; without complaints about TPUs, unless the machine has some."""
    from lingvo_moe.core.engine import devices

    has_tpu = bool([*Path("/dev").glob("accel*"), *Path("/dev").glob("vfio/*")])
    with contextlib.nullcontext() if has_tpu else quiet():
        devices.device_count()


def full_override(args: argparse.Namespace) -> str:
    """`--model_params_override` with the shorthand flags appended."""
    typed = args.model_params_override
    if typed.endswith("\\"):
        typed += " "  # or the semicolon that follows would be the value's own
    parts = [typed] if typed else []
    if args.max_steps is not None:
        parts.append(f"train.max_steps={args.max_steps}")
    if args.data_dir:
        parts.append(f"input.data_dir={registry.escape(os.path.abspath(args.data_dir))}")
    return ";".join(parts)


def train(args: argparse.Namespace, params: Params, override: str) -> int:
    """Mode sync: trains until the end, or until stopped; goes on where the run in --logdir stands."""
    # Imported here, since inspecting a model should not wait for them.
    from lingvo_moe.core.engine import devices, job

    if args.num_devices and args.engine == "pjrt":
        devices.request_cpu_devices(args.num_devices)
    devices.initialize_distributed(args.coordinator_address, args.num_processes, args.process_id)
    with job.watching():
        return train_in_job(args, params, override)


def train_in_job(args: argparse.Namespace, params: Params, override: str) -> int:
    """As train, once the processes of the job have found each other."""
    from lingvo_moe.core.engine import devices, job
    from lingvo_moe.core.engine.base import make_engine
    from lingvo_moe.core.engine.checkpoints import Checkpointer
    from lingvo_moe.core.engine.compiled_cache import enable_compilation_cache
    from lingvo_moe.core.engine.summaries import Summaries
    from lingvo_moe.core.engine.train_loop import TrainLoop
    from lingvo_moe.tasks.mt.runs import init_from
    from lingvo_moe.trainer_memory import check_memory

    find_devices()
    enable_compilation_cache()  # before anything is compiled
    first_process = args.process_id == 0
    there_are = 1 if args.engine in ONE_DEVICE_ENGINES else devices.device_count()
    mesh = make_mesh(params, args.mesh, there_are)
    engine = make_engine(args.engine, mesh, args.known_faults)
    task = params.task.Instantiate()
    inputs = params.input.Instantiate()
    check_divisible(params, task, mesh)
    check_sizes(params)
    on_cpu = devices.runs_on_cpu(args.engine)
    check_memory(params, task, inputs, mesh, args.num_processes, holds_state=on_cpu)

    run_dir = RunDir(args.logdir)
    # Held until the last checkpoint is complete.
    with RunLock(args.logdir) as lock:
        share_run(
            lock,
            begin=lambda: prepare(args, params, override, run_dir, task, inputs, lock),
            follow=lambda: inputs.Prepare(vocabs=run_dir.vocabs, tasks=run_dir.languages),
        )
        initial = job.together(lambda: initial_weights(run_dir, params, inputs, args.trust_run))
        started = time.monotonic()
        with (
            Checkpointer(str(run_dir.checkpoint_dir), keep=params.train.save_max_to_keep) as saved,
            Summaries(str(run_dir.summaries_dir), enabled=first_process) as summaries,
            job.announcing(),
        ):
            summaries.Text("params", params.ToText())
            if run_dir.began_from:
                summaries.Text("began_from", init_from.describe(run_dir.began_from))
            loop = TrainLoop(task, inputs, engine, saved, summaries, params.train, initial)
            result = loop.Run(
                on_compiled=lambda step: (
                    report_program(step, args.logdir, started) if first_process else None
                )
            )
    return 128 + result.signal if result.signal else 0


def share_run(lock: RunLock, begin: Callable[[], None], follow: Callable[[], None]) -> None:
    """Locks the run's directory on all processes of the job; process 0 makes it ready in between.

    Args:
        lock: of --logdir.
        begin: what process 0 does, with the lock held, before the others look at the directory.
        follow: what each of the others does then.

    Raises:
        Exception: whatever failed on this process.
        JobError: another process cannot begin; all of them end.
    """
    from lingvo_moe.core.engine import devices, job

    def lock_and_begin() -> None:
        lock.Acquire()
        begin()

    job.together(lock_and_begin, on=[0])
    processes = devices.process_count()
    if processes == 1:
        return
    token = devices.from_first_process(lock.token)

    def join_and_follow() -> None:
        lock.Join(token, devices.process_index())
        follow()

    job.together(join_and_follow, on=range(1, processes))


def prepare(
    args: argparse.Namespace,
    params: Any,
    override: str,
    run_dir: RunDir,
    task: Any,
    inputs: Any,
    lock: RunLock,
) -> None:
    """Makes the run's directory, which is locked, and its data ready, on the job's first process."""
    from lingvo_moe.core.engine.progress import LineProgress
    from lingvo_moe.tasks.mt.runs import init_from

    goes_on = has_begun(run_dir) and not args.restart
    if args.init_from and not goes_on:  # before a run is moved aside
        step = init_from.find_step(args.init_from, args.init_from_step)
        init_from.check_model(args.init_from, params.task, args.trust_run)
    prepare_run_dir(run_dir, args.model, override, lock, restart=args.restart)
    if goes_on:
        check_began_from(args, run_dir)
    with LineProgress() as progress:
        if goes_on:
            inputs.Prepare(progress, run_dir.vocabs, run_dir.languages)
        else:
            inputs.Prepare(progress)
    check_tasks(task, inputs)
    if goes_on:
        return
    about = None
    languages = list(inputs.languages)
    if args.init_from:
        other = args.init_from, step, params.task, inputs.vocabs, languages
        about = init_from.begin_from(*other, args.trust_run).about
        say(init_from.describe(about))
    vocabs = inputs.vocabs.Transform(lambda v: v.model_bytes)
    run_dir.Write(args.model, override, vocabs, languages, about)


def initial_weights(run_dir: RunDir, params: Any, inputs: Any, trust_run: bool) -> Any:
    """The InitialWeights of a run that is about to begin from another, on every process; else None."""
    from lingvo_moe.tasks.mt.runs import init_from

    about = run_dir.began_from
    if has_begun(run_dir) or not about:
        return None
    other = about["logdir"], about["step"], params.task, inputs.vocabs, list(inputs.languages)
    return init_from.begin_from(*other, trust_run).weights


def make_mesh(params: Any, text: str = "", num_devices: int = 0) -> Mesh:
    """`--mesh`, or the experiment's own, laid over so many devices; 0: over those that it was made for.

    Raises:
        ShardingError: a text that does not read as a mesh, or devices that it cannot be laid over.
    """
    if text:
        return Mesh.parse(text)
    mesh = Mesh.parse(params.train.mesh, "train.mesh")
    return mesh.over_devices(num_devices) if num_devices else mesh


def report_program(step: Any, logdir: str, started: float) -> None:
    """Says which collectives the compiled step holds, and describes it in LOGDIR/program.json."""
    from lingvo_moe.core.engine.collectives import count_collectives
    from lingvo_moe.core.engine.pjrt import CompiledProgram
    from lingvo_moe.tasks.mt.runs.run_description import ProgramAbout

    seconds = time.monotonic() - started
    if not isinstance(step, CompiledProgram):  # others have none, or none to show
        say(f"made the training step in {seconds:.0f} s")
        return
    counts = count_collectives(step.HloText())
    about: ProgramAbout = {
        "name": step.program.name,
        "mesh": str(step.program.mesh),
        "hash": step.program.hash,
        "collectives": counts,
    }
    RunDir(logdir).WriteProgram(about)
    told = ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "no collective"
    say(f"compiled the training step in {seconds:.0f} s: {told}")


if __name__ == "__main__":
    run_command(main)
