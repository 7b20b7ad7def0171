"""Clients of tools.serve with incomplete uploads: they leave in mid-body, or send a malformed chunk."""

import contextlib
import re
import socket
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psutil

SIZE = 200_000  # bytes that each sends before it breaks off
_HEAD = b"POST /translate HTTP/1.1\r\nHost: localhost\r\n"
_PIECE = b" " * SIZE
_CLIENTS = 4
_MOST_GROWTH = 50 << 20  # bytes that a server's memory may grow by


@dataclass(frozen=True)
class Memory:
    """Resident bytes of a server before and after broken uploads.

    Attributes:
        uploads: how many there were, half of them of each kind.
        dropped: how many the server counted.
        seconds: that they took.
        before, after: bytes.
    """

    uploads: int
    dropped: int
    seconds: float
    before: int
    after: int

    def Wrong(self) -> list[str]:
        """Sentences about violations by the server."""
        found = []
        if self.dropped != self.uploads:
            found.append(f"{self.dropped} of {self.uploads} broken uploads are in the metrics")
        if self.after - self.before > _MOST_GROWTH:
            found.append(f"broken uploads took {(self.after - self.before) >> 20} MiB of memory")
        return found


def leave_in_mid_body(port: int) -> bytes:
    """Announces more than it sends, ends, and returns what comes back until the server ends, too."""
    return _send(port, _HEAD + b"Content-Length: %d\r\n\r\n" % (SIZE + 1) + _PIECE)


def send_malformed_chunk(port: int) -> bytes:
    """Sends a chunk, and then a size that is no number; returns what comes back."""
    chunk = b"%x\r\n%s\r\n" % (SIZE, _PIECE)
    return _send(port, _HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk + b"none\r\n")


def measure(process: psutil.Process, port: int, uploads: int) -> Memory:
    """Sends broken uploads from four clients at once; `uploads` is even."""
    dropped, before = _dropped(port), _settled(process)
    start = time.monotonic()
    kinds = [leave_in_mid_body, send_malformed_chunk] * (uploads // 2)
    with ThreadPoolExecutor(_CLIENTS) as pool:
        for _ in pool.map(lambda send: send(port), kinds):
            pass
    seconds = time.monotonic() - start
    after = _settled(process)
    return Memory(uploads, _dropped(port) - dropped, seconds, before, after)


def _send(port: int, data: bytes) -> bytes:
    got = b""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            while piece := client.recv(4096):
                got += piece
    return got


def _dropped(port: int) -> int:
    """Uploads that the server has dropped so far."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as reply:
        text = reply.read().decode()
    counts = re.findall(r"^lingvo_moe_uploads_dropped_total{.*} (\S+)$", text, re.MULTILINE)
    return sum(int(float(count)) for count in counts)


def _settled(process: psutil.Process) -> int:
    """Resident bytes a second later."""
    time.sleep(1)
    return process.memory_info().rss
