"""A translation server in a thread, a translator that answers at once, and a client that returns whole replies."""

import asyncio
import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from lingvo_moe.core.moe.expert_loads import ExpertLoads
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.text.serving import server
from lingvo_moe.tasks.text.serving.limits import Limits
from lingvo_moe.tasks.text.serving.service import READY, Service


class Capitals:
    """Turns letters to capitals; lines with 'long' count as cut, one with 'poison' fails with its whole batch.

    Attributes:
        batches: the lines of each call so far.
        by_direction: whether a language is SOURCE-TARGET.
        gate: closed, calls wait for it; 'entered' tells that one does.
    """

    def __init__(self, languages: tuple[str, ...] = (), rows: int = 4):
        self.options = SimpleNamespace(rows=rows, max_source_length=16)
        self.mesh_search = True  # which has a program for each bucket
        self.languages, self.by_direction = languages, False
        self.NAME, self.joins = "translate", False
        self.batches: list[list[bytes]] = []
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()

    def Translate(self, lines: Any, languages: Any = None) -> NestedMap:
        self.batches.append(list(lines))
        self.entered.set()
        assert self.gate.wait(20)
        if any(b"poison" in line for line in lines):
            raise RuntimeError("the model broke")
        codes = languages or [""] * len(lines)
        texts = [line.decode("utf-8", "replace").upper() + code for line, code in zip(lines, codes)]
        return NestedMap(
            translations=[[t, f"{t}?"] for t in texts],
            scores=np.tile(np.float32([-0.5, -1]), [len(lines), 1]),
            truncated=np.array([b"long" in line for line in lines], bool),
        )


class Echo:
    """Continues a prompt with its words, and at the end with its settings' seed; closed, `gate` holds a step.

    An answer fails at the word 'poison', and one to 'panic' by what is no Exception.
    """

    languages, by_direction, draft = (), False, "another model"

    def __init__(self, beam_size=1, vocabulary=None):
        self.options = SimpleNamespace(rows=4, max_length=50, beam_size=beam_size)
        self.NAME, self.joins = "generate", beam_size == 1
        self.options.max_source_length = 200
        self.vocabulary = vocabulary  # whose conversations are read as their text
        self.gate = threading.Event()
        self.gate.set()

    def Translate(self, lines, settings=None):  # with a beam
        texts = [[line.decode()] for line in lines]
        about = [*map(self.About, lines)]
        zeros = np.zeros([len(lines), 1])
        return NestedMap(translations=texts, scores=zeros, truncated=zeros[:, 0] > 0, about=about)

    def Batch(self, rows, cache_bytes):
        return EchoBatch(self.gate)

    def Begin(self, prompt, settings):
        if prompt == b"panic":
            raise BaseException("panicked at main.rs")
        read = prompt if isinstance(prompt, bytes) else self.vocabulary.Decode(prompt).encode()
        return EchoAnswer(read.decode(), settings, self.About(read))

    def Read(self, texts):
        return [None] * len(texts)

    def About(self, line):
        return {"finished": b"end" in line}


class EchoAnswer:
    """An answer, and the text that a batch continues."""

    def __init__(self, prompt, settings, about):
        self.text, self.settings, self.reason, self.steps = self, settings, "", 0
        self.words = prompt.split()
        text = f"{prompt} {settings.seed}.{settings.number}"
        self.end = SimpleNamespace(text=text, texts=[text], scores=[0.0], truncated=False)
        vars(self.end).update(about, About=lambda: about)

    def News(self, read):
        if self.steps > len(self.words):
            return "", self.end
        word = self.words[self.steps - 1]
        if word == "poison":
            raise RuntimeError("the model broke")
        return f" {word}", None


class EchoBatch:
    """A batch of EchoAnswers."""

    def __init__(self, gate):
        self.running, self.gate = [], gate
        self.pages, self.free_pages = 8, 5
        self.tokens, self.drafted, self.taken, self.loads = 0, 4, 3, ExpertLoads(2)
        self.loads.Add(np.array([[[0]], [[1]]]))

    def WarmUps(self):
        return []

    def Join(self, answer):
        self.running.append(answer)

    def Leave(self, answer):
        self.running = [one for one in self.running if one is not answer]

    def Step(self):
        stepped = list(self.running)
        self.tokens += len(stepped)
        if any(answer.steps for answer in stepped):
            assert self.gate.wait(20)
        for answer in stepped:
            answer.steps += 1
            if answer.steps > len(answer.words):
                answer.reason = "stop"
                self.Leave(answer)
        return stepped


@dataclass
class Reply:
    """The status, headers and body of a reply."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def content(self) -> Any:
        """The body, parsed as JSON."""
        return json.loads(self.body)


@dataclass
class Running:
    """A server that runs, and a client of it."""

    port: int
    service: Service
    stop: Callable[[], None]
    status: list[int]

    def Ask(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        """Sends one request; a body that is not bytes is sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(connection):
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            return Reply(response.status, dict(response.getheaders()), response.read())

    def Translate(self, text: Any, **more: Any) -> list[str]:
        """Returns the translations of a text; fails unless the status is 200."""
        reply = self.Ask("POST", "/translate", {"text": text, **more})
        assert reply.status == 200, reply
        return reply.content["translations"]

    def Until(self, condition: Callable[[], Any]) -> None:
        """Waits up to 20 seconds until a condition holds."""
        end = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.005)


@contextlib.contextmanager
def running(
    translator: Any,
    limits: Limits | None = None,
    wait: bool = True,
    max_batch_lines: int | None = None,
) -> Iterator[Running]:
    """Serves a translator on a free port until the block ends, then checks that it ended.

    Args:
        translator: what to serve.
        limits: of the server.
        wait: until it is ready.
        max_batch_lines: as Service has it.
    """
    started = threading.Event()
    servers: list[Running] = []
    status: list[int] = []

    async def work() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        sockets = server.bind("127.0.0.1", 0)
        about = {"model": "mt.Test", "step": 3}
        service = Service(translator, about, limits or Limits(), max_batch_lines)
        port = sockets[0].getsockname()[1]
        servers.append(Running(port, service, lambda: loop.call_soon_threadsafe(stop.set), status))
        started.set()
        status.append(await server.serve(service, sockets, "translator", stop))

    thread = threading.Thread(target=lambda: asyncio.run(work()))
    thread.start()
    assert started.wait(20)
    it = servers[0]
    try:
        if wait:
            it.Until(lambda: it.service.state == READY)
        yield it
    finally:
        with contextlib.suppress(RuntimeError):  # its loop is closed already
            it.stop()
        thread.join(20)
        assert not thread.is_alive()
