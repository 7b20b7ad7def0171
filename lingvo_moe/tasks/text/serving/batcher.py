"""Batches lines of concurrent requests and translates them in a separate thread.

Requests take turns. The lines of a batch have similar lengths, since the translator runs one program for each bucket
of lengths in a batch. A batch begins with the request whose turn it is; the others add one line each in turn until it
is full. So a request of one line waits for one batch of each earlier request, however many lines those have.
"""

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from lingvo_moe.tasks.text.decoding.line_stream import one_line

# Of the lines of a batch, but for the last: of long ones it takes fewer, since others wait meanwhile.
_MOST_BYTES = 8 << 10


@dataclass(frozen=True)
class Translation:
    """The translations of one line, best first."""

    texts: list[str]  # K translations
    scores: list[float]  # their scores
    truncated: bool  # whether the line was too long and a part was left out
    about: dict[str, Any] | None = None  # what the answer of a language model says beside the text


@dataclass(eq=False)
class _Request:
    """The lines of one request, and their translations so far."""

    lines: Sequence[bytes | list[int]]
    languages: Sequence[Any] | None
    done: asyncio.Future
    waiting: deque[int] = field(init=False)
    results: dict[int, Translation] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.waiting = deque(range(len(self.lines)))

    def Take(self, length_class: int) -> int | None:
        """The next line of that length that waits."""
        for i in self.waiting:
            if _length_class(self.lines[i]) == length_class:
                self.waiting.remove(i)
                return i
        return None


class Batcher:
    """Calls a translator for many requests at once.

    Args:
        translate: lines, and their languages or settings or None -> NestedMap(translations, scores, truncated), as
            Translator.Translate. Called in one thread only.
        max_lines: of a batch; of long lines it has fewer.
        max_wait: seconds that the first line of a quiet time waits for others.
        on_batch: called after each batch with its number of lines and its seconds.
    """

    def __init__(
        self,
        translate: Callable[[list[bytes | list[int]], list[Any] | None], Any],
        max_lines: int,
        max_wait: float,
        on_batch: Callable[[int, float], None] = lambda lines, seconds: None,
    ):
        self._translate, self._max_lines, self._max_wait = translate, max_lines, max_wait
        self._on_batch = on_batch
        self._thread = ThreadPoolExecutor(1, "translate")
        self._requests: deque[_Request] = deque()
        self._news = asyncio.Event()
        self._in_batch = 0

    @property
    def lines(self) -> int:
        """Lines that wait or are being translated."""
        return self._in_batch + self._waiting

    @property
    def _waiting(self) -> int:
        return sum(len(r.waiting) for r in self._requests)

    async def Translate(
        self, lines: Sequence[bytes | list[int]], languages: Sequence[Any] | None = None
    ) -> list[Translation]:
        """One Translation for each line, in order. A call that is cancelled leaves no line waiting.

        Raises Exception: the translator's exception; other requests of the same batch are not affected.
        """
        request = _Request(lines, languages, asyncio.get_running_loop().create_future())
        if not lines:
            return []
        self._requests.append(request)
        self._news.set()
        try:
            return await request.done
        finally:
            request.waiting.clear()
            with contextlib.suppress(ValueError):
                self._requests.remove(request)

    async def Run(self) -> None:
        """Translates incoming lines until it is cancelled."""
        while True:
            if not self._waiting:
                await self._quiet()
            batch = self._take()
            if batch:
                await self._serve(batch)

    async def Call(self, work: Callable[[], Any]) -> Any:
        """Runs `work()` in the translator's thread after the work that runs there now, and returns its result.

        Raises Exception: what it raises, see `guarded`.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, guarded(work))

    async def _quiet(self) -> None:
        """Waits for a first line, and then a little for others."""
        await self._wait_for_news()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._max_wait):
                while self._waiting < self._max_lines:
                    await self._wait_for_news()

    async def _wait_for_news(self) -> None:
        self._news.clear()
        await self._news.wait()

    def _take(self) -> list[tuple[_Request, int]]:
        """The next batch: requests and numbers of lines of theirs. Who was first goes to the end of the queue."""
        while self._requests and not self._requests[0].waiting:
            self._requests.popleft()
        if not self._requests:
            return []
        first = self._requests[0]
        length_class = _length_class(first.lines[first.waiting[0]])
        batch: list[tuple[_Request, int]] = []
        room = _MOST_BYTES
        for request, line in self._in_turn(length_class):
            batch.append((request, line))
            room -= len(request.lines[line])
            if len(batch) == self._max_lines or room <= 0:
                break
        self._requests.rotate(-1)
        return batch

    def _in_turn(self, length_class: int) -> Iterator[tuple[_Request, int]]:
        """Takes lines of that length, one of each request and then the next of each."""
        givers = list(self._requests)
        while givers:
            for request in list(givers):
                line = request.Take(length_class)
                if line is None:
                    givers.remove(request)
                else:
                    yield request, line

    async def _serve(self, batch: list[tuple[_Request, int]]) -> None:
        """Translates a batch; where that fails, each request of it by itself."""
        self._in_batch = len(batch)
        try:
            await self._attempt(batch)
        except Exception as e:
            requests = list(dict.fromkeys(request for request, _ in batch))
            for request in requests:
                error: Exception | None = e
                if len(requests) > 1:
                    error = await self._alone([item for item in batch if item[0] is request])
                if error and not request.done.done():
                    request.waiting.clear()  # the next batch is made before it hears of it
                    request.done.set_exception(error)
        finally:
            self._in_batch = 0

    async def _alone(self, batch: list[tuple[_Request, int]]) -> Exception | None:
        try:
            await self._attempt(batch)
        except Exception as e:
            return e
        return None

    async def _attempt(self, batch: list[tuple[_Request, int]]) -> None:
        lines = [request.lines[i] for request, i in batch]
        languages = None
        if batch[0][0].languages is not None:
            languages = [(request.languages or ())[i] for request, i in batch]
        start = asyncio.get_running_loop().time()
        out = await self.Call(lambda: self._translate(lines, languages))
        translations = list(_translations(out))
        if len(translations) != len(batch):
            raise RuntimeError(f"{len(translations)} translations of {len(batch)} lines")
        self._on_batch(len(batch), asyncio.get_running_loop().time() - start)
        for (request, i), translation in zip(batch, translations):
            request.results[i] = translation
            if len(request.results) == len(request.lines) and not request.done.done():
                request.done.set_result([request.results[i] for i in range(len(request.lines))])


def guarded(work: Callable[[], Any]) -> Callable[[], Any]:
    """The same work, which raises a RuntimeError in the place of what is no Exception, such as a panic of a library in
    Rust: that would end the server."""

    def run() -> Any:
        try:
            return work()
        except Exception:
            raise
        except BaseException as e:
            raise RuntimeError(f"{type(e).__name__}: {e}") from e

    return run


def _translations(out: Any) -> Iterable[Translation]:
    about = out.get("about", itertools.repeat(None))
    for texts, scores, cut, more in zip(out.translations, out.scores, out.truncated, about):
        floats = [float(s) for s in scores]
        lines = [one_line(t) for t in texts] if more is None else texts
        yield Translation(lines, floats, bool(cut), more)


def _length_class(line: bytes | list[int]) -> int:
    """The class of a line's length: lengths of a class differ by less than a factor of two."""
    return (len(line) // 32).bit_length()
