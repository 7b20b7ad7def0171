"""The Service that request handlers call: a translator, its limits and its state."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from lingvo_moe.core.decode.ranges import Sampling
from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.serving.batcher import Batcher, Translation
from lingvo_moe.tasks.text.serving.bodies import TextRequest
from lingvo_moe.tasks.text.serving.decode_loop import DecodeLoop
from lingvo_moe.tasks.text.serving.limits import Limits
from lingvo_moe.tasks.text.serving.metrics import Metrics
from lingvo_moe.tasks.text.serving.request_error import RequestError
from lingvo_moe.tasks.text.vocabulary.chat import Chat, Message

WARMING_UP, READY, STOPPING = "warming up", "ready", "stopping"


class Service:
    """Translates for many at once, within limits.

    Args:
        translator: a Translator, a Generator, or an exported one; called in one thread only. A Generator with a beam
            takes settings in the place of languages. Where its texts can join a batch that runs, they do.
        about: the model, as `/health` shows it; with its languages, unless they are those that the translator takes.
        max_batch_lines: translated at once; None for the rows of the translator's programs.
        max_batch_wait: seconds that the first line of a quiet time waits for others.

    Attributes:
        state: 'warming up', 'ready' or 'stopping'.
        connections: open ones, kept by the server.
        header_timers: by the stream of a connection, what ends it unless the headers of a request come in time.
        running: requests that are being translated or answered.
    """

    def __init__(
        self,
        translator: Any,
        about: dict[str, Any],
        limits: Limits,
        max_batch_lines: int | None = None,
        max_batch_wait: float = 0.005,
    ):
        self.translator, self.limits = translator, limits
        self.about = {"languages": list(translator.languages), **about}
        if translator.by_direction:
            self.about["languages"] = self.about["target_languages"] = list(translator.languages)
        self.state = WARMING_UP
        self.connections = 0
        self.header_timers: dict[object, asyncio.TimerHandle] = {}
        self.running = 0
        rows = max_batch_lines or translator.options.rows
        self._loop: DecodeLoop | None = None
        if translator.joins:
            self._loop = DecodeLoop(translator, rows, limits.cache_mib << 20, self._CountBatch)
        else:
            self._batcher = Batcher(translator.Translate, rows, max_batch_wait, self._CountBatch)
        gauges = {
            "waiting_lines": ("Lines that wait or are being translated.", lambda: self.lines),
            "connections": ("Connections that are open.", lambda: self.connections),
            "ready": ("1 when translations are served.", lambda: self.state == READY),
            **(self._loop.Gauges() if self._loop else {}),
        }
        self.metrics = Metrics(gauges, self._loop.Loads if self._loop else dict)

    def _CountBatch(self, lines: int, seconds: float) -> None:
        self.metrics.CountBatch(lines, seconds)

    @property
    def lines(self) -> int:
        """Lines that wait or are being answered."""
        return (self._loop or self._batcher).lines

    @functools.cached_property
    def chat(self) -> Chat | None:
        """The conversations of a model with a chat template."""
        vocabulary = getattr(self.translator, "vocabulary", None)
        return Chat(vocabulary) if vocabulary and vocabulary.chat_template else None

    async def Conversation(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a conversation. Raises RequestError 400: the model has none like it, or it is too long."""
        if self.chat is None:
            raise RequestError(400, "this model has no chat template; send a prompt")
        try:
            ids = await asyncio.to_thread(self.chat.Ids, messages)
        except DataError as e:
            raise RequestError(400, str(e)) from None
        if len(ids) > (most := self.translator.options.max_source_length):
            raise RequestError(400, f"the conversation has {len(ids)} tokens; at most {most} here")
        return ids

    async def WarmUp(self) -> AsyncIterator[tuple[int, int]]:
        """Has every program made, and is ready then. Yields how many are, of how many.

        Over a mesh there are programs for each bucket, or size of table; TensorFlow's own kernels run one for all
        lengths.
        """
        language = self.translator.languages[:1] or None
        if language and self.translator.by_direction:
            language = [f"{language[0]}-{language[0]}"]
        if self._loop:
            generates = self.translator.NAME == "generate"
            settings = Sampling(1) if generates else language and language[0]
            async for progress in self._loop.WarmUp(settings):
                yield progress
            self._BeReady()
            return
        over_mesh = getattr(self.translator, "mesh_search", None)
        longest = self.translator.options.max_source_length
        lines = warm_up_lines(longest if over_mesh else 1)
        for i, line in enumerate(lines, 1):
            await self._batcher.Call(functools.partial(self.translator.Translate, [line], language))
            yield i, len(lines)
        self._BeReady()

    def _BeReady(self) -> None:
        if self.state == WARMING_UP:
            self.state = READY

    async def Run(self) -> None:
        """Translates incoming lines until it is cancelled."""
        await (self._loop or self._batcher).Run()

    def StopHeaderTimer(self, stream: object) -> None:
        """The headers of a request have come on this connection, or it ended."""
        if timer := self.header_timers.pop(stream, None):
            timer.cancel()

    def CheckReady(self) -> None:
        """Raises RequestError 503 unless translations are served."""
        if self.state != READY:
            raise RequestError(503, f"the server is {self.state}", 5)

    async def Translate(self, wanted: TextRequest) -> list[Translation]:
        """One Translation for each line.

        Raises RequestError: 429 while there are too many lines, 504 when it took too long, 500 where the model failed.
        """
        self._CheckRoom(len(wanted.lines))
        try:
            async with asyncio.timeout(self.limits.request_timeout):
                if self._loop:
                    settings = wanted.settings or wanted.languages or [None] * len(wanted.lines)
                    translations = await self._loop.Answers(wanted.lines, settings)
                else:
                    translations = await self._batcher.Translate(
                        wanted.lines, wanted.settings or wanted.languages
                    )
        except TimeoutError:
            raise RequestError(
                504, f"not done within {self.limits.request_timeout:g} s; send fewer lines", 1
            ) from None
        self.metrics.CountLines(len(translations), sum(t.truncated for t in translations))
        return translations

    async def Stream(
        self, prompt: bytes | list[int], settings: Sampling
    ) -> AsyncGenerator[tuple[str, Any], None]:
        """The text of each step that continues a prompt; and at the end the Continuation, else None.

        Raises RequestError: 429 while there are too many lines.
        """
        self._CheckRoom(1)
        assert self._loop
        async with contextlib.aclosing(self._loop.Stream(prompt, settings)) as steps:
            async for step in steps:
                yield step
        self.metrics.CountLines(1, 0)

    def _CheckRoom(self, lines: int) -> None:
        """Raises RequestError 429 if so many lines more would be too many."""
        if self.lines + lines > self.limits.max_waiting_lines:
            raise RequestError(429, "too many lines wait already; try again later", 1)


def warm_up_lines(max_source_length: int) -> Sequence[bytes]:
    """Lines for warm-up that reach every bucket: each is less than half as long again as the one before.

    Buckets double, and a word has the same number of tokens anywhere in a line, so this holds for any vocabulary.
    """
    words, lines = 1, []
    while words < max_source_length:
        lines.append(b" ".join([b"a"] * words))
        words += max(1, words // 3)
    return [*lines, b" ".join([b"a"] * max_source_length)]
