"""The processes of a job meet before they join it, so that the others learn at once of one that has ended.

JAX alone has them wait for five minutes. Each process connects to process 0 when it starts, long before it joins; its
end closes the connection. Imports no JAX.
"""

import contextlib
import functools
import math
import selectors
import socket
import threading
import time
from typing import Any

from lingvo_moe.core.job import launchers
from lingvo_moe.core.job.launchers import JobError

_HERE, _ALL = b"\x01", b"\x02"  # a process has come to join; and all have, which process 0 says
_DIGITS, _MOST = 8, 1000  # bytes of a process's number, which is sent at once, and of a message
_PATIENCE = 5.0  # seconds for a connection, and for a number


class Meeting:
    """The part of one process in it, which begins when this is made.

    Attributes:
        address: host:port of process 0, at which JAX can listen after Join.

    Raises JobError: the address is not host:port, or process 0 cannot listen there.
    """

    def __init__(self, address: str, count: int, number: int):
        self.address, (self._host, self._port) = address, _host_and_port(address)
        self._flag = f"--coordinator_address={address}"
        self._count, self._number = count, number
        self._zero = socket.socket()  # to process 0, once it is connected
        if number:
            self._thread = threading.Thread(target=self._Connect, name="meeting", daemon=True)
            self._thread.start()
            return
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        at, most = ("", self._port), count + 128  # who are accepted in Join
        try:
            self._server = socket.create_server(
                at, family=family, backlog=most, dualstack_ipv6=both
            )
        except OSError as e:
            raise JobError(f"{self._flag}: process 0 cannot listen there: {e}") from None

    def Join(self, seconds: float) -> None:
        """Returns when all have come.

        Raises JobError: one has ended, or did not come within so many seconds.
        """
        if self._number:
            return self._Follow(seconds)
        with self._server, selectors.DefaultSelector() as here:
            here.register(self._server, selectors.EVENT_READ, 0)
            said = self._Gather(here, seconds)
            self._server.close()  # those who are answered connect to JAX, not to this
            others: list[Any] = [key.fileobj for key in here.get_map().values() if key.data]
            for other in others:
                with contextlib.suppress(OSError), other:
                    other.sendall(said.encode() or _ALL)
        if said:
            raise JobError(said)

    def _Gather(self, here: selectors.BaseSelector, seconds: float) -> str:
        """Waits for all others; returns why one will not come, or ''."""
        missing, until = {*range(1, self._count)}, time.monotonic() + seconds
        while missing:
            events = here.select(max(0.0, until - time.monotonic()))
            for key, _ in events:
                connection: Any = key.fileobj
                if not key.data:
                    other = connection.accept()[0]
                    other.settimeout(_PATIENCE)
                    number = _received(other, _DIGITS)
                    if number.isdigit() and 0 < int(number) < self._count:
                        here.register(other, selectors.EVENT_READ, int(number))
                    else:
                        other.close()
                elif _received(connection, 1) == _HERE:
                    missing.discard(key.data)
                else:
                    who = f"process {key.data}"
                    return f"{who} has ended before it joined the job; its error says why"
            if not events:
                who = f"process {', '.join(map(str, sorted(missing)))}"
                return f"{who} has not joined the job within {seconds:.0f} s; was it started?"
        return ""

    def _Connect(self) -> None:
        self._zero = self._Connected(math.inf)
        with contextlib.suppress(OSError):
            self._zero.sendall(f"{self._number:0{_DIGITS}}".encode())

    def _Connected(self, seconds: float) -> socket.socket:
        """A connection to process 0. Raises JobError: there is none for so many seconds."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                link = socket.create_connection((self._host, self._port), _PATIENCE)
                if link.getsockname() != link.getpeername():  # its own, of a port that was free
                    return link
                link.close()
            time.sleep(0.2)
        raise JobError(
            f"{self._flag}: process {self._number} of {self._count} could not join the job: nobody "
            "answered there; is process 0 running at that address?"
        )

    def _Follow(self, seconds: float) -> None:
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._Connected(0.0)  # raises
        with self._zero:
            self._zero.settimeout(seconds)
            with contextlib.suppress(OSError):
                self._zero.sendall(_HERE)
            said = _received(self._zero, _MOST)
        if said != _ALL:
            late = f"did not come to join it within {seconds:.0f} s"
            ended = f"process 0 of the job has ended, or {late}; its error says why"
            raise JobError(said.decode("utf-8", "replace") or ended)
        # JAX would end a process to which its service does not answer.
        self._Connected(seconds).close()


def _received(connection: socket.socket, most: int) -> bytes:
    """The bytes that come next, b'' where the other end is closed or nothing comes in time."""
    try:
        return connection.recv(most)
    except OSError:
        return b""


def _host_and_port(address: str) -> tuple[str, int]:
    """The two parts of --coordinator_address. Raises JobError: it has another form."""
    host, colon, port = address.rpartition(":")
    if not host or not colon or not port.isdigit():
        raise JobError(
            f"--coordinator_address={address!r}: expected host:port of process 0, which --num_processes needs, "
            "e.g. '10.0.0.1:8476'; srun, mpirun and the JobSet of launch/ say it themselves"
        )
    return host.strip("[]"), int(port)


@functools.cache
def meet(address: str, count: int, number: int) -> Meeting:
    """The meeting of this process, which begins at the first call. Raises as Meeting.

    The arguments are those of devices.initialize_distributed; the launcher knows the address where it is ''.
    """
    if not address and (launch := launchers.find()) is not None:
        address = launchers.address_of(launch)
    return Meeting(address, count, number)
