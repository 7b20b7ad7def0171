"""The server on a real socket: paths, limits, slow and rude clients, and shutdown."""

import contextlib
import gzip
import logging
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from local_server import Capitals, running

from lingvo_moe.tasks.text.serving.limits import Limits
from lingvo_moe.tasks.text.serving.server import bind
from lingvo_moe.tasks.text.serving.service import warm_up_lines

QUICK = Limits(max_body_bytes=2000, max_lines=20, read_timeout=1.0)


@pytest.fixture(scope="module")
def server():
    with running(Capitals()) as it:
        yield it


@pytest.fixture(scope="module")
def quick():
    """A server with a small value for every limit."""
    with running(Capitals(), QUICK) as it:
        yield it


def request_of(body: bytes = b'{"text": "a"}') -> bytes:
    """A whole request for translations."""
    head = b"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body


def raw(port: int, *parts: bytes, pause: float = 0.0, seconds: float = 10.0) -> bytes:
    """Sends pieces with pauses in between; returns everything until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as client:
        with contextlib.suppress(ConnectionError):
            for part in parts:
                client.sendall(part)
                time.sleep(pause)
        got = b""
        with contextlib.suppress(ConnectionError):
            while piece := client.recv(65536):
                got += piece
        return got


def test_translate(server):
    reply = server.Ask("POST", "/translate", {"text": "größer\r\n\na long line"})
    assert reply.status == 200
    assert reply.headers["Content-Type"] == "application/json; charset=UTF-8"
    assert reply.content == {
        "translations": ["GRÖSSER", "", "A LONG LINE"],
        "scores": [-0.5] * 3,
        "truncated": [False, False, True],
    }


def test_the_form_of_tensorflow_serving(server):
    reply = server.Ask("POST", "/v1/models/translator:predict", {"instances": ["a"]})
    assert reply.content == {
        "predictions": [{"translations": ["A", "A?"], "scores": [-0.5, -1.0], "truncated": False}]
    }
    status = server.Ask("GET", "/v1/models/translator").content["model_version_status"][0]
    assert status["state"] == "AVAILABLE"
    model = f"/v1/models/translator/versions/{status['version']}"
    assert server.Ask("GET", model).content["model_version_status"] == [status]
    assert server.Ask("POST", f"{model}:predict", {"instances": ["a"]}).content == reply.content
    assert server.Ask("GET", "/v1/models/translator/versions/2").status == 404


def test_the_page_is_self_contained(server):
    reply = server.Ask("GET", "/")
    assert reply.headers["Content-Type"] == "text/html; charset=UTF-8"
    assert "default-src 'none'" in reply.headers["Content-Security-Policy"]
    assert b"//" not in reply.body.replace(b"://www.w3.org", b"")  # no address of anything


@pytest.mark.parametrize("method, path, body, status, message", [
    ("GET", "/translat", None, 404, "no path /translat (did you mean '/translate'"),
    ("DELETE", "/x", None, 404, "no path /x"),
    ("GET", "/translate", None, 405, "/translate takes POST"),
    ("POST", "/health", b"{}", 405, "/health takes GET and HEAD"),
    ("BREW", "/", None, 405, "/ takes GET and HEAD"),
    ("POST", "/v1/models/other:predict", b"{}", 404, "no path /v1/models/other:predict"),
    ("POST", "/translate", {"text": "\n" * 128}, 413, "129 lines; at most 128"),
    ("POST", "/translate", {"text": "poison"}, 500, "Internal Server Error"),
])  # fmt: skip
def test_what_is_refused(server, method, path, body, status, message):
    reply = server.Ask(method, path, body)
    assert reply.status == status
    assert message in reply.content["error"]
    assert ("Allow" in reply.headers) == (status == 405)
    assert server.Translate("fine") == ["FINE"]


def test_a_compressed_body(server):
    reply = server.Ask("POST", "/translate", gzip.compress(b"{}"), **{"Content-Encoding": "gzip"})
    assert reply.status == 415
    assert "the body is compressed (gzip)" in reply.content["error"]
    reply = server.Ask("POST", "/translate", {"text": "a"}, **{"Content-Encoding": "identity"})
    assert reply.status == 200


def test_a_body_that_is_too_large(quick):
    reply = quick.Ask("POST", "/translate", b"x" * 100_000)
    assert reply.status == 413
    assert reply.content["error"].startswith("the body is larger than 2000 bytes")
    assert quick.Translate("fine") == ["FINE"]


_LENGTH = b"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n"
_CHUNKS = b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("parts, answer", [
    ([b""], b""),
    ([b"GET /health HTTP/1.1\r\nHost: localhost\r\n", *[b"X-Slow: 1\r\n"] * 40], b""),
    ([_LENGTH + b"{"], b"HTTP/1.1 408 "),
    ([_LENGTH, *[b"x"] * 40], b"HTTP/1.1 408 "),
    ([_CHUNKS, *[b"1\r\nx\r\n"] * 40], b"HTTP/1.1 408 "),
], ids=["silent", "slow headers", "half a body", "slow body", "slow chunks"])  # fmt: skip
def test_slow_clients_are_cut_off(quick, parts, answer):
    """However they spread their bytes; others are served meanwhile."""
    start = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(raw, quick.port, *parts, pause=0.05)
        assert quick.Translate("fine") == ["FINE"]
        assert time.monotonic() - start < QUICK.read_timeout
        assert slow.result().startswith(answer)
        assert bool(slow.result()) == bool(answer)
    assert 0.9 * QUICK.read_timeout < time.monotonic() - start < 10 * QUICK.read_timeout


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n{}",
        b"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9" + b"9" * 5000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
    ],
    ids=["TLS", "two lengths", "a long length", "large headers"],
)  # fmt: skip
def test_what_is_no_http_is_refused(quick, sent):
    assert raw(quick.port, sent)[:13] in (b"", b"HTTP/1.1 400 ")
    assert quick.Translate("fine") == ["FINE"]


def test_connections_that_stay_open_are_used_again(quick):
    start = time.monotonic()
    got = raw(quick.port, *[request_of()] * 3)
    assert got.count(b"HTTP/1.1 200 OK") == 3
    assert time.monotonic() - start > 0.9 * QUICK.read_timeout  # and then closed


def test_too_many_connections():
    limits = Limits(max_connections=2)
    with running(Capitals(), limits) as it, contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(socket.create_connection(("127.0.0.1", it.port)))
        it.Until(lambda: it.service.connections == 2)
        reply = it.Ask("GET", "/health")
        assert reply.status == 503
        assert reply.headers["Retry-After"] == "1"
        assert "too many connections" in reply.content["error"]
        stack.close()
        it.Until(lambda: it.service.connections == 0)
        assert it.Translate("a") == ["A"]


def test_too_many_lines_and_too_long_a_wait():
    translator = Capitals()
    with running(translator, Limits(max_waiting_lines=5, max_lines=5, request_timeout=0.5)) as it:
        translator.gate.clear()
        with ThreadPoolExecutor(2) as pool:
            slow = pool.submit(it.Ask, "POST", "/translate", {"text": "a\nb\nc"})
            it.Until(lambda: it.service.running == 1)
            full = it.Ask("POST", "/translate", {"text": "d\ne\nf"})
            assert (full.status, full.headers["Retry-After"]) == (429, "1")
            assert "too many lines wait" in full.content["error"]
            assert slow.result().status == 504
            assert "not done within 0.5 s" in slow.result().content["error"]
            translator.gate.set()
        it.Until(lambda: it.service.metrics.Text().count(b"lingvo_moe_waiting_lines 0.0"))
        assert it.Translate("fine") == ["FINE"]


def test_metrics():
    with running(Capitals()) as it:
        it.Translate("a\na long line")
        it.Ask("GET", "/x" * 30)
        reply = it.Ask("GET", "/metrics")
        assert reply.headers["Content-Type"].startswith("text/plain; version=")
        lines = set(reply.body.decode().splitlines())
    assert lines >= {
        'lingvo_moe_requests_total{route="/translate",status="200"} 1.0',
        'lingvo_moe_requests_total{route="other",status="404"} 1.0',
        'lingvo_moe_request_seconds_count{route="/translate"} 1.0',
        "lingvo_moe_lines_total 2.0",
        "lingvo_moe_truncated_lines_total 1.0",
        "lingvo_moe_batch_lines_sum 2.0",
        "lingvo_moe_batch_seconds_count 1.0",
        "lingvo_moe_waiting_lines 0.0",
        "lingvo_moe_connections 1.0",
        "lingvo_moe_ready 1.0",
    }


def test_the_log_has_a_line_for_each_request_and_no_text(server, caplog):
    with caplog.at_level(logging.INFO, "lingvo_moe.serve.requests"):
        server.Translate("secret\nmore")
        head = b"Host: localhost\r\nConnection: close\r\n\r\n"
        raw(server.port, b"GET /\x85%0aother?text=secret HTTP/1.1\r\n" + head)
        server.Until(lambda: len(caplog.records) == 2)
    said = [record.getMessage() for record in caplog.records]
    assert [line.rpartition(", ")[0] for line in said] == [
        "127.0.0.1 POST /translate 200, 2 lines",
        "127.0.0.1 GET /\\x85%0aother 404, 0 lines",
    ]


# --- start and shutdown


def test_it_is_ready_after_it_was_warmed_up():
    translator = Capitals()
    translator.gate.clear()
    with running(translator, wait=False) as it:
        assert translator.entered.wait(10)
        health = it.Ask("GET", "/health")
        assert (health.status, health.content["status"]) == (503, "warming up")
        early = it.Ask("POST", "/translate", {"text": "a"})
        assert (early.status, early.headers["Retry-After"]) == (503, "5")
        (version,) = it.Ask("GET", "/v1/models/translator").content["model_version_status"]
        assert version["state"] == "LOADING"
        translator.gate.set()
        it.Until(lambda: it.Ask("GET", "/health").status == 200)
        assert [len(batch) for batch in translator.batches] == [1] * len(warm_up_lines(16))


@pytest.mark.parametrize("tokens_of_a_word", [1, 2, 3, 5])
def test_warm_up_touches_every_bucket(tokens_of_a_word):
    buckets = [8, 16, 32, 64, 128, 200]
    lengths = [min(tokens_of_a_word * len(line.split()) + 1, 200) for line in warm_up_lines(200)]
    assert {min(b for b in buckets if n <= b) for n in lengths} == set(buckets)


def test_a_model_that_does_not_run_ends_the_server(caplog):
    class Broken(Capitals):
        def Translate(self, lines, languages=None):
            raise RuntimeError("no such kernel")

    with running(Broken(), wait=False) as it:
        it.Until(lambda: it.status)
    assert it.status == [1]
    assert "the model cannot be served" in caplog.text
    assert "no such kernel" in caplog.text


def test_it_ends_what_runs_and_takes_nothing_more():
    translator = Capitals()
    with running(translator) as it, ThreadPoolExecutor(1) as pool:
        translator.gate.clear()
        last = pool.submit(it.Ask, "POST", "/translate", {"text": "a"})
        with socket.create_connection(("127.0.0.1", it.port), timeout=10) as kept:
            it.Until(lambda: it.service.running == 1 and it.service.connections == 2)
            it.stop()
            it.Until(lambda: it.service.state == "stopping")
            kept.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"503 Service Unavailable" in kept.recv(1000)
            with pytest.raises(ConnectionError):
                socket.create_connection(("127.0.0.1", it.port), timeout=10)
            assert not it.status
            translator.gate.set()
            assert last.result().content["translations"] == ["A"]
            it.Until(lambda: it.status)
            assert it.status == [0]
            assert kept.recv(1000) in (b"", b'{"status')  # closed, after the rest of its answer


def test_it_does_not_wait_for_ever():
    translator = Capitals()
    with running(translator, Limits(shutdown_timeout=0.2)) as it, ThreadPoolExecutor(1) as pool:
        translator.gate.clear()
        cut_off = pool.submit(it.Ask, "POST", "/translate", {"text": "a"})
        it.Until(lambda: it.service.running == 1)
        it.stop()
        it.Until(lambda: it.status)
        assert it.status == [1]
        translator.gate.set()
        with pytest.raises(ConnectionError):
            cut_off.result()


def test_addresses_that_cannot_be_had():
    (taken,) = bind("127.0.0.1", 0)
    with taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"--host=127\.0\.0\.1 --port={port}: Address"):
            bind("127.0.0.1", port)
