"""Flags of commands that search or score over a mesh: the engine that they choose, and jobs of several processes."""

import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lingvo_moe.core.console.command import say
from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.job import launchers
from lingvo_moe.core.job.job_flags import define_devices_flags, define_job_flags

from . import _cli

if TYPE_CHECKING:  # they import JAX or TensorFlow
    from lingvo_moe.core.engine.base import Engine
    from lingvo_moe.tasks.text.decoding.leading import LedPrograms

NAMES = ("num_devices", "mesh", "coordinator_address", "num_processes", "process_id")
_leading: "list[LedPrograms]" = []  # what the others follow


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


def load_tensorflow(args: Flags) -> None:
    """Imports TensorFlow; the accelerators are left to the mesh, if the flags ask for one."""
    if is_asked_for(args) and not args.num_devices:
        os.environ.setdefault("JAX_PLATFORMS", "")  # else commands use JAX on the CPU
    _cli.load_tensorflow()


def attempt(name: str, work: Callable[[], int], interrupted: str = "") -> int:
    """Runs the work of a command as _cli.attempt does; the other processes of its job end with it."""
    try:
        status = _cli.attempt(name, work, interrupted)
    except Followed:
        return 0
    if _leading and status:
        from lingvo_moe.core.job import ending

        ending.leave(status, wait=False)
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
    from lingvo_moe.core.engine.compiled_cache import enable_compilation_cache
    from lingvo_moe.core.engine.engines import make_engine
    from lingvo_moe.core.task.meshes import check_divisible, make_mesh
    from lingvo_moe.tasks.text.runs.run_dir import TextRunDir

    if tf.config.list_physical_devices("GPU"):
        tf.config.set_visible_devices([], "GPU")
    if args.num_devices:
        _cli.request_devices(args.num_devices)
    devices.initialize_distributed(args.coordinator_address, *_place(args))
    devices.find_devices()
    enable_compilation_cache()
    params = TextRunDir(args.logdir, trust_run=args.trust_run).Params()
    mesh = make_mesh(params, args.mesh, 0 if args.mesh else devices.device_count())
    params.input.batch_size *= mesh.size  # a search has batches of its own, and each row is a group
    params.train.num_micro_batches = 1
    if params.task.num_experts:
        params.task.num_groups = 0
    check_divisible(params, params.task.Instantiate(), mesh)
    engine = make_engine("pjrt", mesh)
    _check_one_command(args, engine)
    if not (args.quiet or devices.process_index()):
        engine.doing = lambda doing: say(f"{doing} ...")
    return engine


def _check_one_command(args: Flags, engine: "Engine") -> None:
    """Raises JobError on all processes of a job where one was given other flags than the first."""
    from lingvo_moe.tasks.text.decoding.leading import said_by_first

    mine = {name: str(value) for name, value in args.Values().items() if name != "process_id"}
    first = json.loads(said_by_first(json.dumps(mine).encode()))
    others = [
        f"--{name}={value}, there {first[name]}"
        for name, value in mine.items()
        if value != first[name]
    ]
    if engine.AnyProcess(bool(others)):
        what = (
            f"this process was given {', '.join(others)}"
            if others
            else "another process was given other flags"
        )
        raise launchers.JobError(
            f"{what}; the processes of a job run one command, whose first process reads and writes; start commands of "
            "their own without the launcher"
        )


def lead(programs: "LedPrograms | None") -> None:
    """Lets the first process of a job lead the others, which follow it here until it ends.

    Raises Followed, in a process that followed.
    """
    from lingvo_moe.core.engine import devices

    if programs is None or devices.process_count() == 1:
        return
    if devices.process_index():
        programs.Follow()
        raise Followed(0)
    programs.leads = True
    _leading.append(programs)


def _place(args: Any) -> tuple[int, int]:
    names = ("coordinator_address", "num_processes", "process_id")
    return launchers.place(launchers.find(), *(getattr(args, name) for name in names))
