"""A batch of texts that runs all the time: texts join it and leave it between two steps.

A step reads a part of the prompts that have joined (FILLED tokens at most), and then gives every text whose prompt is
read its next token. Keys and values lie in pages of a pool: a text takes a page when it needs one. When none is free,
the text that joined last gives its pages back and waits; later its tokens are read again, like a prompt. Texts that
begin alike share full pages.
"""

import abc
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from lingvo_moe.core.decode.pages import PAGE, PagePool, name_of
from lingvo_moe.core.decode.ranges import Sampling
from lingvo_moe.core.kernels.weights import FEWEST_ROWS
from lingvo_moe.core.moe.expert_loads import ExpertLoads
from lingvo_moe.tasks.text.data.errors import DataError

FILLED = 128  # tokens of prompts that a step reads
_WATCHED = 8
_WIDTH = 16  # of which this many, or a multiple, belong to one prompt: never one alone, which rounds differently


class PagedFunctions(Protocol):
    """The functions of a generator that a batch calls."""

    def Pool(self, pages: int) -> list[tf.Tensor]:
        """Empty pages, as many of each layer."""

    def Fill(self, places: Sequence[Any], pool: list[tf.Tensor]) -> list[tf.Tensor]:
        """Reads tokens: see PagedSearch.Extend. Returns the pool."""

    def Step(
        self, places: Sequence[Any], more: Sequence[Any], pool: list[tf.Tensor]
    ) -> tuple[list[tf.Tensor], np.ndarray, np.ndarray, Mapping[str, tf.Tensor]]:
        """Draws tokens: see PagedSearch.Step; `more` is before_BL, step_B and the settings. What comes last has
        `experts` int32 [L,R,k] and `num_experts`, where the model has some."""


@dataclass(eq=False)
class RunningText:
    """A prompt and the tokens that continue it so far.

    Attributes:
        ids: those of the prompt, with the mark that begins it, and then the new ones.
        prompt: how many are the prompt's.
        log_probs: of each new token.
        reason: why it ended, 'stop' or 'length'; '' while it runs.
        pages: that it uses, in the order of its tokens.
        filled: of how many tokens these have keys and values.
        names: of its full pages.
    """

    ids: list[int]
    settings: Sampling
    prompt: int = 0
    log_probs: list[float] = field(default_factory=list)
    reason: str = ""
    pages: list[int] = field(default_factory=list)
    filled: int = 0
    names: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt = len(self.ids)

    @property
    def new(self) -> list[int]:
        """The ids of the new tokens."""
        return self.ids[self.prompt :]

    @property
    def left(self) -> int:
        """The number of tokens to read before the newest, whose successor a step draws."""
        return len(self.ids) - 1 - self.filled

    def Name(self, number: int) -> bytes:
        """The name of a page of its, which is full."""
        while len(self.names) <= number:
            start = len(self.names) * PAGE
            before = self.names[-1] if self.names else b""
            self.names.append(name_of(before, self.ids[start : start + PAGE]))
        return self.names[number]


class TextBatch(abc.ABC):
    """A batch of texts that are continued, at most `rows` at a time.

    Attributes:
        running: the texts that are, in the order in which they joined.
        waiting: those that will be.
        pool: counts the pages of keys and values.
        tokens: the number of tokens that were drawn.
        loads: the experts' rows, of one step in _WATCHED; None where they are not known.
    """

    def __init__(self, rows: int, pages: int):
        self._rows, self.pool = rows, PagePool(pages)
        self.running: list[RunningText] = []
        self.waiting: deque[RunningText] = deque()
        self.tokens = 0
        self.loads: ExpertLoads | None = None

    def Join(self, text: RunningText) -> None:
        """Adds a text."""
        self.waiting.append(text)

    def Leave(self, text: RunningText) -> None:
        """Takes a text out, if it is there."""
        if text in self.running:
            self.running.remove(text)
        elif text in self.waiting:
            self.waiting.remove(text)

    @abc.abstractmethod
    def Step(self) -> list[RunningText]:
        """Does a part of the work. Returns the texts that have new tokens or ended; these have left."""


class RunningBatch(TextBatch):
    """A batch with pages of keys and values, so many for all texts."""

    def __init__(self, functions: PagedFunctions, rows: int, pages: int):
        super().__init__(rows, pages)
        self._functions = functions
        self._pool = functions.Pool(pages + 1)
        self._steps = 0

    def Join(self, text: RunningText) -> None:
        """See TextBatch. Raises DataError: the pool is too small for it."""
        longest = text.prompt + text.settings.max_tokens
        if pages_of(longest) > self.pool.pages:
            raise DataError(
                f"a prompt of {text.prompt} tokens and max_tokens={text.settings.max_tokens} need more than the "
                f"{self.pool.pages * PAGE} tokens that all texts together may have here"
            )
        super().Join(text)

    def Leave(self, text: RunningText) -> None:
        """See TextBatch."""
        super().Leave(text)
        self._GiveBack(text)

    def Step(self) -> list[RunningText]:
        """See TextBatch; a token of each."""
        self._Admit()
        if parts := self._Parts():
            self._Fill(parts)
        ready = [text for text in self.running if not text.left]
        ready = [text for text in ready if self._HasPages(text, len(text.ids))]
        if ready:
            self._Draw(ready)
        for text in ready:
            if text.reason:
                self.Leave(text)
        return ready

    def _Admit(self) -> None:
        while self.waiting and len(self.running) < self._rows:
            text = self.waiting[0]
            self._Reuse(text)
            if pages_of(len(text.ids)) - len(text.pages) > self.pool.free and self.running:
                self._GiveBack(text)
                return
            self.running.append(self.waiting.popleft())

    def _Parts(self) -> list[tuple[RunningText, int]]:
        """The texts of which tokens are read now, and up to which one."""
        parts: list[tuple[RunningText, int]] = []
        width = 0
        for text in [text for text in self.running if text.left]:
            self._Reuse(text)
            if not parts:
                width = min(-(-text.left // _WIDTH) * _WIDTH, FILLED)
            elif (len(parts) + 1) * width > FILLED:
                break
            until = text.filled + min(text.left, width)
            if text.left and self._HasPages(text, until):
                parts.append((text, until))
        return parts

    def _Reuse(self, text: RunningText) -> None:
        """Takes the pages of others that have its next tokens."""
        while (
            text.filled == len(text.pages) * PAGE
            and text.left >= PAGE
            and (page := self.pool.Find(text.Name(len(text.pages))))
        ):
            text.pages.append(page)
            text.filled += PAGE

    def _HasPages(self, text: RunningText, tokens: int) -> bool:
        """Takes pages for so many tokens, where need be of those that joined last; False where it was the last."""
        if text not in self.running:
            return False
        while len(text.pages) < pages_of(tokens):
            if page := self.pool.Take():
                text.pages.append(page)
                continue
            last = self.running.pop()
            self._GiveBack(last)
            self.waiting.appendleft(last)
            if last is text:
                return False
        return True

    def _GiveBack(self, text: RunningText) -> None:
        for page in reversed(
            text.pages
        ):  # of a chain of names, the last ones are no use without the first
            self.pool.Give(page)
        text.pages, text.filled = [], 0

    def _Fill(self, parts: Sequence[tuple[RunningText, int]]) -> None:
        width = -(-max(until - text.filled for text, until in parts) // _WIDTH) * _WIDTH
        self._pool = self._functions.Fill(_places(parts, width, len(parts)), self._pool)
        for text, until in parts:
            self._Filled(text, until)

    def _Draw(self, texts: Sequence[RunningText]) -> None:
        rows = max(len(texts), FEWEST_ROWS)
        places = _places([(text, len(text.ids)) for text in texts], 1, rows)
        values = [text.settings.Values()[1:] for text in texts]
        values += [Sampling().Values()[1:]] * (rows - len(texts))
        step_B = np.zeros([rows], np.int32)
        step_B[: len(texts)] = [len(text.ids) - text.prompt for text in texts]
        penalized = any(text.settings.repetition_penalty != 1 for text in texts)
        longest = max(len(text.ids) for text in texts) if penalized else 0
        before_BL = np.zeros([rows, longest], np.int32)
        for row, text in zip(before_BL, texts):
            row[:] = (text.ids + text.ids[:1] * longest)[:longest]
        more = [before_BL, step_B, *map(list, zip(*values))]
        self._pool, tokens_B, log_probs_B, out = self._functions.Step(places, more, self._pool)
        if "experts" in out and self._steps % _WATCHED == 0:
            self.loads = self.loads or ExpertLoads(int(out["num_experts"]))
            self.loads.Add(out["experts"].numpy()[:, : len(texts)])
        self._steps += 1
        self.tokens += len(texts)
        for text, token, log_prob in zip(texts, tokens_B.tolist(), log_probs_B.tolist()):
            self._Filled(text, len(text.ids))
            if token < 0:
                text.reason = "stop"
                continue
            text.ids.append(token)
            text.log_probs.append(log_prob)
            if len(text.log_probs) == text.settings.max_tokens:
                text.reason = "length"

    def _Filled(self, text: RunningText, until: int) -> None:
        for number in range(text.filled // PAGE, until // PAGE):
            self.pool.Name(text.pages[number], text.Name(number))
        text.filled = until


def pages_of(tokens: int) -> int:
    """The number of pages that so many tokens fill."""
    return -(-tokens // PAGE)


def _places(parts: Sequence[tuple[RunningText, int]], width: int, rows: int) -> list[np.ndarray]:
    """The arguments PLACES for the tokens of texts from `filled` on; what is padding goes to page 0."""
    ids_BT, at_BT, slot_BT = (np.zeros([rows, width], np.int32) for _ in range(3))
    pages, owners, firsts = [], [], []
    for row, (text, until) in enumerate(parts):
        at = np.arange(text.filled, until)
        used = np.asarray(text.pages[: pages_of(until)])
        ids_BT[row, : at.size] = text.ids[text.filled : until]
        at_BT[row] = text.filled + np.arange(width)
        slot_BT[row, : at.size] = used[at // PAGE] * PAGE + at % PAGE
        pages.append(used)
        owners.append(np.full(used.size, row))
        firsts.append(np.arange(used.size) * PAGE)
    padding = np.arange(len(parts), rows)
    pages, owners, firsts = [*pages, padding * 0], [*owners, padding], [*firsts, padding * 0]
    flat = (np.concatenate(x).astype(np.int32) for x in (pages, owners, firsts))
    return [ids_BT, at_BT, slot_BT, *flat]
