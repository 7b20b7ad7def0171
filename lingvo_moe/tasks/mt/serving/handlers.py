"""The handlers of the server's paths."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import tornado.web

from lingvo_moe.core.config.checks import did_you_mean
from lingvo_moe.tasks.mt.serving import bodies, metrics
from lingvo_moe.tasks.mt.serving.base_handler import GONE, REQUESTS, BaseHandler
from lingvo_moe.tasks.mt.serving.errors import RequestError
from lingvo_moe.tasks.mt.serving.limits import Limits
from lingvo_moe.tasks.mt.serving.page import CONTENT_SECURITY_POLICY, PAGE
from lingvo_moe.tasks.mt.serving.service import READY, Service


def make_app(service: Service, name: str) -> tornado.web.Application:
    """The paths of a service; `name` is the model's in TensorFlow Serving's, its one version is 1."""
    model = f"/v1/models/{name}"
    handlers = {
        "/": PageHandler,
        "/translate": TranslateHandler,
        f"{model}:predict": PredictHandler,
        model: ModelHandler,
        "/health": HealthHandler,
        "/metrics": MetricsHandler,
    }
    return tornado.web.Application(
        [
            (
                path.replace(model, f"{model}(?:/versions/1)?"),
                h,
                {"service": service, "route": path},
            )
            for path, h in handlers.items()
        ],
        default_handler_class=UnknownHandler,
        default_handler_args={"service": service, "route": "other"},
        log_function=_log_request,
        paths=tuple(handlers),
    )


def _log_request(handler: tornado.web.RequestHandler) -> None:
    """One line for each request, without its text."""
    request = handler.request
    REQUESTS.info(
        "%s %s %s %d, %d lines, %.0f ms",
        request.remote_ip,
        request.method,
        ascii(request.path[:80])[1:-1],
        handler.get_status(),
        getattr(handler, "lines", 0),
        1000 * request.request_time(),
    )


class _TranslatingHandler(BaseHandler):
    """POST: lines to translations."""

    parse: Callable[[bytes, Limits, Sequence[str]], bodies.Wanted]
    _work: asyncio.Future | None = None

    async def post(self) -> None:
        """Reads, translates, answers."""
        service = self.service
        wanted = self._wanted()
        self.lines = len(wanted.lines)
        service.running += 1
        try:
            self._work = asyncio.ensure_future(service.Translate(wanted))
            await self.Answer(bodies.answer(wanted, await self._work))
        except asyncio.CancelledError:
            self.set_status(*GONE)
        finally:
            service.running -= 1

    def _wanted(self) -> bodies.Wanted:
        """Parses the request from the body, and frees the body."""
        body = self.ReadBody()
        self.service.CheckReady()
        return type(self).parse(body, self.service.limits, self.service.translator.languages)

    def on_connection_close(self) -> None:
        """Nobody waits any more: lines that were not begun are not."""
        super().on_connection_close()
        if self._work:
            self._work.cancel()


class TranslateHandler(_TranslatingHandler):
    """`/translate`, see bodies.parse_translate."""

    parse = staticmethod(bodies.parse_translate)


class PredictHandler(_TranslatingHandler):
    """`/v1/models/NAME:predict`, as TensorFlow Serving has it, see bodies.parse_predict."""

    parse = staticmethod(bodies.parse_predict)


class ModelHandler(BaseHandler):
    """`/v1/models/NAME`, as TensorFlow Serving has it."""

    async def get(self) -> None:
        """The state of the one version."""
        ready = self.service.state == READY
        version = {
            "version": "1",
            "state": "AVAILABLE" if ready else "LOADING",
            "status": {"error_code": "OK", "error_message": ""},
        }
        await self.Answer({"model_version_status": [version]})

    head = get


class HealthHandler(BaseHandler):
    """`/health`: 200 when translations are served, 503 before and after."""

    async def get(self) -> None:
        """The state, and what the model is."""
        state = self.service.state
        content: dict[str, Any] = {"status": state, "model": self.service.about}
        await self.Answer(content, 200 if state == READY else 503)

    head = get


class MetricsHandler(BaseHandler):
    """`/metrics`, for Prometheus."""

    async def get(self) -> None:
        """All metrics as text."""
        self.set_header("Content-Type", metrics.CONTENT_TYPE)
        await self.Send(self.service.metrics.Text())

    head = get


class PageHandler(BaseHandler):
    """`/`: a page to try it."""

    async def get(self) -> None:
        """The page, which may load nothing from elsewhere."""
        self.set_header("Content-Type", "text/html; charset=UTF-8")
        self.set_header("Content-Security-Policy", CONTENT_SECURITY_POLICY)
        self.set_header("Referrer-Policy", "no-referrer")
        await self.Send(PAGE.encode())

    head = get


class UnknownHandler(BaseHandler):
    """Any unknown path."""

    async def get(self) -> None:
        """Raises RequestError 404, with the path that may have been meant."""
        path = self.request.path[:80]
        raise RequestError(404, f"no path {path}{did_you_mean(path, self.settings['paths'])}")

    head = post = put = delete = patch = options = get
