"""Ends all processes of a job when one of them fails.

JAX alone would leave the job hanging: the failed process waits in JAX's exit barrier for the others, and these
wait for it in a collective. So the failed process sets a key in JAX's coordination service, and does not enter
that barrier. The other processes read the key every second, print which process failed, and end too.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Container, Iterator
from typing import TypeVar

import jax
import numpy as np

# Private: JAX has no public way to the client of its coordination service.
from jax.experimental import multihost_utils

from lingvo_moe.core.console.command import say
from lingvo_moe.core.private.jax import job_state

_FAILED = "lingvo_moe/failed"  # the key; its value is the number of the process
_LEAVING = "lingvo_moe/leaving"  # a barrier
_INTERVAL = 1.0  # seconds between two looks at the key
_PATIENCE = 60.0  # seconds that a process has to end after a failure, e.g. to complete a checkpoint
_STATUS = 2  # of a process that ends because another one failed

_leaving = threading.Lock()
_T = TypeVar("_T")


class JobError(ValueError):
    """Another process of the job failed."""


def together(work: Callable[[], _T], on: Container[int] | None = None) -> _T | None:
    """Does work on some processes of the job. If it fails on one of them, no process continues.

    `on` are the numbers of the processes that do it; None: all.

    Returns:
        What `work` returned; None on the other processes.

    Raises:
        Exception: whatever `work` raised on this process.
        JobError: `work` failed on another process, and not on this one.
    """
    result, mistake = None, None
    if on is None or jax.process_index() in on:
        try:
            result = work()
        except Exception as e:
            mistake = e
    failed = [mistake is not None]
    if jax.process_count() > 1:
        failed = list(multihost_utils.process_allgather(np.array(failed[0])).reshape(-1))
    if mistake is not None:
        raise mistake
    if any(failed):
        raise JobError(
            f"process {failed.index(True)} of the job could not begin; its error says why"
        )
    return result


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """Inside the block, this process ends within seconds after another process of its job fails."""
    if job_state().client is None:
        yield
        return
    stop = threading.Event()
    watcher = threading.Thread(target=_watch, args=(stop,), name="job", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()


@contextlib.contextmanager
def announcing() -> Iterator[None]:
    """Reports an error inside the block to the job's other processes at once, before this process cleans up.

    Cleaning up may wait for the other processes. After a minute this process ends even so.
    """
    try:
        yield
    except BaseException:
        if job_state().client is not None:
            _announce()
            deadline = threading.Timer(_PATIENCE, _exit, [_STATUS])
            deadline.daemon = True
            deadline.start()
        raise


def leave(status: int) -> None:
    """Ends this process, which has failed, and the other processes of its job. Returns when it has joined no job."""
    client = job_state().client
    if client is None:
        return
    _leaving.acquire()  # for good: either the main thread or the watcher
    _announce()
    with contextlib.suppress(Exception):  # some process did not come in time, or is gone
        client.wait_at_barrier(_LEAVING, int(_PATIENCE * 1000))
    if job_state().process_id == 0:
        time.sleep(0.5)  # JAX aborts processes that it cuts off; the others leave first
    _exit(status)


def _announce() -> None:
    state = job_state()
    with contextlib.suppress(Exception):  # another process was first, or process 0 is gone
        state.client.key_value_set(_FAILED, str(state.process_id))


def _watch(stop: threading.Event) -> None:
    state = job_state()
    while not stop.wait(_INTERVAL):
        try:
            failed = state.client.key_value_try_get(_FAILED)
        except (jax.errors.JaxRuntimeError, ValueError):  # there is none
            continue
        if failed != str(state.process_id):
            say(f"error: process {failed} of the job failed; its error says why")
            leave(_STATUS)


def _exit(status: int) -> None:
    """Ends the process without JAX's barrier, which is registered with atexit."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(status)
