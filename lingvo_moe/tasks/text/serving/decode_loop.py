"""Answers prompts, or translates lines, by a batch that runs all the time, in a separate thread.

Prompts of all requests join the batch, and leave it, between two steps. Requests take turns: each gives one prompt,
then the next request. So a request of one prompt waits for a row of the batch, but for none of the other prompts of an
earlier request.
"""

import asyncio
import functools
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from lingvo_moe.core.decode.ranges import Sampling
from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.serving.batcher import Translation, guarded
from lingvo_moe.tasks.text.serving.request_error import RequestError

Prompt = bytes | list[int]
Settings = Sampling | str | None  # of a prompt; of a line to translate its language
_SECONDS = 10.0  # that the rate of tokens is of


@dataclass(eq=False)
class _Line:
    """A prompt of a request, whose text is wanted as it comes or at its end; its answer, once it has joined."""

    prompt: Prompt
    settings: Settings
    streams: bool
    answer: Any = None
    news: asyncio.Queue = field(default_factory=asyncio.Queue)
    gone: bool = False


class DecodeLoop:
    """Answers prompts for many requests at once.

    Args:
        texts: a Generator, or an exported one, or a Translator; called in one thread only.
        rows: prompts that are continued at once.
        cache_bytes: of the keys and values of all of them.
        on_step: called after each step that brought news with the number of prompts that had some, and its seconds.
    """

    def __init__(
        self, texts: Any, rows: int, cache_bytes: int, on_step: Callable[[int, float], None]
    ):
        self._texts, self._rows, self._on_step = texts, rows, on_step
        self._cache_bytes = cache_bytes
        self._thread = ThreadPoolExecutor(1, "decode")
        self._requests: deque[deque[_Line]] = deque()  # of prompts that have not joined
        self._joined: dict[Any, _Line] = {}  # by the texts of the batch
        self._news = asyncio.Event()
        self._batch: Any = None
        self._drawn: deque[tuple[float, int]] = deque()  # when, and how many tokens

    @property
    def lines(self) -> int:
        """Prompts that wait or are being continued."""
        return len(self._joined) + sum(map(len, self._requests))

    def Gauges(self) -> dict[str, tuple[str, Callable[[], float]]]:
        """Names, descriptions and values of what is worth watching."""

        def of_batch(value: Callable[[Any], float]) -> Callable[[], float]:
            return lambda: value(self._batch) if self._batch else 0

        share = "Share of the tokens that the draft proposed which the model took, since the start."
        gauges = {
            "draft_tokens_taken_share": (share, of_batch(lambda b: b.taken / max(b.drafted, 1)))
        }
        return {
            **(gauges if getattr(self._texts, "draft", None) else {}),
            "rows_running": (
                "Prompts that are being continued, or lines translated.",
                of_batch(lambda b: len(b.running)),
            ),
            "prompts_waiting": (
                "Prompts or lines that wait for a row, or for pages.",
                lambda: self.lines - of_batch(lambda b: len(b.running))(),
            ),
            "tokens_per_second": (
                f"New tokens of all prompts, in the last {_SECONDS:g} s.",
                self._TokensPerSecond,
            ),
            "pages_used": (
                "Pages of keys and values that running prompts use.",
                of_batch(lambda b: b.pages - b.free_pages),
            ),
            "pages_free": (
                "Pages that are free; of those that had keys and values some are kept, for prompts that begin alike.",
                of_batch(lambda b: b.free_pages),
            ),
        }

    def Loads(self) -> dict[str, Sequence[float]]:
        """Figures of the experts of each layer, by the names of gauges; see ExpertLoads."""
        loads = self._batch and self._batch.loads
        return dict(loads.Figures()) if loads else {}

    def _TokensPerSecond(self) -> float:
        self._Forget()
        return sum(tokens for _, tokens in self._drawn) / _SECONDS

    def _Forget(self) -> None:
        while self._drawn and self._drawn[0][0] < time.monotonic() - _SECONDS:
            self._drawn.popleft()

    async def Answers(
        self, prompts: Sequence[Prompt], settings: Sequence[Settings]
    ) -> list[Translation]:
        """One Translation for each prompt, in order. A call that is cancelled leaves none of them running.

        Raises Exception: the model's exception.
        """
        lines = [_Line(*pair, streams=False) for pair in zip(prompts, settings, strict=True)]
        self._Add(lines)
        try:
            return [await self._Whole(line) for line in lines]
        finally:
            self._Drop(lines)

    async def Stream(
        self, prompt: Prompt, settings: Sampling
    ) -> AsyncGenerator[tuple[str, Any], None]:
        """The text that each step adds to an answer; and at the end the Continuation, else None."""
        line, end = _Line(prompt, settings, streams=True), None
        self._Add([line])
        try:
            while not end:
                text, end = await _taken(line)
                yield text, end
        finally:
            self._Drop([line])

    async def WarmUp(self, settings: Settings) -> AsyncGenerator[tuple[int, int], None]:
        """Makes the pool, and has the model's functions made, by a prompt of these settings.

        Yields how many of these are, of how many.
        """
        await self._Call(self._Restart)
        works = self._batch.WarmUps()
        for number, work in enumerate(works, 1):
            await self._Call(work)
            yield number, len(works) + 1
        done = asyncio.ensure_future(self.Answers([b"a"], [settings]))
        await asyncio.sleep(0)  # it is added
        while not done.done():
            await self._Turn()
            await asyncio.sleep(0)
        await done
        yield len(works) + 1, len(works) + 1

    async def Run(self) -> None:
        """Runs the batch until it is cancelled."""
        while True:
            if not self.lines:
                self._news.clear()
                await self._news.wait()
            await self._Turn()

    def _Add(self, lines: Sequence[_Line]) -> None:
        if lines:
            self._requests.append(deque(lines))
        self._news.set()

    def _Drop(self, lines: Sequence[_Line]) -> None:
        """Nobody waits for these any more."""
        for line in lines:
            line.gone = True
        waiting = [deque(line for line in request if not line.gone) for request in self._requests]
        self._requests = deque(filter(None, waiting))

    async def _Whole(self, line: _Line) -> Translation:
        end = None
        while not end:
            _, end = await _taken(line)
        return Translation(end.texts, end.scores, end.truncated, end.About())

    async def _Call(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, guarded(work))

    async def _Turn(self) -> None:
        """Lets prompts join and leave, takes a step, and says what is new."""
        leaving = [text for text, line in self._joined.items() if line.gone]
        joining = self._Joining()
        start, before = asyncio.get_running_loop().time(), self._batch.tokens
        try:
            events = await self._Call(lambda: self._Step(leaving, joining))
        except Exception as e:  # of the model: nobody's pages are whole
            events = [(line, e) for line in (*self._joined.values(), *joining)]
            self._joined.clear()
            await self._Call(self._Restart)
        self._Forget()
        self._drawn.append((time.monotonic(), max(self._batch.tokens - before, 0)))
        for line, news in events:
            line.news.put_nowait(news)
        if events:
            self._on_step(len(events), asyncio.get_running_loop().time() - start)

    def _Joining(self) -> list[_Line]:
        """The prompts that join now: one of each request in turn, as many as there are rows for."""
        joining: list[_Line] = []
        room = self._rows - sum(not line.gone for line in self._joined.values())
        while self._requests and len(joining) < room:
            lines = self._requests.popleft()
            line = lines.popleft()
            joining.append(line)
            if lines:
                self._requests.append(lines)
        return joining

    # --- in the thread

    def _Restart(self) -> None:
        """A new batch, with empty pages; the old one's go first."""
        self._batch = None
        self._batch = self._texts.Batch(self._rows, self._cache_bytes)

    def _Step(self, leaving: Sequence[Any], joining: Sequence[_Line]) -> list[tuple[_Line, Any]]:
        """Returns (text, end) or the exception of each prompt that has news."""
        events: list[tuple[_Line, Any]] = []
        for text in leaving:
            self._Leave(text)
        for line in joining:
            try:
                line.answer = guarded(functools.partial(self._Join, line))()
            except DataError as e:  # it is too long
                events.append((line, RequestError(400, str(e))))
            except Exception as e:
                events.append((line, e))
        texts = [
            text
            for text in self._batch.Step()
            if self._joined[text].streams or text.settings.stop or text.reason
        ]
        for text, read in zip(texts, self._texts.Read(texts)):
            line = self._joined[text]
            try:
                news = guarded(functools.partial(line.answer.News, read))()
            except Exception as e:
                news = e
            if not isinstance(news, tuple) or news[1]:
                self._Leave(text)
            events.append((line, news))
        return events

    def _Join(self, line: _Line) -> Any:
        answer = self._texts.Begin(line.prompt, line.settings)
        self._batch.Join(answer.text)
        self._joined[answer.text] = line
        return answer

    def _Leave(self, text: Any) -> None:
        self._batch.Leave(text)
        self._joined.pop(text, None)


async def _taken(line: _Line) -> tuple[str, Any]:
    """The next news of a prompt. Raises Exception: that of the model."""
    news = await line.news.get()
    if isinstance(news, Exception):
        raise news
    return news
