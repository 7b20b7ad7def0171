"""Sets the number of virtual CPU devices, and joins several processes into one job.

Both must happen before JAX initialises its devices.
"""

import contextlib
import os
import re
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from lingvo_moe.core.console.quiet import quiet
from lingvo_moe.core.console.sigterm import keeping_sigterm
from lingvo_moe.core.engine import gpu_settings
from lingvo_moe.core.engine.base import EngineError
from lingvo_moe.core.job import launchers
from lingvo_moe.core.job.launchers import JobError
from lingvo_moe.core.job.meeting import meet

# After which JAX ends a job of which a process is silent; its default is 100. Each sends one in half the time.
HEARTBEAT_SECONDS = 27

_FLAG = "--xla_force_host_platform_device_count"


def find_devices() -> None:
    """Lets JAX look for devices. Silences its warnings about TPUs unless the machine has some."""
    gpu_settings.prepare()
    has_tpu = bool([*Path("/dev").glob("accel*"), *Path("/dev").glob("vfio/*")])
    with contextlib.nullcontext() if has_tpu else quiet(), keeping_sigterm():
        device_count()


def has_fused_kernels(device: Any) -> bool:
    """Whether a JAX device has the kernels of kernels/pallas/, as TPUs have from v4 on.

    The compiler of these kernels multiplies no bfloat16 on the cores before.
    """
    kind = device.device_kind
    return kind.startswith("TPU") and not kind.startswith(("TPU v2", "TPU v3"))


def request_cpu_devices(count: int) -> None:
    """Presents the CPU of this process as `count` devices. Calling it again with the same count is allowed.

    Raises EngineError: not a positive number, or JAX already has another number of devices.
    """
    if count < 1:
        raise EngineError(
            f"--num_devices={count}, or request_cpu_devices({count}): at least one device is needed"
        )
    # A count in XLA_FLAGS (tests/conftest.py sets one) gives way to the one that is asked for.
    flags = re.sub(rf"{_FLAG}=\d+\s*", "", os.environ.get("XLA_FLAGS", "")).strip()
    try:
        # Do not search for a TPU either, which takes long and logs much.
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        have = len(jax.local_devices(backend="cpu"))
        if have != count:
            raise EngineError(
                f"--num_devices={count}, or request_cpu_devices({count}): this process has already started with "
                f"{have} CPU devices; ask before anything runs, in a fresh process"
            ) from None
        return
    os.environ["XLA_FLAGS"] = flags


def initialize_distributed(
    coordinator_address: str,
    num_processes: int,
    process_id: int,
    timeout_seconds: int = 300,
    elastic: bool = False,
) -> None:
    """Joins this process to a job of several; CPU devices then communicate by Gloo.

    Args:
        coordinator_address: host:port of process 0, the same for all; '' to take it from the launcher.
        process_id: 0..num_processes-1, different in each process.
        timeout_seconds: how long to wait for the others to come.
        elastic: whether the others stay when one is gone.

    Raises:
        JobError: invalid numbers or address, another process does not come or has ended, the address is not given and
            the launcher's is not known, or JAX finds another number of processes.
    """
    if num_processes < 1 or not 0 <= process_id < num_processes:
        raise JobError(
            f"--process_id={process_id}, --num_processes={num_processes}: "
            "the processes of a job are numbered 0..num_processes-1"
        )
    if num_processes == 1:
        jax.config.update("jax_cpu_collectives_implementation", None)
        return
    launch, meeting = launchers.find(), meet(coordinator_address, num_processes, process_id)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_recoverability", elastic)
    jax.config.update("jax_enable_preemption_service", False)  # it would swallow SIGTERM
    who = f"process {process_id} of {num_processes}"
    started_by = f" ({launch.launcher})" if launch is not None else ""
    print(f"{who}: joining the job at {meeting.address}{started_by}", file=sys.stderr)
    meeting.Join(timeout_seconds)
    jax.distributed.initialize(
        meeting.address,
        num_processes,
        process_id,
        launchers.local_gpus(launch, os.environ, gpu_settings.count_gpus()),
        cluster_detection_method="deactivate",  # launchers does that
        initialization_timeout=timeout_seconds,
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
    )
    find_devices()
    # A job of several that trains as several jobs would be a silent fault.
    if process_count() != num_processes:
        raise JobError(
            f"{who}: JAX has found {process_count()} processes on {jax.devices()[0].platform}; the processes that "
            "share accelerators have to be started as one job"
        )


def local_device_count() -> int:
    """The devices of this process."""
    return jax.local_device_count()


def device_count() -> int:
    """The devices of all processes of the job."""
    return len(jax.devices())


def process_count() -> int:
    """The number of processes of the job."""
    return jax.process_count()


def process_index() -> int:
    """The number of this process in the job, from 0."""
    return jax.process_index()


def from_first_process(message: bytes) -> bytes:
    """Returns process 0's message, of any length, on every process; all of them call it."""
    length = int(broadcast(np.array(len(message), np.int32)))
    if not length:
        return b""
    mine = np.frombuffer(message, np.uint8) if process_index() == 0 else np.zeros(length, np.uint8)
    return broadcast(mine).tobytes()


def broadcast(values: np.ndarray) -> np.ndarray:
    """Returns process 0's array on every process; all have its shape and type."""
    if jax.process_count() == 1:
        return values
    return np.asarray(multihost_utils.broadcast_one_to_all(values))
