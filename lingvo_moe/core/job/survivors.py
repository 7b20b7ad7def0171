"""Makes a smaller job out of the processes that are left of one, which go on as they are (--elastic).

JAX can leave no process out of a job. So each breaks its connections to others, on which collectives of both may still
wait; gives up its devices, with all that is on them; leaves the job; and joins a new one at another port of process 0.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import psutil

from lingvo_moe.core.console.command import say
from lingvo_moe.core.job import ending
from lingvo_moe.core.job.lost import LOST
from lingvo_moe.core.private.jax import forget_devices, job_state, leave_job

_KEY = "lingvo_moe/survivors/"
_PATIENCE = 60_000  # milliseconds for all to come
_AT_END = "lingvo_moe/end"  # a barrier


def go_on_without(
    lost: Sequence[int],
    count: int,
    number: int,
    largest: Callable[[int], tuple[int, Any]],
) -> tuple[tuple[str, int, int], Any]:
    """Leaves a job of which processes were lost, for a smaller one of the others. Nothing may hold on to devices.

    A process for which the largest mesh has no place ends, with status 0.

    Args:
        lost: the numbers of the processes that are gone; process 0 is none of them.
        count: the processes of the job.
        number: the number of this process.
        largest: the most processes, of so many, whose devices the training divides over, and their mesh.

    Returns:
        The address, the count of processes and the number of this one in the smaller job, as
        devices.initialize_distributed takes them; and the mesh.

    Raises:
        JaxRuntimeError: another one did not come.
        Exception: as `largest`.
    """
    LOST.left = True
    others = [process for process in range(count) if process not in lost]
    most, mesh = largest(len(others))
    if others.index(number) >= most:
        say(f"process {number}: mesh {mesh} has no place for it; it ends")
        ending.end(0)
    place = _regroup(others[:most])
    if number == 0:
        say(f"going on with {most} of {count} processes, mesh {mesh}, from the newest checkpoint")
    return place, mesh


def _regroup(numbers: Sequence[int]) -> tuple[str, int, int]:
    """Leaves the job; returns the place in that of the processes with these numbers, as go_on_without."""
    state = job_state()
    client, me = state.client, state.process_id
    host, _, port = (state.coordinator_address or "").rpartition(":")
    _break_connections(int(port))
    forget_devices()
    if me:
        client.key_value_set(f"{_KEY}{me}", "here")
        address = client.blocking_key_value_get(f"{_KEY}address", _PATIENCE)
    else:
        for other in numbers[1:]:
            client.blocking_key_value_get(f"{_KEY}{other}", _PATIENCE)
        with socket.socket() as free:
            free.bind(("", 0))
            address = f"{host}:{free.getsockname()[1]}"
        client.key_value_set(f"{_KEY}address", address)
    del client
    leave_job()
    return address, len(numbers), numbers.index(me)


def _break_connections(but: int) -> None:
    """Shuts the TCP connections of this process, but for those from and to a port.

    A step that still waits for another process, beside the one that has failed, would keep devices and connections, and
    the other process would wait for this one. A store's connections are made again when it is asked next.
    """
    for tcp in psutil.Process().net_connections("tcp"):
        ends = {end.port for end in (tcp.laddr, tcp.raddr) if end}
        if tcp.status == psutil.CONN_ESTABLISHED and but not in ends:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(tcp.fd)) as connection:
                connection.shutdown(socket.SHUT_RDWR)


def end_together() -> None:
    """Waits for all processes of an elastic job, at its end: JAX would abort those that are there after process 0."""
    if (client := job_state().client) is not None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # another one was lost at the end
            client.wait_at_barrier(_AT_END, _PATIENCE)
        if job_state().process_id:
            leave_job()
        else:
            time.sleep(1.0)  # until the others have left
