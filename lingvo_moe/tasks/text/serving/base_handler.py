"""Common code of all request handlers: limits on bodies, timeouts for answers, errors as JSON."""

import asyncio
import contextlib
import json
import logging
import sys
from collections.abc import Callable
from typing import Any

import tornado.httputil
import tornado.iostream
import tornado.web

from lingvo_moe.core.private.tornado import body_is_whole, forget_body
from lingvo_moe.tasks.text.serving.callers import check_caller
from lingvo_moe.tasks.text.serving.metrics import DropReason
from lingvo_moe.tasks.text.serving.request_error import RequestError
from lingvo_moe.tasks.text.serving.service import Service

LOG = logging.getLogger("lingvo_moe.serve")
REQUESTS = logging.getLogger("lingvo_moe.serve.requests")
GONE = 499, "Client Closed Request"  # the status, in log and metrics, of a client that left
# Drain up to so many times the limit of a body that is too large, so that the client sees our 413 and not a reset.
_DISCARDED = 64


@tornado.web.stream_request_body
class BaseHandler(tornado.web.RequestHandler):
    """Answers one path. Every error is `{"error": "what is wrong, and what would be right"}`."""

    def initialize(self, service: Service, route: str) -> None:
        """Called by Tornado once the headers have come; `route` is the path's name in metrics."""
        service.StopHeaderTimer(self.request.connection.stream)  # type: ignore[union-attr]
        self.service, self.route = service, route
        self.lines = 0  # of the request, for the log
        self._body, self._received = bytearray(), 0
        self._timer: asyncio.TimerHandle | None = None

    def ReadBody(self) -> bytes:
        """Returns the complete body and releases it.

        Raises:
            RequestError: 403 where a foreign page sent it, 413 where it is too large, 415 where it is compressed.
        """
        self._stop_timer()
        check_caller(self.request, self.service.limits.server_names)
        if self._received > self.service.limits.max_body_bytes:
            self._drop("too_large")
            raise self._too_large()
        encoding = self.request.headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            raise RequestError(415, f"the body is compressed ({encoding[:40]}); send it as it is")
        body, self._body = bytes(self._body), bytearray()
        return body

    async def Answer(self, content: Any, status: int = 200) -> None:
        """Sends JSON, and waits until it is sent."""
        self.set_header("Content-Type", "application/json; charset=UTF-8")
        await self.Send(json.dumps(content, ensure_ascii=False).encode() + b"\n", status)

    async def Send(self, content: bytes, status: int = 200) -> None:
        """Sends a body, of the type that its header names, and waits until it is sent."""
        self.set_status(status)
        with contextlib.suppress(tornado.iostream.StreamClosedError):
            await self.finish(content)

    # --- what Tornado calls while the request comes in

    def prepare(self) -> None:
        """Starts the clock, and refuses a body that says it is far too large."""
        limits = self.service.limits
        if self.request.method != "POST":  # whose body is taken first, so that the answer arrives
            check_caller(self.request, limits.server_names)
        seconds = limits.read_timeout
        slow = RequestError(408, f"the body did not come within {seconds:g} s")
        self._start_timer(self._refuse, slow, "slow")
        announced = self.request.headers.get("Content-Length", "")
        size = int(announced) if announced.isdecimal() and len(announced) < 20 else 0
        # Who asks first, with Expect, has not sent it yet.
        asks = "Expect" in self.request.headers
        if size > limits.max_body_bytes * (1 if asks else _DISCARDED):
            self._refuse(self._too_large(), "too_large")

    def data_received(self, chunk: bytes) -> None:
        """Keeps a piece of the body, unless it is too much."""
        self._received += len(chunk)
        if self._received <= self.service.limits.max_body_bytes:
            self._body += chunk
        elif self._received > self.service.limits.max_body_bytes * _DISCARDED:
            self._refuse(self._too_large(), "too_large")

    def on_connection_close(self) -> None:
        """Ends an incomplete upload: its timer, its body, and the coroutine that waits for it.

        Tornado calls this when the client has left, and after Tornado has answered a malformed body.
        """
        self._stop_timer()
        if not body_is_whole(self.request):
            self._end_upload()

    def _end_upload(self) -> None:
        """Counts an upload that was not refused, and breaks its reference cycles."""
        error = sys.exception()  # while the loss of the connection passes through Tornado's frames
        if not self._finished:
            malformed = _is_malformed(error)
            self._drop("malformed" if malformed else "closed")
            self.set_status(*((400,) if malformed else GONE))
            self.finish()  # nothing is sent; Tornado unties the handler from its page modules
        super().on_connection_close()  # the coroutine ends by an error in this future
        forget_body(self.request)
        # Tornado's frames, which the error remembers, hold the last piece of the body, and the error itself.
        for lost in (error, getattr(error, "real_error", None)):
            if lost is not None:
                lost.__traceback__ = None

    def _drop(self, reason: DropReason) -> None:
        """Frees and counts a body that will not be used."""
        self._body = bytearray()
        self.service.metrics.CountDropped(reason)

    def _too_large(self) -> RequestError:
        most = self.service.limits.max_body_bytes
        return RequestError(413, f"the body is larger than {most} bytes; send it in parts")

    def _refuse(self, error: RequestError, reason: DropReason) -> None:
        """Answers before the body was read; the connection is closed after that."""
        if not self._finished:
            self._drop(reason)
            self.send_error(error.status_code, exc_info=(RequestError, error, None), close=True)

    # --- what Tornado calls for the answer

    def set_default_headers(self) -> None:
        """Sets the headers of every answer."""
        self.set_header("Server", "lingvo_moe")
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("Cross-Origin-Resource-Policy", "same-origin")
        self.set_header("Cache-Control", "no-store")

    def compute_etag(self) -> None:
        """None: nothing is cached."""

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """The message of a RequestError; for other errors only the status."""
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
        self.finish(json.dumps(self.Error(status_code, message), ensure_ascii=False) + "\n")

    def Error(self, status: int, message: str) -> dict[str, Any]:
        """The body of an error."""
        return {"error": message}

    def _methods(self) -> list[str]:
        """The HTTP methods that this path accepts."""
        plain = tornado.web.RequestHandler
        names = ("get", "head", "post")
        return [n.upper() for n in names if getattr(type(self), n) is not getattr(plain, n)]

    def log_exception(self, *args: Any) -> None:
        """Refusals appear in the log of requests only; other errors are logged with their traceback."""
        if not isinstance(args[1], tornado.web.HTTPError):
            LOG.error("%s failed", self.route, exc_info=args)

    def finish(self, chunk: str | bytes | dict | None = None) -> "asyncio.Future[None]":
        """Sends the answer; a client that does not read it in time is disconnected.

        Returns:
            A future, done when the answer was sent or the connection is lost.
        """
        stream = self.request.connection.stream  # type: ignore[union-attr]
        sent = super().finish(chunk)
        if not sent.done():
            self._start_timer(stream.close)
            sent.add_done_callback(lambda _: self._stop_timer())
        return sent

    def on_finish(self) -> None:
        """Counts the request."""
        self._stop_timer()
        seconds = self.request.request_time()
        self.service.metrics.CountRequest(self.route, self.get_status(), seconds)

    def _start_timer(self, action: Callable[..., None], *args: Any) -> None:
        """Calls that after `read_timeout`; a handler has one timer, for the body and then for the answer."""
        seconds = self.service.limits.read_timeout
        self._timer = asyncio.get_running_loop().call_later(seconds, action, *args)

    def _stop_timer(self) -> None:
        if self._timer:
            self._timer.cancel()


def _is_malformed(error: BaseException | None) -> bool:
    """Whether Tornado rejected the body as malformed, judged by the exception at hand when the connection closes.

    Args:
        error: None after its answer 400; the loss of the connection otherwise, which can follow from the form.
    """
    if error is None or isinstance(error.__context__, tornado.httputil.HTTPInputError):
        return True
    real = getattr(error, "real_error", None)
    return isinstance(real, tornado.iostream.UnsatisfiableReadError)
