"""tools.serve under load: polite clients, and beside them clients that are malformed, oversized, foreign, slow or gone,
some of them in the middle of a body.

    python -m benchmarks.serve --saved_model=demo/saved_model --data_dir=demo/corpus

Each polite client sends one request after the other, of 1 to 8 lines; a line is 1 to 8 held-out source lines joined. An
answer must have N lines for N lines, and each line the same text in every batch. A rude client must get the right
status. The server is a separate process; its memory is read every second. After the load it gets --broken_uploads
incomplete uploads; its memory is read before and after, and may not grow by more than 50 MiB. --update writes the table
into docs/serving.md.
"""

import contextlib
import http.client
import itertools
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from benchmarks import broken_uploads
from benchmarks.compile_time import host
from benchmarks.contenders import ROOT, update_page
from lingvo_moe.core.config import checks
from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.pages.tables import Table, markdown, words
from lingvo_moe.tasks.text.data.dev_set import DevSet
from tools import _cli

PAGE = ROOT / "docs" / "serving.md"
_READ_TIMEOUT = 3.0
_MAX_BODY = 256 << 10  # more than a broken upload sends, so that the server holds all of it
_SETTLED = 10.0  # seconds, after which memory is first looked at
_POOL = 400  # lines that requests are made of, so that each is asked for again and again


def define_flags() -> Flags:
    """The command's flags."""
    flags = Flags("python -m benchmarks.serve", __doc__)
    flags.DEFINE_path("saved_model", None, "what tools.export wrote", required=True, portable=True)
    flags.DEFINE_path("data_dir", None, "the corpus whose held-out lines are sent", required=True)
    flags.DEFINE_integer("clients", 8, "polite clients", checks.SIZE)
    flags.DEFINE_float("seconds", 60.0, "time under load", checks.Number(2 * _SETTLED))
    flags.DEFINE_integer("broken_uploads", 10_000, "uploads after the load", checks.Integer(2))
    flags.DEFINE_boolean("update", False, f"write into {PAGE.relative_to(ROOT)}")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    return _cli.attempt("serve", lambda: _run(args))


def _run(args: Flags) -> int:
    uploads = args.broken_uploads // 2 * 2
    result = run(args.saved_model, args.data_dir, args.clients, args.seconds, uploads)
    text = table(result)
    print(text)
    if args.update:
        update_page(PAGE, "benchmarks.serve", text)
    return 1 if result["wrong"] else 0


@dataclass
class Log:
    """The answers that all client threads got."""

    seconds: list[float] = field(default_factory=list)
    lines: int = 0
    texts: dict[str, str] = field(default_factory=dict)
    wrong: Counter[str] = field(default_factory=Counter)
    rude: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def Answered(self, seconds: float, asked: list[str], got: list[str]) -> None:
        """Records an answer to a polite request."""
        with self.lock:
            self.seconds.append(seconds)
            self.lines += len(asked)
            if len(asked) != len(got):
                self.wrong["another number of lines"] += 1
            for line, text in zip(asked, got):
                if self.texts.setdefault(line, text) != text:
                    self.wrong["another text than before"] += 1

    def Rude(self, name: str, got: object, want: object) -> None:
        """Records the answer to a rude client."""
        with self.lock:
            self.rude[f"{name}: {got}"] += 1
            if got != want:
                self.wrong[f"{name}: {got} in place of {want}"] += 1


def run(
    saved_model: str, data_dir: str, clients: int, seconds: float, uploads: int
) -> dict[str, Any]:
    """Measures `seconds` of load, and then `uploads` broken uploads."""
    lines = _lines(data_dir)
    busy = os.getloadavg()[0]
    with _server(saved_model) as (process, port, ready_after):
        log, end = Log(), time.monotonic() + seconds
        work: list[tuple[Callable, Any]] = [(_polite, (lines, i)) for i in range(clients)]
        work += [(client, ()) for client in _RUDE]
        threads = [
            threading.Thread(target=_until, args=(end, log, f, port, *more)) for f, more in work
        ]
        start = time.monotonic()
        cpu = sum(process.cpu_times()[:2])
        for thread in threads:
            thread.start()
        memory = _watch(process, start, end)
        cpu = sum(process.cpu_times()[:2]) - cpu
        for thread in threads:
            thread.join()
        took = time.monotonic() - start
        after_uploads = broken_uploads.measure(process, port, uploads)
        log.wrong.update(after_uploads.Wrong())
    return {
        "machine": f"{host()}; load average {busy:.1f} before",
        "clients": clients,
        "seconds": took,
        "ready_after": ready_after,
        "requests": len(log.seconds),
        "lines": log.lines,
        "different_lines": len(log.texts),
        "latency": log.seconds,
        "cpu_seconds": cpu,
        "memory": memory,
        "broken_uploads": after_uploads,
        "rude": dict(sorted(log.rude.items())),
        "wrong": dict(log.wrong),
    }


def _lines(data_dir: str) -> list[str]:
    """Held-out lines of mixed lengths."""
    rng = random.Random(0)
    found = [source for _, pairs in DevSet(data_dir, 20).items() for source, _ in pairs]
    return [" ".join(rng.choices(found, k=rng.choice((1, 1, 2, 4, 8)))) for _ in range(_POOL)]


@contextlib.contextmanager
def _server(saved_model: str) -> Iterator[tuple[psutil.Process, int, float]]:
    """The command, when it is ready: its process, its port, its seconds from start to readiness."""
    flags = [f"--saved_model={saved_model}", "--port=0", "--quiet"]
    flags += [f"--read_timeout={_READ_TIMEOUT}", f"--max_body_bytes={_MAX_BODY}"]
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "tools.serve", *flags], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        said = ""
        while "ready after" not in said:
            line = process.stderr.readline()
            if not line:
                raise ChildProcessError(f"the server ended: {said[-2000:]}")
            said += line
        threading.Thread(target=process.stderr.read, daemon=True).start()
        port = re.search(r"serving at http://127\.0\.0\.1:(\d+)", said)
        assert port
        yield psutil.Process(process.pid), int(port[1]), time.monotonic() - start
    except BaseException:
        process.kill()
        raise
    finally:
        process.terminate()
        process.wait(60)
    if process.returncode:
        raise ChildProcessError(f"the server ended with {process.returncode}")


def _until(end: float, log: Log, client: Callable, port: int, *more: Any) -> None:
    """Repeats what a client does until it is time; what it did not expect is counted."""
    while time.monotonic() < end:
        try:
            client(log, end, port, *more)
        except Exception as e:
            with log.lock:
                log.wrong[f"{client.__name__}: {type(e).__name__}: {e}"] += 1


def _watch(process: psutil.Process, start: float, end: float) -> dict[str, int]:
    """Resident bytes after the first seconds, at half time, at the end, and the most of these and between."""
    seen = []
    time.sleep(_SETTLED)
    while time.monotonic() < end:
        seen.append(process.memory_info().rss)
        time.sleep(min(1.0, max(0.0, end - time.monotonic())))
    seen.append(process.memory_info().rss)
    half = seen[len(seen) // 2]
    return {"settled": seen[0], "half": half, "end": seen[-1], "most": max(seen)}


# --- clients


def _polite(log: Log, end: float, port: int, lines: list[str], seed: int) -> None:
    rng = random.Random(seed)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    with contextlib.closing(connection):
        while time.monotonic() < end:
            asked = rng.choices(lines, k=rng.randint(1, 8))
            start = time.monotonic()
            connection.request("POST", "/translate", json.dumps({"text": asked}).encode())
            response = connection.getresponse()
            content = json.loads(response.read())
            if response.status != 200:
                raise RuntimeError(f"{response.status} {content}")
            log.Answered(time.monotonic() - start, asked, content["translations"])


def _post(port: int, body: bytes, **headers: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        connection.request("POST", "/translate", body, headers)
        response = connection.getresponse()
        response.read()
        return response.status


def _malformed(log: Log, end: float, port: int) -> None:
    for body in (b'{"text": "a', b"\xff", b'{"text": 1}', b"[" * 50_000):
        log.Rude("malformed", _post(port, body), 400)
        time.sleep(0.1)


def _foreign(log: Log, end: float, port: int) -> None:
    got = _post(port, b'{"text": "a"}', Origin="http://elsewhere.example")
    log.Rude("a foreign page's", got, 403)
    time.sleep(0.2)


def _oversized(log: Log, end: float, port: int) -> None:
    log.Rude("oversized", _post(port, b"x" * (_MAX_BODY + 1)), 413)
    log.Rude("oversized", _post(port, json.dumps({"text": ["x"] * 200}).encode()), 413)
    time.sleep(0.2)


def _drip(port: int, head: bytes, drops: bytes) -> bytes:
    """Sends `head`, then `drops` ten times a second; returns the answer when the server closes the connection."""
    got = b""
    with socket.create_connection(("127.0.0.1", port), timeout=0.1) as client:
        client.sendall(head)
        for _ in itertools.count():
            try:
                piece = client.recv(4096)
                if not piece:
                    break
                got += piece
            except TimeoutError:
                pass
            except (
                ConnectionError
            ):  # what was sent meanwhile found nobody, and an answer may be lost
                break
            with contextlib.suppress(ConnectionError):
                client.sendall(drops)
    return got


def _slow_body(log: Log, end: float, port: int) -> None:
    head = b"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\n\r\n"
    got = _drip(port, head, b" ")
    log.Rude("slow body", int(got.split(b" ")[1]) if got else "closed", 408 if got else "closed")


def _slow_headers(log: Log, end: float, port: int) -> None:
    got = _drip(port, b"POST /translate HTTP/1.1\r\n", b"X: 1\r\n")
    log.Rude("slow headers", "closed" if not got else got.decode(), "closed")


def _gone(log: Log, end: float, port: int) -> None:
    body = json.dumps({"text": ["nobody waits for this"] * 20}).encode()
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(
            b"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
        )
        client.sendall(body)
        time.sleep(0.05)
    log.Rude("gone before the answer", "closed", "closed")
    time.sleep(1)


def _half_body(log: Log, end: float, port: int) -> None:
    got = broken_uploads.leave_in_mid_body(port)
    log.Rude("gone in mid-body", "closed" if not got else got.decode(), "closed")
    time.sleep(0.02)


def _malformed_chunk(log: Log, end: float, port: int) -> None:
    got = broken_uploads.send_malformed_chunk(port)
    log.Rude("malformed chunk", int(got.split(b" ")[1]) if got else "closed", 400)
    time.sleep(0.02)


_RUDE: tuple[Callable, ...] = (
    _malformed,
    _oversized,
    _foreign,
    _slow_body,
    _slow_headers,
    _gone,
    _half_body,
    _malformed_chunk,
)


# --- the table


def table(result: dict[str, Any]) -> str:
    """Markdown."""
    took = sorted(result["latency"])
    cuts = statistics.quantiles(took, n=100, method="inclusive")
    memory = {name: f"{value / 2**20:,.0f} MiB" for name, value in result["memory"].items()}
    rude = ", ".join(f"{name} ({number})" for name, number in result["rude"].items())
    wrong = ", ".join(f"{name} ({number})" for name, number in result["wrong"].items()) or "none"
    seconds, broken = result["seconds"], result["broken_uploads"]
    rows = {
        "machine": result["machine"],
        "polite clients, seconds": f"{result['clients']}, {seconds:.0f}",
        "errors, wrong answers": wrong,
        "requests, lines": f"{result['requests']:,}, {result['lines']:,} ({result['lines'] / seconds:.0f} a second)",
        "latency of a request: p50, p99, longest": (
            f"{cuts[49]:.2f} s, {cuts[98]:.2f} s, {took[-1]:.2f} s"
        ),
        "resident memory: after 10 s, at half time, at the end, most": ", ".join(memory.values()),
        "CPU time of the server": f"{result['cpu_seconds']:.0f} s",
        "from its start to ready": f"{result['ready_after']:.0f} s",
        "rude clients": rude,
        f"{broken.uploads:,} broken uploads after that: seconds, resident memory before and after": (
            f"{broken.seconds:.0f} s, {broken.before / 2**20:,.0f} MiB, {broken.after / 2**20:,.0f} MiB"
        ),
    }
    return markdown(Table(words("", ""), list(rows.items()))).rstrip()


if __name__ == "__main__":
    _cli.run(main)
