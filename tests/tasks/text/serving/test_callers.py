"""Requests that a browser sends for another site's page are refused; programs and the own page are served."""

import asyncio
import http.client
import http.server
import json
import threading

import pytest
from headless_chromium import needs_chromium, opened_tab
from local_server import Capitals, running

from lingvo_moe.tasks.text.serving import server as server_module
from lingvo_moe.tasks.text.serving.limits import Limits

_BODY = {"text": "a"}


@pytest.fixture(scope="module")
def server():
    """A server that is reached as 127.0.0.1."""
    with running(Capitals()) as it:
        yield it


@pytest.fixture(scope="module")
def named():
    """A server behind a proxy that passes its name on."""
    with running(Capitals(), Limits(server_names=("mt.example.org",))) as it:
        yield it


def ask(running_server, host="localhost", method="POST", **headers: str):
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    body = _BODY if method == "POST" else None
    path = "/translate" if method == "POST" else "/"
    return running_server.Ask(method, path, body, Host=host, **headers)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", "localhost.evil.example"])
def test_names_that_somebody_else_made_lead_here(server, named, host):
    """DNS rebinding: the browser takes the foreign page and this server for one site."""
    for method in ("GET", "POST"):
        for one in (server, named):
            reply = ask(one, host, method, Sec_Fetch_Site="same-origin")
            assert reply.status == 403
            name = host.partition(":")[0]
            assert f"start it with --server_names={name}" in reply.content["error"]


def test_names_that_it_was_given(named):
    assert ask(named, "mt.example.org").status == 200
    # A proxy that uses its address, and a browser too old to send more headers.
    assert ask(named, Origin="https://mt.example.org").status == 200
    assert ask(named, Origin="https://evil.example").status == 403
    with running(Capitals(), Limits(server_names=None)) as open_to_all:
        assert ask(open_to_all, "any.example").status == 200


@pytest.mark.parametrize("host, headers", [
    ("localhost", {}),
    ("LOCALHOST:8080", {}),
    ("mt.localhost", {}),
    ("[::1]:8080", {}),
    ("10.0.0.7", {}),
    # curl -d gives this type to any body.
    ("localhost:8080", {"Content_Type": "application/x-www-form-urlencoded"}),
    ("localhost:8080", {"Sec_Fetch_Site": "same-origin", "Origin": "https://behind.a.proxy"}),
    ("localhost:8080", {"Sec_Fetch_Site": "none"}),
    ("localhost:8080", {"Origin": "http://localhost:8080"}),
])  # fmt: skip
def test_programs_and_its_own_page_by_names_of_this_machine(server, host, headers):
    for method in ("GET", "POST"):
        assert ask(server, host, method, **headers).status == 200


@pytest.mark.parametrize("headers", [
    {"Sec_Fetch_Site": "cross-site"},
    {"Sec_Fetch_Site": "same-site", "Origin": "http://localhost:3000"},
    {"Origin": "http://evil.example"},
    {"Origin": "http://localhost:3000"},
    {"Origin": "null", "Content_Type": "text/plain"},
    {"Origin": "http://["},
])  # fmt: skip
def test_pages_of_other_sites(server, headers):
    calls = len(server.service.translator.batches)
    reply = ask(server, "localhost:8080", **headers)
    assert reply.status == 403
    assert "cannot use this server from a browser" in reply.content["error"]
    assert len(server.service.translator.batches) == calls
    assert ask(server, method="GET", Sec_Fetch_Site="cross-site").status == 200  # a link to it


def test_a_refused_body_is_taken_first(server):
    """Closing earlier would reset the connection, and the answer could be lost."""
    for _ in range(5):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        body = json.dumps({"text": "a" * 900_000}).encode()
        connection.request("POST", "/translate", body, {"Origin": "http://evil.example"})
        assert connection.getresponse().status == 403
        connection.close()


def test_which_addresses_are_of_this_machine_alone():
    for host, alone in (("127.0.0.1", True), ("localhost", True), ("0.0.0.0", False)):
        sockets = server_module.bind(host, 0)
        assert server_module.is_loopback(sockets) == alone
        for one in sockets:
            one.close()


def count_refused(running_server) -> float:
    """The number of refused requests so far."""
    name = b'lingvo_moe_requests_total{route="/translate",status="403"} '
    lines = running_server.service.metrics.Text().splitlines()
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


@needs_chromium
def test_a_foreign_page_in_a_browser(server):
    """A form and a fetch without preflight, from a page of another server."""

    async def work(foreign: str, target: str) -> None:
        calls, refused = len(server.service.translator.batches), count_refused(server)
        async with opened_tab() as tab:
            await tab.Open(foreign)
            fetch = f"fetch('{target}translate', {{method: 'POST', mode: 'no-cors', body: '{{\"text\": \"a\"}}'}})"
            await tab.Eval(
                f"{fetch}.then(r => {{ window.got = r.type }}, e => {{ window.got = e.name }})"
            )
            await tab.Until("window.got")
            form = (
                "const f = document.createElement('form'); f.method = 'post'; f.enctype = 'text/plain';"
                f"f.action = '{target}translate'; const i = document.createElement('input');"
                "i.name = '{\"text\": \"'; i.value = '\"}'; f.append(i); document.body.append(f); f.submit()"
            )
            await tab.Eval(f"(() => {{ {form} }})()")
            await tab.Until("document.body.innerText.includes('cannot use this server')")
        assert len(server.service.translator.batches) == calls
        assert count_refused(server) == refused + 2  # and were sent

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        try:
            page = f"http://localhost:{other.server_port}/"
            asyncio.run(work(page, f"http://127.0.0.1:{server.port}/"))
        finally:
            other.shutdown()
            thread.join()
