"""Flags of commands that search or score over a mesh: the engine that they choose, and jobs of several processes."""

import contextlib
import json
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.job import launchers
from lingvo_moe.core.job.job_flags import define_devices_flags, define_job_flags

from . import _cli

if TYPE_CHECKING:  # they import JAX or TensorFlow
    from lingvo_moe.core.engine.base import Engine
    from lingvo_moe.tasks.text.decoding.leading import LedPrograms

NAMES = ("num_devices", "mesh", "coordinator_address", "num_processes", "process_id")
_leading: "list[LedPrograms]" = []  # what the others follow
_watching = contextlib.ExitStack()  # while this process is of a job: see core/job/watcher.py


class Followed(SystemExit):
    """The end of a process that followed the first one of its job; it has no output of its own."""


def define_flags(flags: Flags) -> None:
    """Defines --mesh, --num_devices and the flags of a job, which engine_of reads; after --logdir."""
    with flags.Section(
        "over several devices (docs/serving.md); without these, on this host's processor"
    ):
        define_devices_flags(flags)
        define_job_flags(flags)
    if "saved_model" in flags.Names():
        flags.OnlyWith(" ".join(NAMES), "an exported model runs on one host", logdir=True)


def is_asked_for(args: Flags) -> bool:
    """Whether the flags, or the launcher that started this process, ask for a mesh."""
    if "mesh" not in args.Names():
        return False
    return bool(args.mesh or args.num_devices or _place(args)[0] > 1)


def follows(args: Flags) -> bool:
    """Whether this process is to follow the first one of its job, which alone reads, writes and serves."""
    return is_asked_for(args) and _place(args)[1] > 0


def load_tensorflow(args: Flags) -> None:
    """Imports TensorFlow; the accelerators are left to the mesh, if the flags ask for one.

    From now on the other processes of a job learn at once if this one ends before it joins them.
    """
    if is_asked_for(args) and (place := _place(args))[0] > 1:
        from lingvo_moe.core.job.meeting import meet

        meet(args.coordinator_address, *place)
    if is_asked_for(args) and not args.num_devices:
        os.environ.setdefault("JAX_PLATFORMS", "")  # else commands use JAX on the CPU
    _cli.load_tensorflow()


def attempt(name: str, work: Callable[[], int], interrupted: str = "") -> int:
    """Runs the work of a command as _cli.attempt does; the other processes of its job end with it."""
    with _watching:
        try:
            status = _cli.attempt(name, work, interrupted)
        except Followed:
            status = 0
        if status and "jax" in sys.modules:
            from lingvo_moe.core.job import ending

            why = "another process of the job was interrupted" if status > 128 else ""
            ending.leave(status, why, wait=False)  # returns where there is no job
        while _leading:
            _leading.pop().End()
    return status


def refuse(args: Flags, why: str) -> None:
    """Raises ValueError where the flags ask for a mesh, and nothing runs over one."""
    if is_asked_for(args):
        raise ValueError(f"{why}, not over a mesh: leave --mesh and --num_devices out")


def engine_of(args: Flags) -> "Engine | None":
    """The engine over the mesh that the flags choose for --logdir; None: this host's own kernels.

    Joins the job of several processes, if this one is of one.

    Raises:
        EngineError, ShardingError: the devices do not fit the mesh, or the model does not.
        JobError: the processes do not come together.
    """
    if not is_asked_for(args):
        return None
    import tensorflow as tf

    from lingvo_moe.core.engine import devices
    from lingvo_moe.core.engine.engines import engine_for_inference
    from lingvo_moe.core.job import ending
    from lingvo_moe.core.job.watcher import watching
    from lingvo_moe.tasks.text.runs.run_dir import TextRunDir

    if tf.config.list_physical_devices("GPU"):
        tf.config.set_visible_devices([], "GPU")
    if args.num_devices:
        _cli.request_devices(args.num_devices)
    params = TextRunDir(args.logdir, trust_run=args.trust_run).Params()
    devices.initialize_distributed(args.coordinator_address, *_place(args))
    devices.find_devices()
    ending.together(lambda: _check_one_command(args))
    _watching.enter_context(watching(0))
    # A search has batches of its own, and each row is a group.
    params.train.num_micro_batches = 1
    count = devices.device_count()
    params.input.batch_size *= count
    if params.task.num_experts:
        params.task.num_groups = 0
    return engine_for_inference(params, args.mesh, count, args.quiet)[0]


def _check_one_command(args: Flags) -> None:
    """Raises JobError in a process that was given other flags than the first of its job; all call it."""
    from lingvo_moe.core.engine import devices

    mine = {name: str(value) for name, value in args.Values().items() if name != "process_id"}
    first = json.loads(devices.from_first_process(json.dumps(mine).encode()))
    others = [
        f"--{name}={value}, there {first[name]}"
        for name, value in mine.items()
        if value != first[name]
    ]
    if others:
        raise launchers.JobError(
            f"this process was given {', '.join(others)}; the processes of a job run one command, whose first process "
            "reads and writes; start commands of their own without the launcher"
        )


def lead(programs: "LedPrograms | None") -> None:
    """Lets the first process of a job lead the others, which follow it here until it ends.

    Raises Followed, in a process that followed.
    """
    from lingvo_moe.core.engine import devices
    from lingvo_moe.core.job.pace import PACE

    if programs is None or devices.process_count() == 1:
        return
    PACE.Begin(0, asks=False)  # the others count on this process
    if devices.process_index():
        programs.Follow()
        raise Followed(0)
    programs.leads = True
    _leading.append(programs)


def _place(args: Any) -> tuple[int, int]:
    names = ("coordinator_address", "num_processes", "process_id")
    return launchers.place(launchers.find(), *(getattr(args, name) for name in names))
