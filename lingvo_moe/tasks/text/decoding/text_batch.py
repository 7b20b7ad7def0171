"""A batch of texts that runs all the time: texts join it and leave it between two steps.

A step reads a part of the prompts that have joined (FILLED tokens at most), and then gives every text whose prompt is
read its next token. Keys and values lie in pages of a pool: a text takes a page when it needs one. When none is free,
the text that joined last gives its pages back and waits; later its tokens are read again, like a prompt. Texts that
begin alike share full pages.

Over a mesh the rows of a batch, and the pages, lie in equal parts on its devices: a text has its pages where its row
is.
"""

import abc
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from lingvo_moe.core.decode.pages import PAGE, PagePool, name_of
from lingvo_moe.core.decode.ranges import Sampling
from lingvo_moe.core.moe.expert_loads import ExpertLoads
from lingvo_moe.tasks.text.data.errors import DataError

FILLED = 128  # tokens of prompts that a step reads
WIDTH = 16  # of which this many, or a multiple, belong to one prompt: never one alone, which rounds differently


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
        drafted: the number of tokens that a draft proposed.
        taken: of these, how many the model drew.
        ahead: of how many tokens the draft has keys and values.
        part: of the pages that it uses, see TextBatch.
    """

    ids: list[int]
    settings: Sampling
    prompt: int = 0
    log_probs: list[float] = field(default_factory=list)
    reason: str = ""
    pages: list[int] = field(default_factory=list)
    filled: int = 0
    names: list[bytes] = field(default_factory=list)
    drafted: int = 0
    taken: int = 0
    ahead: int = 0
    part: int = 0

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


_Text = TypeVar("_Text", bound=RunningText)


class TextBatch(abc.ABC, Generic[_Text]):
    """A batch of texts that are continued, with pages of keys and values, so many for all texts.

    Args:
        rows: the number of texts that run at a time at most.
        pools: count the pages, each those of an equal part of the rows.

    Attributes:
        running: the texts that are continued, in the order in which they joined.
        waiting: those that will be.
        tokens: the number of tokens that were drawn.
        drafted: the number of tokens that a draft proposed.
        taken: of these, how many the model drew.
        loads: the experts' rows, of some steps; None where they are not known.
    """

    def __init__(self, rows: int, pools: Sequence[PagePool]):
        self._rows, self._pools = rows // len(pools), pools
        self.running: list[_Text] = []
        self.waiting: deque[_Text] = deque()
        self.tokens = self.drafted = self.taken = 0
        self.loads: ExpertLoads | None = None

    @property
    def pages(self) -> int:
        """The number of pages."""
        return sum(pool.pages for pool in self._pools)

    @property
    def free_pages(self) -> int:
        """The number of those that a text could take."""
        return sum(pool.free for pool in self._pools)

    def Join(self, text: _Text) -> None:
        """Adds a text. Raises DataError: the pages of all texts are too few for it."""
        longest = text.prompt + text.settings.max_tokens
        if pages_of(longest) > (most := self._pools[0].pages):
            share = "" if len(self._pools) == 1 else " on its device"
            raise DataError(
                f"a prompt of {text.prompt} tokens and max_tokens={text.settings.max_tokens} need more than the "
                f"{most * PAGE} tokens that all texts together may have here{share}"
            )
        self.waiting.append(text)

    def Leave(self, text: _Text) -> None:
        """Takes a text out, if it is there."""
        if text in self.running:
            self.running.remove(text)
        elif text in self.waiting:
            self.waiting.remove(text)
        self._GiveBack(text)

    def Step(self) -> list[_Text]:
        """Does a part of the work. Returns the texts that have new tokens or ended; these have left."""
        self._Admit()
        if parts := self._Parts():
            self._Fill(parts)
            for text, until in parts:
                self._Filled(text, until)
        ready = [text for text in self.running if not text.left]
        ready = [text for text in ready if self._HasPages(text, self._Longest(text))]
        if ready:
            self._Draw(ready)
        for text in ready:
            if text.reason:
                self.Leave(text)
        return ready

    def WarmUps(self) -> list[Callable[[], Any]]:
        """Calls that make programs, one each, which Step would make when it first needs them."""
        return []

    @abc.abstractmethod
    def _Fill(self, parts: Sequence[tuple[_Text, int]]) -> None:
        """Reads tokens of texts, up to a number of them each."""

    @abc.abstractmethod
    def _Draw(self, texts: Sequence[_Text]) -> None:
        """Draws the next tokens of texts, whose own were read."""

    def _Longest(self, text: _Text) -> int:
        """The number of a text's tokens that have keys and values after they were drawn, at most."""
        return len(text.ids)

    def _Admit(self) -> None:
        while self.waiting:
            text, counts = self.waiting[0], self._Counts()
            parts = [part for part, count in enumerate(counts) if count < self._rows]
            if not parts:
                return
            text.part = max(parts, key=lambda part: self._Fitness(text, part))
            self._Reuse(text)
            missing = pages_of(len(text.ids)) - len(text.pages)
            if missing > self._pools[text.part].free and counts[text.part]:
                self._GiveBack(text)
                return
            self.running.append(self.waiting.popleft())

    def _Counts(self) -> list[int]:
        """The number of texts that run in each part."""
        counts = [0] * len(self._pools)
        for text in self.running:
            counts[text.part] += 1
        return counts

    def _Fitness(self, text: _Text, part: int) -> tuple[bool, int]:
        """The greater, the sooner the part has pages for a text."""
        pool = self._pools[part]
        return text.left >= PAGE and pool.Has(text.Name(0)), pool.free

    def _Parts(self) -> list[tuple[_Text, int]]:
        """The texts of which tokens are read now, and up to which one."""
        parts: list[tuple[_Text, int]] = []
        width, counts = 0, [0] * len(self._pools)
        for text in [text for text in self.running if text.left]:
            self._Reuse(text)
            if not parts:
                width = self._Width(text.left)
            elif (counts[text.part] + 1) * width > FILLED:
                continue
            until = text.filled + min(text.left, width)
            if text.left and self._HasPages(text, until):
                parts.append((text, until))
                counts[text.part] += 1
        return parts

    def _Width(self, tokens: int) -> int:
        """The number of tokens of each text that are read together, where the first has so many."""
        return min(-(-tokens // WIDTH) * WIDTH, FILLED)

    def _Reuse(self, text: _Text) -> None:
        """Takes the pages of others that have its next tokens."""
        while (
            text.filled == len(text.pages) * PAGE
            and text.left >= PAGE
            and (page := self._pools[text.part].Find(text.Name(len(text.pages))))
        ):
            text.pages.append(page)
            text.filled = text.ahead = text.filled + PAGE

    def _HasPages(self, text: _Text, tokens: int) -> bool:
        """Takes pages for so many tokens, where need be of those that joined last; False where it was the last."""
        if text not in self.running:
            return False
        while len(text.pages) < pages_of(tokens):
            if page := self._pools[text.part].Take():
                text.pages.append(page)
                continue
            last = next(other for other in reversed(self.running) if other.part == text.part)
            self._SendBack(last)
            if last is text:
                return False
        return True

    def _SendBack(self, text: _Text) -> None:
        """Has a text give its pages back and wait for others."""
        self.running.remove(text)
        self._GiveBack(text)
        self.waiting.appendleft(text)

    def _GiveBack(self, text: _Text) -> None:
        # Of a chain of names, the last ones are no use without the first.
        for page in reversed(text.pages):
            self._pools[text.part].Give(page)
        text.pages, text.filled, text.ahead = [], 0, 0

    def _Filled(self, text: _Text, until: int) -> None:
        for number in range(text.filled // PAGE, until // PAGE):
            self._pools[text.part].Name(text.pages[number], text.Name(number))
        text.filled = until

    def _Note(self, choices_LRk: np.ndarray, num_experts: int) -> None:
        """Adds the experts that the texts of a step chose to `loads`."""
        self.loads = self.loads or ExpertLoads(num_experts)
        self.loads.Add(choices_LRk)

    def _Add(self, text: _Text, token: int, log_prob: float) -> bool:
        """Adds a token that was drawn, or END; whether others may follow it."""
        self.tokens += 1
        if token < 0:
            text.reason = "stop"
            return False
        text.ids.append(token)
        text.log_probs.append(log_prob)
        if len(text.log_probs) == text.settings.max_tokens:
            text.reason = "length"
        return not text.reason


def pages_of(tokens: int) -> int:
    """The number of pages that so many tokens fill."""
    return -(-tokens // PAGE)
