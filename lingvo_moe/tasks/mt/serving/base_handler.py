"""What all paths have in common: bodies within limits, answers that are taken in time, errors that are JSON."""

import asyncio
import json
import logging
from typing import Any

import tornado.iostream
import tornado.web

from lingvo_moe.tasks.mt.serving.callers import check_caller
from lingvo_moe.tasks.mt.serving.errors import RequestError
from lingvo_moe.tasks.mt.serving.service import Service

LOG = logging.getLogger("lingvo_moe.serve")
REQUESTS = logging.getLogger("lingvo_moe.serve.requests")
# What is read and thrown away of a body that is too large, as so many of the largest that is taken: a client that
# sends all before it reads would otherwise see a broken connection in place of the answer.
_DISCARDED = 64


@tornado.web.stream_request_body
class BaseHandler(tornado.web.RequestHandler):
    """Answers one path. Every error is `{"error": "what is wrong, and what would be right"}`."""

    def initialize(self, service: Service, route: str) -> None:
        """Called by Tornado; `route` is the path's name in metrics."""
        self.service, self.route = service, route
        self.lines = 0  # of the request, for the log
        self._body, self._received = bytearray(), 0
        self._timer: asyncio.TimerHandle | None = None

    def ReadBody(self) -> bytes:
        """The whole body.

        Raises:
            RequestError: 403 where a foreign page sent it, 413 where it is too large, 415 where it is compressed.
        """
        self._stop_timer()
        check_caller(self.request, self.service.limits.server_names)
        if self._received > self.service.limits.max_body_bytes:
            raise self._too_large()
        encoding = self.request.headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            raise RequestError(415, f"the body is compressed ({encoding[:40]}); send it as it is")
        return bytes(self._body)

    async def Answer(self, content: Any, status: int = 200) -> None:
        """Sends JSON, and waits until it is sent; a client that does not take it in time is cut off."""
        self.set_header("Content-Type", "application/json; charset=UTF-8")
        await self.Send(json.dumps(content, ensure_ascii=False).encode() + b"\n", status)

    async def Send(self, content: bytes, status: int = 200) -> None:
        """Sends a body whose type was set; otherwise as Answer."""
        self.set_status(status)
        stream = self.request.connection.stream  # type: ignore[union-attr]
        try:
            async with asyncio.timeout(self.service.limits.read_timeout):
                await self.finish(content)
        except TimeoutError:
            stream.close()
        except tornado.iostream.StreamClosedError:
            pass

    # --- what Tornado calls while the request comes in

    def prepare(self) -> None:
        """Starts the clock, and refuses a body that says it is far too large."""
        limits = self.service.limits
        if self.request.method != "POST":  # whose body is taken first, so that the answer arrives
            check_caller(self.request, limits.server_names)
        seconds = limits.read_timeout
        slow = RequestError(408, f"the body did not come within {seconds:g} s")
        self._timer = asyncio.get_running_loop().call_later(seconds, self._refuse, slow)
        announced = self.request.headers.get("Content-Length", "")
        size = int(announced) if announced.isdecimal() and len(announced) < 20 else 0
        # Who asks first, with Expect, has not sent it yet.
        asks = "Expect" in self.request.headers
        if size > limits.max_body_bytes * (1 if asks else _DISCARDED):
            self._refuse(self._too_large())

    def data_received(self, chunk: bytes) -> None:
        """Keeps a piece of the body, unless it is too much."""
        self._received += len(chunk)
        if self._received <= self.service.limits.max_body_bytes:
            self._body += chunk
        elif self._received > self.service.limits.max_body_bytes * _DISCARDED:
            self._refuse(self._too_large())

    def _too_large(self) -> RequestError:
        most = self.service.limits.max_body_bytes
        return RequestError(413, f"the body is larger than {most} bytes; send it in parts")

    def _refuse(self, error: RequestError) -> None:
        """Answers before the body was read; the connection is closed after that."""
        if not self._finished:
            self.send_error(error.status_code, exc_info=(RequestError, error, None), close=True)

    # --- what Tornado calls for the answer

    def set_default_headers(self) -> None:
        """On every answer."""
        self.set_header("Server", "lingvo_moe")
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("Cross-Origin-Resource-Policy", "same-origin")
        self.set_header("Cache-Control", "no-store")

    def compute_etag(self) -> None:
        """None: nothing is cached."""

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """What a RequestError says; of other errors no more than the status."""
        error = kwargs.get("exc_info", (None, None))[1]
        message = error.message if isinstance(error, RequestError) else self._reason
        if isinstance(error, RequestError) and error.retry_after is not None:
            self.set_header("Retry-After", str(error.retry_after))
        if status_code == 405:
            allowed = self._methods()
            self.set_header("Allow", ", ".join(allowed))
            message = f"{self.request.path[:80]} takes {' and '.join(allowed) or 'no request'}"
        if kwargs.get("close"):
            self.set_header("Connection", "close")
        self.set_header("Content-Type", "application/json; charset=UTF-8")
        self.finish(json.dumps({"error": message}, ensure_ascii=False) + "\n")

    def _methods(self) -> list[str]:
        """That this path has."""
        plain = tornado.web.RequestHandler
        names = ("get", "head", "post")
        return [n.upper() for n in names if getattr(type(self), n) is not getattr(plain, n)]

    def log_exception(self, *args: Any) -> None:
        """Refusals are in the log of requests; what else went wrong is told at length."""
        if not isinstance(args[1], tornado.web.HTTPError):
            LOG.error("%s failed", self.route, exc_info=args)

    def on_finish(self) -> None:
        """Counts the request."""
        self._stop_timer()
        seconds = self.request.request_time()
        self.service.metrics.CountRequest(self.route, self.get_status(), seconds)

    def on_connection_close(self) -> None:
        """The client is gone."""
        self._stop_timer()

    def _stop_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
