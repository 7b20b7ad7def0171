"""Makes a smaller job out of the processes that are left of one, which go on as they are (--elastic).

JAX can leave no process out of a job. So each breaks its connections to others, on which collectives of both may still
wait; gives up its devices, with all that is on them; leaves the job; and joins a new one at another port of process 0.
"""

import contextlib
import os
import socket
import time
from collections.abc import Sequence

import jax
import psutil

from lingvo_moe.core.engine import devices
from lingvo_moe.core.private.jax import forget_devices, job_state, leave_job

_KEY = "lingvo_moe/survivors/"
_PATIENCE = 60_000  # milliseconds for all to come
_AT_END = "lingvo_moe/end"  # a barrier


def regroup(kept: Sequence[int]) -> tuple[str, int, int]:
    """Joins this process to a new job of these processes of its job, of which process 0 is one.

    Returns the address of process 0, the count of processes and the number of this one, as initialize_distributed takes
    them. Nothing may hold on to devices or to what is on them.

    Raises:
        JaxRuntimeError: another one did not come.
        EngineError: as initialize_distributed.
    """
    state = job_state()
    client, me = state.client, state.process_id
    host, _, port = (state.coordinator_address or "").rpartition(":")
    _break_connections(int(port))
    forget_devices()
    if me:
        client.key_value_set(f"{_KEY}{me}", "here")
        address = client.blocking_key_value_get(f"{_KEY}address", _PATIENCE)
    else:
        for other in kept[1:]:
            client.blocking_key_value_get(f"{_KEY}{other}", _PATIENCE)
        with socket.socket() as free:
            free.bind(("", 0))
            address = f"{host}:{free.getsockname()[1]}"
        client.key_value_set(f"{_KEY}address", address)
    del client
    leave_job()
    processes, number = len(kept), kept.index(me)
    devices.initialize_distributed(address, processes, number, elastic=True)
    return address, processes, number


def _break_connections(but: int) -> None:
    """Shuts the TCP connections of this process, but for those from and to a port.

    A step that still waits for another process, beside the one that has failed, would keep devices and connections, and
    the other process would wait for this one. A store's connections are made again when it is asked next.
    """
    for found in psutil.Process().net_connections("tcp"):
        ends = {end.port for end in (found.laddr, found.raddr) if end}
        if found.status == psutil.CONN_ESTABLISHED and but not in ends:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(found.fd)) as connection:
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
