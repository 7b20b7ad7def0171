"""Uploads that do not arrive and answers that nobody reads: connections end, are counted, and leave no objects."""

import contextlib
import gc
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
import tornado.http1connection
import tornado.iostream
from local_server import Capitals, Running, running

from lingvo_moe.tasks.text.serving.base_handler import BaseHandler
from lingvo_moe.tasks.text.serving.limits import Limits

_HEAD = b"POST /translate HTTP/1.1\r\nHost: localhost\r\n"
_SIZED = _HEAD + b"Content-Length: 300000\r\n\r\n"
_CHUNKED = _HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
_PIECE = b"x" * 200_000
_CHUNK = b"%x\r\n%s\r\n" % (len(_PIECE), _PIECE)
# The bytes that are sent, and the reason for which the server drops the upload.
_BROKEN = {
    "gone": (_SIZED + _PIECE, "closed"),
    "gone in a chunk": (_CHUNKED + _CHUNK[:-100], "closed"),
    "no chunk": (_CHUNKED + _CHUNK + b"zz\r\n", "malformed"),
    "no end of a chunk": (_CHUNKED + _CHUNK[:-2] + b"zz", "malformed"),
}
_QUICK = Limits(max_body_bytes=2000, read_timeout=0.5)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    # A client that waits for nothing is quicker than the server.
    limits = Limits(max_connections=1000)
    with running(Capitals(), limits) as it:
        yield it


def _of_requests() -> list[object]:
    """Objects of handlers, and of Tornado's connections."""
    kinds = (BaseHandler, tornado.iostream.IOStream, tornado.http1connection.HTTP1Connection)
    return [o for o in gc.get_objects() if isinstance(o, kinds)]


@pytest.fixture
def left() -> Iterator[Callable[[], int]]:
    """Counts the objects of the test's requests that are left, with garbage collection off."""
    gc.collect()
    gc.disable()
    gc.freeze()  # what was there before is not listed
    yield lambda: len(_of_requests())
    gc.enable()


def dropped(it: Running) -> dict[str, int]:
    """Returns the number of dropped uploads from the metrics."""
    found = re.findall(
        rb'^lingvo_moe_uploads_dropped_total{reason="(\w+)"} (\d+)',
        it.service.metrics.Text(),
        re.MULTILINE,
    )
    return {reason.decode(): int(number) for reason, number in found}


def more(it: Running, before: dict[str, int]) -> dict[str, int]:
    """Returns the increase of each count since before, where there is one."""
    return {name: n - before[name] for name, n in dropped(it).items() if n != before[name]}


def upload(port: int, data: bytes, wait: bool = True) -> bytes:
    """Sends these bytes, then closes the connection: after the answer, or at once."""
    got = b""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(data)
            while wait and (piece := client.recv(4096)):
                got += piece
    return got


@pytest.mark.parametrize("name", _BROKEN)
def test_broken_uploads_leave_nothing(name, server, left):
    """40 uploads of 200 kB each, with garbage collection off; the server goes on."""
    data, reason = _BROKEN[name]
    before = dropped(server)

    def send() -> None:
        for _ in range(10):
            upload(server.port, data, wait=reason == "malformed")

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    server.Until(lambda: sum(more(server, before).values()) == 40)
    assert more(server, before) == {reason: 40}
    server.Until(lambda: left() == 0)
    assert server.Translate("fine") == ["FINE"]


def test_a_reset_connection_leaves_nothing(server, left):
    """A client ends with RST, like a killed one; the exception must not keep its frames alive."""
    before = dropped(server)
    for data, _ in _BROKEN.values():
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
            client.sendall(data[:60_000])
            server.Until(lambda: left() == 3)  # the connection, its stream and a handler
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        server.Until(lambda: left() == 0)
    assert sum(more(server, before).values()) == len(_BROKEN)


@pytest.mark.parametrize("data, status, reason", [
    (_HEAD + b"Content-Length: 500\r\n\r\n{", 408, "slow"),
    (_CHUNKED + b"5\r\n{", 408, "slow"),
    (_HEAD + b"Content-Length: 3000\r\n\r\n" + b"x" * 3000, 413, "too_large"),
    (_HEAD + b"Content-Length: 99999999\r\n\r\n", 413, "too_large"),
    (_CHUNKED + _CHUNK, 413, "too_large"),
    (_HEAD + b"Content-Length: -5\r\n\r\n", 400, "malformed"),
])  # fmt: skip
def test_refused_uploads_are_counted_once(data, status, reason, left):
    with running(Capitals(), _QUICK) as it:
        ends = data.endswith(b"x" * 3000)  # a whole request, after which another may come
        got = upload(it.port, data.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", ends))
        assert got.startswith(b"HTTP/1.1 %d " % status)
        it.Until(lambda: left() == 0)
        assert dropped(it) == {"closed": 0, "malformed": 0, "slow": 0, "too_large": 0} | {reason: 1}
        counted = f'requests_total{{route="/translate",status="{status}"}} 1.0'
        assert counted in it.service.metrics.Text().decode()


def test_a_client_that_asks_before_it_sends(server):
    """Expect: 100-continue, twice on one connection, and a third time without a body."""
    before = dropped(server)
    body = json.dumps({"text": "fine"}).encode()
    head = _HEAD + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body)
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        for _ in range(2):
            client.sendall(head)
            assert client.recv(4096).startswith(b"HTTP/1.1 100 ")
            client.sendall(body)
            got = b""
            while b"FINE" not in got:
                got += client.recv(4096)
            assert got.startswith(b"HTTP/1.1 200 ")
        client.sendall(head)
        assert client.recv(4096).startswith(b"HTTP/1.1 100 ")
    server.Until(lambda: more(server, before) == {"closed": 1})


@pytest.mark.parametrize("request_", [
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"BREW / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    _HEAD + b"Content-Length: 99999999\r\n\r\n",
    _CHUNKED + b"zz\r\n",
    b"nonsense\r\n\r\n",
], ids=["page", "405", "413", "no chunk", "no HTTP"])  # fmt: skip
def test_answers_that_nobody_takes(request_, left, monkeypatch):
    """The connection ends when the kernel's buffer for a client is full, whichever answer it is."""
    begun = []
    full = lambda self, data: begun.append(1) or 0  # noqa: E731
    monkeypatch.setattr(tornado.iostream.IOStream, "write_to_fd", full)
    with running(Capitals(), _QUICK) as it, socket.create_connection(("127.0.0.1", it.port)) as c:
        c.sendall(request_)
        it.Until(lambda: begun)
        it.Until(lambda: it.service.connections == 0)
        it.Until(lambda: left() == 0)
