"""An S3 server on this machine (moto), and a proxy before it that answers as storage does on a bad day.

Example:
    with bucket() as storage:  # its address in AWS_ENDPOINT_URL, with credentials
        storage.faults += ["500", "cut"]  # of the next two requests
        ...  # s3://bucket/...
"""

import collections
import contextlib
import http.client
import http.server
import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from processes import free_address, start_python

from lingvo_moe.core.files import store
from lingvo_moe.core.files.store import Store

# What may happen to a request: a server's error before or after it was done; half of the answer, then the end; an
# answer that takes half a second, longer than a writer's renewal in these tests; an error that says to come slower. And
# "hang": no answer for a minute.
FAULTS = ("500", "500 after", "cut", "slow", "503")


class Storage:
    """The server and its proxy.

    Attributes:
        faults: what happens to the next requests, one each.
        page: how many names a page of a listing has at most.
    """

    def __init__(self, port: int):
        self.port = port
        self.faults: collections.deque[str] = collections.deque()
        self.page = 1000

    def Fault(self) -> str:
        """The fault of a request that has come; '' for none."""
        try:
            return self.faults.popleft()
        except IndexError:
            return ""


class Object:
    """An object in a bucket, with the methods of a path that damage.py needs."""

    def __init__(self, store: Store, name: str):
        self._store, self._name = store, name
        self.name, self.suffix = Path(name).name, Path(name).suffix

    def read_bytes(self) -> bytes:
        return self._store.Read(self._name)

    def write_bytes(self, content: bytes) -> None:
        self._store.Write(self._name, content)

    def unlink(self) -> None:
        self._store.Delete(self._name)

    def stat(self) -> None:
        pass

    def relative_to(self, _: object) -> Path:
        return Path(self._name)

    def __str__(self) -> str:
        return f"{self._store.address}/{self._name}"


def _handler(storage: Storage) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # an answer does not wait until its headers are acknowledged

        def _Forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            fault = storage.Fault()
            if fault in ("500", "503"):
                return self._Answer(int(fault), [], b"")
            path = self.path
            if "list-type=2" in path:  # a listing comes in pages
                path = re.sub(r"&max-keys=\d+", "", path) + f"&max-keys={storage.page}"
            connection = http.client.HTTPConnection("127.0.0.1", storage.port)
            connection.request(self.command, path, body, dict(self.headers))
            answer = connection.getresponse()
            content, headers = answer.read(), answer.getheaders()
            connection.close()
            if fault == "500 after":
                return self._Answer(500, [], b"")
            if fault in ("slow", "hang"):
                time.sleep(0.5 if fault == "slow" else 60)
            self._Answer(answer.status, headers, content, cut=fault == "cut")

        def _Answer(self, status: int, headers: list, content: bytes, cut: bool = False) -> None:
            self.send_response_only(status)
            for name, value in headers:
                if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(content) + cut))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content[: len(content) // 2] if cut else content)
            if cut:
                self.close_connection = True

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _Forward

        def log_message(self, *args: object) -> None:
            pass

    return Handler


@contextlib.contextmanager
def bucket(proxied: bool = True) -> Iterator[Storage]:
    """Starts both, with an empty bucket `bucket`; this process and those that it starts find it. Ends both.

    Not `proxied`, requests go to the server itself, which is faster.
    """
    storage = Storage(int(free_address().partition(":")[2]))
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    command = ("-m", "moto.server", "-H", "127.0.0.1", "-p", str(storage.port))
    server = start_python(*command, **silent)
    proxy = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(storage))
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    before, retries = dict(os.environ), store._RETRIES
    os.environ.update(
        AWS_ENDPOINT_URL=f"http://127.0.0.1:{proxy.server_address[1] if proxied else storage.port}",
        AWS_ACCESS_KEY_ID="for tests",
        AWS_SECRET_ACCESS_KEY="for tests",
        AWS_REGION="us-east-1",
    )
    store._RETRIES = {"max_retries": 20, "initial_delay": "5ms", "max_delay": "50ms"}
    store.context.cache_clear()
    try:
        _make_bucket(storage.port, server)
        yield storage
    finally:
        os.environ.clear()
        os.environ.update(before)
        store._RETRIES = retries
        store.context.cache_clear()
        proxy.shutdown()
        proxy.server_close()
        server.terminate()
        server.wait()


def _make_bucket(port: int, server: subprocess.Popen) -> None:
    """Makes the bucket as soon as the server answers."""
    until = time.monotonic() + 60
    while True:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            connection.request("PUT", "/bucket", headers={"Host": "127.0.0.1"})
            status = connection.getresponse().status
            assert status == 200, status
            return
        except OSError:
            assert server.poll() is None and time.monotonic() < until, "moto's server has ended"
            time.sleep(0.1)
