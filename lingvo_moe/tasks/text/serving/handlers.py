"""The handlers of the server's paths."""

import asyncio
import base64
import contextlib
import dataclasses
import hashlib
import http
import json
from collections.abc import Callable, Sequence
from typing import Any

import tornado.web

from lingvo_moe.core.config.checks import did_you_mean
from lingvo_moe.core.pages import rendering
from lingvo_moe.tasks.text.serving import bodies, metrics
from lingvo_moe.tasks.text.serving.base_handler import GONE, REQUESTS, BaseHandler
from lingvo_moe.tasks.text.serving.limits import Limits
from lingvo_moe.tasks.text.serving.openai_bodies import (
    OpenAiAnswer,
    OpenAiRequest,
    model_entry,
    openai_error,
    parse_openai,
)
from lingvo_moe.tasks.text.serving.request_error import RequestError
from lingvo_moe.tasks.text.serving.service import READY, Service


def _hash(inline: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()}'"


class _Page:
    """A page to try a model: one file without external parts, light or dark, for any script and direction.

    Attributes:
        policy: what the browser lets the page do: its own style and script, and requests to this server.
    """

    def __init__(self, name: str):
        style, script = (
            "".join(rendering.source(__package__, part) for part in parts)
            for parts in (("style.css", "translate.css"), (f"{name}.js",))
        )
        page = rendering.html(__package__, f"{name}.html", style=style, script=script)
        self.content = page.encode()
        self.policy = (
            f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; connect-src 'self'; "
            "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )


def make_app(service: Service, name: str) -> tornado.web.Application:
    """The paths of a service; `name` is the model's in TensorFlow Serving's, its one version is 1."""
    model = f"/v1/models/{name}"
    handlers: dict[str, type[BaseHandler]] = {
        "/": PageHandler,
        "/translate": TranslateHandler,
        f"{model}:predict": PredictHandler,
    }
    if service.translator.NAME == "generate":
        handlers = {"/": ChatPageHandler} if service.chat else {}
        handlers |= {"/generate": GenerateHandler, "/v1/models": ModelsHandler}
        handlers |= {"/v1/completions": CompletionsHandler, "/v1/chat/completions": ChatHandler}
    handlers |= {model: ModelHandler, "/health": HealthHandler, "/metrics": MetricsHandler}
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
        model=name,
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

    parse: Callable[[bytes, Limits, Sequence[str], bool], bodies.TextRequest]
    _work: asyncio.Future | None = None

    async def post(self) -> None:
        """Reads, translates, answers."""
        service = self.service
        wanted = self._wanted()
        self.lines = len(wanted.lines)
        service.running += 1
        try:
            self._work = asyncio.ensure_future(self.Reply(wanted))
            await self._work
        except asyncio.CancelledError:
            self.set_status(*GONE)
        finally:
            service.running -= 1

    async def Reply(self, wanted: bodies.TextRequest) -> None:
        """Translates and answers; cancelled when the client leaves."""
        await self.Answer(bodies.answer(wanted, await self.service.Translate(wanted)))

    def _wanted(self) -> bodies.TextRequest:
        """Parses the request from the body, and frees the body."""
        body, translator = self.ReadBody(), self.service.translator
        self.service.CheckReady()
        limits, languages = self.service.limits, translator.languages
        return type(self).parse(body, limits, languages, translator.by_direction)

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


class _GeneratingHandler(_TranslatingHandler):
    """POST: prompts to their continuations; a stream is of server-sent events."""

    async def Stream(
        self,
        wanted: bodies.TextRequest,
        events: Callable[[str, Any], list[dict[str, Any]]],
        last: str = "",
    ) -> None:
        """Answers with the `events` of each token, of its text and at the end the Continuation, and with `last`."""
        seconds = self.service.limits.request_timeout
        (prompt,), (settings,) = wanted.lines, wanted.settings
        self.set_header("Content-Type", "text/event-stream; charset=UTF-8")
        try:
            async with (
                asyncio.timeout(seconds),
                contextlib.aclosing(self.service.Stream(prompt, settings)) as steps,
            ):
                async for text, end in steps:
                    self.write("".join(map(_event, events(text, end))))
                    await self.flush()
        except TimeoutError:
            raise RequestError(
                504, f"not done within {seconds:g} s; ask for fewer tokens", 1
            ) from None
        await self.finish(last)

    def CheckBeam(self, wanted: bodies.TextRequest) -> None:
        """Raises RequestError: it has settings that a beam search has not."""
        more = ["stream"] * (wanted.form == "stream")
        more += wanted.settings[0].NotOfABeam() if wanted.settings else []
        if self.service.translator.options.beam_size > 1 and more:
            raise RequestError(
                400, f"this model searches with a beam: leave out {' and '.join(more)}"
            )

    def send_error(self, status_code: int = 500, **kwargs: Any) -> None:
        """Answers an error; once a stream has begun, with its last event."""
        if not self._headers_written:
            super().send_error(status_code, **kwargs)
            return
        error = kwargs.get("exc_info", (None, None))[1]
        is_ours = isinstance(error, RequestError)
        message = error.message if is_ours else http.HTTPStatus(status_code).phrase
        self.set_status(status_code)  # for the log and the metrics; the client has its own
        self.finish(_event(self.Error(status_code, message)))


class GenerateHandler(_GeneratingHandler):
    """`/generate`, of a language model, see bodies.parse_generate."""

    def _wanted(self) -> bodies.TextRequest:
        body, service = self.ReadBody(), self.service
        service.CheckReady()
        wanted = bodies.parse_generate(body, service.limits, service.translator.options.max_length)
        self.CheckBeam(wanted)
        return wanted

    async def Reply(self, wanted: bodies.TextRequest) -> None:
        """See _TranslatingHandler; a stream has an event for each token."""
        if wanted.form != "stream":
            return await super().Reply(wanted)
        await self.Stream(
            wanted, lambda text, end: [{"text": text, **(end.About() if end else {})}]
        )


class CompletionsHandler(_GeneratingHandler):
    """`/v1/completions`, as OpenAI has it, see parse_openai."""

    CHAT = False

    def _wanted(self) -> OpenAiRequest:
        body, service = self.ReadBody(), self.service
        service.CheckReady()
        options, name = service.translator.options, self.settings["model"]
        draws = options.beam_size == 1
        wanted = parse_openai(
            body, service.limits, options.max_length, name, self.CHAT, draws=draws
        )
        self.CheckBeam(wanted)
        return wanted

    async def Reply(self, wanted: bodies.TextRequest) -> None:
        """Answers whole or, in a stream, with the chunks of each token."""
        assert isinstance(wanted, OpenAiRequest)
        if self.CHAT:
            ids = await self.service.Conversation(wanted.messages)
            wanted = dataclasses.replace(wanted, lines=[ids] * len(wanted.settings))
        answer = OpenAiAnswer(self.settings["model"], self.CHAT)
        if wanted.form != "stream":
            translations = await self.service.Translate(wanted)
            return await self.Answer(answer.Whole(translations, wanted.n))
        first = iter((True,))

        def events(text: str, end: Any) -> list[dict[str, Any]]:
            return answer.Events(text, end, next(first, False), wanted.with_usage)

        await self.Stream(wanted, events, "data: [DONE]\n\n")

    def Error(self, status: int, message: str) -> dict[str, Any]:
        """See BaseHandler; in OpenAI's form."""
        return openai_error(status, message)


class ChatHandler(CompletionsHandler):
    """`/v1/chat/completions`, as OpenAI has it."""

    CHAT = True


class ModelsHandler(BaseHandler):
    """`/v1/models`, as OpenAI has it."""

    async def get(self) -> None:
        """A list of the one model."""
        await self.Answer({"object": "list", "data": [model_entry(self.settings["model"])]})

    head = get


def _event(content: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


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
        entry = model_entry(self.settings["model"])  # as OpenAI has it
        await self.Answer({"model_version_status": [version], **entry})

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

    PAGE = _Page("translate")

    async def get(self) -> None:
        """The page, which may load nothing from elsewhere."""
        self.set_header("Content-Type", "text/html; charset=UTF-8")
        self.set_header("Content-Security-Policy", self.PAGE.policy)
        self.set_header("Referrer-Policy", "no-referrer")
        await self.Send(self.PAGE.content)

    head = get


class ChatPageHandler(PageHandler):
    """`/` of a model with a chat template: a conversation."""

    PAGE = _Page("chat")


class UnknownHandler(BaseHandler):
    """Any unknown path."""

    async def get(self) -> None:
        """Raises RequestError 404, with the path that may have been meant."""
        path = self.request.path[:80]
        raise RequestError(404, f"no path {path}{did_you_mean(path, self.settings['paths'])}")

    head = post = put = delete = patch = options = get
