"""Processes of a job meet: each learns at once of another that has ended before it joins."""

import contextlib
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from processes import free_address

from lingvo_moe.core.job.launchers import JobError
from lingvo_moe.core.job.meeting import Meeting


@contextlib.contextmanager
def _meetings(*numbers, count=3):
    """The parts of these processes of a job, each connected to process 0."""
    address = free_address()
    parts = {number: Meeting(address, count, number) for number in numbers}
    for number in set(numbers) - {0}:
        parts[number]._thread.join(30)
    try:
        yield parts
    finally:
        for part in parts.values():
            part._zero.close()
        if 0 in parts:
            parts[0]._server.close()


def _join(parts, seconds=30.0):
    """The reason for which each process was refused, '' where it may join."""

    def join(part):
        try:
            part.Join(seconds)
        except JobError as e:
            return str(e)
        return ""

    with ThreadPoolExecutor() as pool:
        return dict(zip(parts, pool.map(join, parts.values())))


def _service(part):
    """Stands for JAX's, which listens when process 0 has joined."""
    return socket.create_server(("127.0.0.1", part._port))


def test_all_come(monkeypatch):
    with _meetings(0, 1, 2) as parts:
        lead = parts[0].Join

        def join(seconds):
            lead(seconds)
            parts[0]._server = _service(parts[0])

        monkeypatch.setattr(parts[0], "Join", join)
        assert _join(parts) == {0: "", 1: "", 2: ""}


def test_one_has_ended():
    with _meetings(0, 1, 2) as parts:
        parts.pop(1)._zero.close()
        begun = time.monotonic()
        said = "process 1 has ended before it joined the job; its error says why"
        assert _join(parts) == {0: said, 2: said}
        assert time.monotonic() - begun < 20


def test_one_that_came_ends_while_another_is_waited_for():
    with _meetings(0, 1) as parts:
        with pytest.raises(JobError, match="process 1, 2 has not joined the job within 0 s"):
            parts[0].Join(0.2)
    with _meetings(0, 1) as parts, ThreadPoolExecutor() as pool:
        joined = pool.submit(parts[0].Join, 30.0)
        parts[1]._zero.sendall(b"\x01")
        time.sleep(0.2)
        parts[1]._zero.close()
        with pytest.raises(JobError, match="process 1 has ended"):
            joined.result()


def test_process_0_has_ended_or_never_was():
    with _meetings(0, 1) as parts:
        parts[0]._server.close()
        with pytest.raises(JobError, match="process 0 of the job has ended, or did not come"):
            parts[1].Join(30.0)
    nobody = Meeting(free_address(), 2, 1)
    with pytest.raises(JobError, match="process 1 of 2 could not join the job: nobody answered"):
        nobody.Join(0.3)


def test_others_that_connect_are_sent_away():
    with _meetings(0, 1, count=2) as parts:
        for said in (b"", b"GET / HTTP/1.1", b"00000002", b"00000000"):
            with socket.create_connection(("127.0.0.1", parts[0]._port)) as other:
                other.sendall(said)
        parts[1]._zero.sendall(b"\x01")
        parts[0].Join(30.0)


def test_an_address_at_which_process_0_cannot_listen():
    with _meetings(0) as parts:
        with pytest.raises(JobError, match=r"process 0 cannot listen there: .*in use"):
            Meeting(parts[0].address, 2, 0)
    with pytest.raises(JobError, match="'node0': expected host:port of process 0"):
        Meeting("node0", 2, 1)
