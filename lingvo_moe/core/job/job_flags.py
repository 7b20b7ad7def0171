"""The flags of commands that run over several devices, or as a job of several processes."""

from lingvo_moe.core.config import checks
from lingvo_moe.core.console.flags import Flags

# Starting takes JAX 2 s with 4096 virtual devices, and 10 s with 10,000; most jobs have 8.
MOST_DEVICES = 4096


def define_devices_flags(flags: Flags) -> None:
    """Defines --num_devices and --mesh, for a command that runs over a mesh."""
    flags.DEFINE_integer(
        "num_devices",
        0,
        "virtual CPU devices of each process; 0: all devices that exist",
        checks.Integer(0, MOST_DEVICES),
    )
    flags.DEFINE_string("mesh", "", "axis:size,... (default: train.mesh, over all devices)")


def define_job_flags(flags: Flags) -> None:
    """Defines --coordinator_address, --num_processes and --process_id, which launchers.place reads."""
    flags.DEFINE_string(
        "coordinator_address",
        "",
        "host:port of process 0, for a job of several processes (default: the launcher's)",
    )
    flags.DEFINE_integer(
        "num_processes",
        None,
        "processes of this job (default: the launcher's, else 1)",
        checks.SIZE,
    )
    flags.DEFINE_integer(
        "process_id",
        None,
        "the number of this process, from 0 (default: the launcher's)",
        checks.COUNT,
    )
