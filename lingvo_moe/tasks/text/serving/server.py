"""Serves a Service on a port, from the first connection to a clean shutdown."""

import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
import time
from collections.abc import Sequence

import tornado.httpserver
import tornado.httputil
import tornado.iostream
import tornado.netutil

from lingvo_moe.tasks.text.serving.handlers import make_app
from lingvo_moe.tasks.text.serving.service import STOPPING, Service

_LOG = logging.getLogger("lingvo_moe.serve")
_SECONDS_BETWEEN_NOTES = 5.0
_FULL_BODY = b'{"error": "too many connections are open; try again later"}\n'
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Type: application/json; charset=UTF-8\r\nContent-Length: %d\r\n\r\n%s"
    % (len(_FULL_BODY), _FULL_BODY)
)


class Server(tornado.httpserver.HTTPServer):
    """An HTTPServer with limits on connections and on slow clients."""

    def initialize(self, service: Service, name: str) -> None:  # type: ignore[override]
        """Called by Tornado, with the arguments."""
        self._service = service
        super().initialize(
            make_app(service, name),
            max_header_size=16 << 10,
            max_body_size=1 << 62,  # handlers count, and answer
        )

    def handle_stream(self, stream: tornado.iostream.IOStream, address: tuple) -> None:
        """Serves a new connection, or refuses it if there are too many."""
        if self._service.connections >= self._service.limits.max_connections:
            stream.write(_FULL).add_done_callback(lambda _: stream.close())
            return
        self._service.connections += 1
        super().handle_stream(stream, address)

    def start_request(
        self, server_conn: object, request_conn: tornado.httputil.HTTPConnection
    ) -> tornado.httputil.HTTPMessageDelegate:
        """Waits for the headers of a request, and then hands it to its handler.

        Until a handler has it, the connection ends after `read_timeout`. Tornado's own limit for headers would not
        end its answer to malformed ones, which a client need not take.
        """
        stream = request_conn.stream  # type: ignore[attr-defined]
        seconds = self._service.limits.read_timeout
        timer = asyncio.get_running_loop().call_later(seconds, stream.close)
        self._service.header_timers[stream] = timer
        return super().start_request(server_conn, request_conn)

    def on_close(self, server_conn: object) -> None:
        """A connection ended."""
        self._service.StopHeaderTimer(server_conn.stream)  # type: ignore[attr-defined]
        self._service.connections -= 1
        super().on_close(server_conn)


def bind(host: str, port: int) -> list[socket.socket]:
    """Listens; connections wait until there is a server.

    Raises ValueError: the flag that names an address that cannot be had.
    """
    if not 0 <= port < 1 << 16:
        raise ValueError(f"--port={port}: at most 65535, or 0 for any")
    try:
        return tornado.netutil.bind_sockets(port, host)
    except socket.gaierror as e:
        raise ValueError(f"--host={host}: {e.strerror}") from None
    except OSError as e:
        raise ValueError(f"--host={host} --port={port}: {e.strerror}") from None


def is_loopback(sockets: Sequence[socket.socket]) -> bool:
    """Whether only this machine can reach them."""
    return all(ipaddress.ip_address(s.getsockname()[0]).is_loopback for s in sockets)


def stop_on_signals(stop: asyncio.Event) -> None:
    """Sets `stop` at the first SIGINT or SIGTERM; a second one has its default effect."""
    loop = asyncio.get_running_loop()

    def heard() -> None:
        stop.set()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, heard)


async def serve(
    service: Service, sockets: Sequence[socket.socket], name: str, stop: asyncio.Event
) -> int:
    """Serves until `stop` is set: then takes nothing more, ends what runs, and returns.

    The service is warmed up first, while `/health` says so.

    Returns:
        The process's exit status: 0, or 1 where requests did not end within `shutdown_timeout` or serving broke.
    """
    server = Server(service, name)
    server.add_sockets(sockets)
    host, port = sockets[0].getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    _LOG.info("serving at http://%s:%d, warming up", shown, port)
    worker = asyncio.ensure_future(_work(service))
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([worker, stopping], return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            _LOG.error("the model cannot be served", exc_info=worker.exception())
            return 1
        return 0 if await _drain(service, server) else 1
    finally:
        server.stop()
        for task in (worker, stopping):
            task.cancel()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(server.close_all_connections(), 1)


async def _work(service: Service) -> None:
    """Warms up, telling how far it is, and translates until it is cancelled."""
    start = told = time.monotonic()
    async for done, number in service.WarmUp():
        if time.monotonic() - told > _SECONDS_BETWEEN_NOTES:
            told = time.monotonic()
            _LOG.info("warming up: %d of %d lengths", done, number)
    _LOG.info("ready after %.1f s", time.monotonic() - start)
    await service.Run()


async def _drain(service: Service, server: Server) -> bool:
    """Waits for what runs. Returns whether all of it ended."""
    service.state = STOPPING
    server.stop()
    if service.running:
        _LOG.info("stopping: %d requests still run", service.running)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(service.limits.shutdown_timeout):
            while service.running:
                await asyncio.sleep(0.02)
    _LOG.info("stopped; %d requests cut off", service.running)
    return not service.running
