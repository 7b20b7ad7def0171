"""Ends all processes of a job when one of them fails.

JAX alone would leave the job hanging: the failed process waits in JAX's exit barrier for the others, and these
wait for it in a collective. So the failed process sets a key in JAX's coordination service, and does not enter
that barrier. The other processes' watchers (watcher.py) read the key, print which process failed, and end too.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import NoReturn, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from lingvo_moe.core.job.launchers import JobError
from lingvo_moe.core.job.lost import LOST
from lingvo_moe.core.private.jax import job_state

TO_ALL = "lingvo_moe/to_all/"  # the directory of keys that all processes read
_FAILED = f"{TO_ALL}failed"  # the key of a Failure
_LEAVING = "lingvo_moe/leaving"  # a barrier
_PATIENCE = 60.0  # seconds that a process has to end after a failure, e.g. to complete a checkpoint
STATUS = 2  # of a process that ends because another one failed

_leaving = threading.Lock()
_T = TypeVar("_T")


@dataclass(frozen=True)
class Failure:
    """The reason for which the job is to end.

    Attributes:
        by: the number of the process that says so.
        line: for the users of the others.
        waits: whether all are expected to leave together.
    """

    by: int
    line: str
    waits: bool


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
def announcing() -> Iterator[None]:
    """Reports an error inside the block to the job's other processes at once, before this process cleans up.

    Cleaning up may wait for the other processes. After a minute this process ends even so. In an elastic job an error
    that a lost process may have caused is not reported.
    """
    try:
        yield
    except BaseException as e:
        if job_state().client is not None and not LOST.MayHaveCaused(e):
            _announce("", waits=True)
            deadline = threading.Timer(_PATIENCE, end, [STATUS])
            deadline.daemon = True
            deadline.start()
        raise


def leave(status: int, line: str = "", wait: bool = True) -> None:
    """Ends this process and the other processes of its job. Returns when it has joined no job.

    Args:
        status: of this process.
        line: why, for the users of the others; '' where this process has failed.
        wait: whether to wait for the others; some of them may be unable to come.
    """
    client = job_state().client
    if client is None:
        return
    _leaving.acquire()  # for good: either the main thread or the watcher
    _announce(line, wait)
    if wait:
        with contextlib.suppress(Exception):  # some process did not come in time, or is gone
            client.wait_at_barrier(_LEAVING, int(_PATIENCE * 1000))
    if job_state().process_id == 0:
        # JAX aborts processes that it cuts off; the others leave first.
        time.sleep(0.5 if wait else 3.0)
    end(status)


def failure(to_all: Mapping[str, str]) -> Failure | None:
    """Returns what a process has announced, by the keys and values of TO_ALL."""
    text = to_all.get(_FAILED)
    return Failure(**json.loads(text)) if text else None


def _announce(line: str, waits: bool) -> None:
    state = job_state()
    line = line or f"process {state.process_id} of the job failed; its error says why"
    told = json.dumps(asdict(Failure(state.process_id, line, waits)))
    with contextlib.suppress(Exception):  # another process was first, or process 0 is gone
        state.client.key_value_set(_FAILED, told)


def end(status: int) -> NoReturn:
    """Ends the process without JAX's barrier, which is registered with atexit."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(status)
