"""Devices: how many virtual ones a CPU shows, and how several processes become one job.

Both have to be said before JAX looks for devices the first time.
"""

import os
import re
import socket
import sys
import time

import jax
import numpy as np
from jax.experimental import multihost_utils

from lingvo_moe.core.engine.base import ONE_DEVICE_ENGINES, EngineError

_FLAG = "--xla_force_host_platform_device_count"


def request_cpu_devices(count: int) -> None:
    """Makes the CPU of this process show itself as `count` devices. Twice the same count is allowed.

    Raises:
        EngineError: not a positive number, or JAX has devices already and they are not as many.
    """
    if count < 1:
        raise EngineError(f"--num_devices={count}: at least one device is needed")
    # A count in XLA_FLAGS (tests/conftest.py sets one) gives way to the one that is asked for.
    flags = re.sub(rf"{_FLAG}=\d+\s*", "", os.environ.get("XLA_FLAGS", "")).strip()
    try:
        # Nor look for a TPU, at length and aloud.
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        have = len(jax.local_devices(backend="cpu"))
        if have != count:
            raise EngineError(
                f"--num_devices={count}: this process has already started with {have} CPU devices; "
                "ask before anything runs, in a fresh process"
            ) from None
        return
    os.environ["XLA_FLAGS"] = flags


def initialize_distributed(
    coordinator_address: str, num_processes: int, process_id: int, timeout_seconds: int = 300
) -> None:
    """Joins this process to a job of several; CPU devices then talk by Gloo.

    Args:
        coordinator_address: host:port of process 0, the same for all.
        num_processes: of the job; with 1 nothing is done.
        process_id: 0..num_processes-1, another one in each process.
        timeout_seconds: how long to wait for the others. Where some never come, JAX ends the
            process with a message.

    Raises:
        EngineError: numbers or an address that make no sense, or nobody answers there.
    """
    if num_processes < 1 or not 0 <= process_id < num_processes:
        raise EngineError(
            f"--process_id={process_id}, --num_processes={num_processes}: "
            "the processes of a job are numbered 0..num_processes-1"
        )
    if num_processes == 1:
        return
    host, colon, port = coordinator_address.rpartition(":")
    if not host or not colon or not port.isdigit():
        raise EngineError(
            f"--coordinator_address={coordinator_address!r}: expected host:port of process 0, "
            "e.g. '10.0.0.1:8476'"
        )
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    who = f"process {process_id} of {num_processes}"
    print(f"{who}: joining the job at {coordinator_address}", file=sys.stderr)
    # JAX ends the process, without an exception, when nobody answers; so knock first.
    if process_id and not _answers(host, int(port), timeout_seconds):
        raise EngineError(
            f"--coordinator_address={coordinator_address}: {who} could not join the job: nobody "
            f"answered there for {timeout_seconds} s; is process 0 running at that address?"
        )
    jax.distributed.initialize(
        coordinator_address, num_processes, process_id, initialization_timeout=timeout_seconds
    )


def _answers(host: str, port: int, timeout_seconds: float) -> bool:
    """Whether something accepts connections there before the time is over."""
    end = time.monotonic() + timeout_seconds
    while time.monotonic() < end:
        try:
            with socket.create_connection((host.strip("[]"), port), timeout=5):
                return True
        except OSError:
            time.sleep(0.2)
    return False


def device_count() -> int:
    """The devices of the whole job, of all its processes."""
    return len(jax.devices())


def runs_on_cpu(engine: str) -> bool:
    """Whether what an engine runs lies in this machine's own memory, and not in an accelerator's."""
    if engine == "pjrt":
        return jax.devices()[0].platform == "cpu"
    import tensorflow as tf

    found = any(tf.config.list_physical_devices(kind) for kind in ("GPU", "TPU"))
    return engine in ONE_DEVICE_ENGINES and not found


def process_count() -> int:
    """The processes of the job."""
    return jax.process_count()


def process_index() -> int:
    """The number of this process in the job, from 0."""
    return jax.process_index()


def sync_processes(name: str) -> None:
    """Waits until every process of the job has come to this point; alone, does nothing."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def from_first_process(text: str) -> str:
    """What process 0 of the job gives for `text`, as many ASCII characters on each process; alone, `text`."""
    if jax.process_count() == 1:
        return text
    codes = np.frombuffer(text.encode("ascii"), np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(codes)).tobytes().decode("ascii")
