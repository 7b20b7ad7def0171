"""A batch of texts that runs all the time: texts join it and leave it between two steps.

A step reads a part of the prompts that have joined (FILLED tokens at most), and then gives every text whose prompt is
read its next token. Keys and values lie in pages of a pool: a text takes a page when it needs one. When none is free,
the text that joined last gives its pages back and waits; later its tokens are read again, like a prompt. Texts that
begin alike share full pages.

A draft, another model, may propose tokens: a step then reads them all at once, and a text gets those that the model
draws too, and one more (Leviathan et al. 2023). What is drawn depends on the seed and on the token's place, so that
texts are the same as without a draft, drawn ones too. Both models have their keys and values in pages of the same
numbers; those of tokens that the model did not draw are written again.

Over a mesh the rows of a batch, and the pages, lie in equal parts on its devices: a text has its pages where its row
is.
"""

import abc
from collections import deque
from collections.abc import Callable, Mapping, Sequence
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
_WATCHED = 8  # steps on one host, and the steps of a block over a mesh, of which one is noted
DRAFTED = 3  # tokens that a draft proposes; with the newest one they are the rows that a product has anyhow
_WIDTH = 16  # of which this many, or a multiple, belong to one prompt: never one alone, which rounds differently


class PagedFunctions(Protocol):
    """The functions of a generator that a batch calls.

    Attributes:
        fewest_rows: of a step, so that its results are those of any number of rows.
    """

    fewest_rows: int

    def Pool(self, pages: int) -> list[tf.Tensor]:
        """Empty pages, as many of each layer."""

    def Fill(self, places: Sequence[Any], pool: list[tf.Tensor]) -> list[tf.Tensor]:
        """Reads tokens: see PagedSearch.Extend. Returns the pool."""

    def Step(
        self, places: Sequence[Any], more: Sequence[Any], pool: list[tf.Tensor]
    ) -> tuple[list[tf.Tensor], np.ndarray, np.ndarray, Mapping[str, tf.Tensor]]:
        """Draws tokens: see PagedSearch.Step; `more` is before_BL, step_B and the settings. The last result has
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


class TextBatch(abc.ABC):
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
        loads: the experts' rows, of one step in _WATCHED; None where they are not known.
    """

    def __init__(self, rows: int, pools: Sequence[PagePool]):
        self._rows, self._pools = rows // len(pools), pools
        self.running: list[RunningText] = []
        self.waiting: deque[RunningText] = deque()
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

    def Join(self, text: RunningText) -> None:
        """Adds a text. Raises DataError: the pages of all texts are too few for it."""
        longest = text.prompt + text.settings.max_tokens
        if pages_of(longest) > (most := self._pools[0].pages):
            share = "" if len(self._pools) == 1 else " on its device"
            raise DataError(
                f"a prompt of {text.prompt} tokens and max_tokens={text.settings.max_tokens} need more than the "
                f"{most * PAGE} tokens that all texts together may have here{share}"
            )
        self.waiting.append(text)

    def Leave(self, text: RunningText) -> None:
        """Takes a text out, if it is there."""
        if text in self.running:
            self.running.remove(text)
        elif text in self.waiting:
            self.waiting.remove(text)
        self._GiveBack(text)

    def Step(self) -> list[RunningText]:
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
    def _Fill(self, parts: Sequence[tuple[RunningText, int]]) -> None:
        """Reads tokens of texts, up to a number of them each."""

    @abc.abstractmethod
    def _Draw(self, texts: Sequence[RunningText]) -> None:
        """Draws the next tokens of texts, whose own were read."""

    def _Longest(self, text: RunningText) -> int:
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

    def _Fitness(self, text: RunningText, part: int) -> tuple[bool, int]:
        """The greater, the sooner the part has pages for a text."""
        pool = self._pools[part]
        return text.left >= PAGE and pool.Has(text.Name(0)), pool.free

    def _Parts(self) -> list[tuple[RunningText, int]]:
        """The texts of which tokens are read now, and up to which one."""
        parts: list[tuple[RunningText, int]] = []
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
        return min(-(-tokens // _WIDTH) * _WIDTH, FILLED)

    def _Reuse(self, text: RunningText) -> None:
        """Takes the pages of others that have its next tokens."""
        while (
            text.filled == len(text.pages) * PAGE
            and text.left >= PAGE
            and (page := self._pools[text.part].Find(text.Name(len(text.pages))))
        ):
            text.pages.append(page)
            text.filled = text.ahead = text.filled + PAGE

    def _HasPages(self, text: RunningText, tokens: int) -> bool:
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

    def _SendBack(self, text: RunningText) -> None:
        """Has a text give its pages back and wait for others."""
        self.running.remove(text)
        self._GiveBack(text)
        self.waiting.appendleft(text)

    def _GiveBack(self, text: RunningText) -> None:
        # Of a chain of names, the last ones are no use without the first.
        for page in reversed(text.pages):
            self._pools[text.part].Give(page)
        text.pages, text.filled, text.ahead = [], 0, 0

    def _Filled(self, text: RunningText, until: int) -> None:
        for number in range(text.filled // PAGE, until // PAGE):
            self._pools[text.part].Name(text.pages[number], text.Name(number))
        text.filled = until

    def _Note(self, choices_LRk: np.ndarray, num_experts: int) -> None:
        """Adds the experts that the texts of a step chose to `loads`."""
        self.loads = self.loads or ExpertLoads(num_experts)
        self.loads.Add(choices_LRk)

    def _Add(self, text: RunningText, token: int, log_prob: float) -> bool:
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


class RunningBatch(TextBatch):
    """A batch on one host.

    Args:
        functions: of the model.
        pages: of keys and values.
        draft: the functions of a model that proposes tokens.
    """

    def __init__(
        self, functions: PagedFunctions, rows: int, pages: int, draft: PagedFunctions | None = None
    ):
        super().__init__(rows, [PagePool(pages)])
        self._model = _Model(functions, pages)
        self._draft = _Model(draft, pages) if draft else None
        self._steps = 0

    def _Fill(self, parts: Sequence[tuple[RunningText, int]]) -> None:
        width = -(-max(until - text.filled for text, until in parts) // _WIDTH) * _WIDTH
        rows = [(text, text.filled, text.ids[text.filled : until]) for text, until in parts]
        for model in filter(None, (self._model, self._draft)):
            model.Fill(rows, width)
        for text, until in parts:
            text.ahead = until

    def _Draw(self, texts: Sequence[RunningText]) -> None:
        drafts = self._Drafts(texts)
        parts = [(t, len(t.ids) - 1, [t.ids[-1], *ids]) for t, ids in zip(texts, drafts)]
        width = 1 + max(map(len, drafts))
        # Several tokens are as many rows as a product needs, and a single text's queries too.
        width, rows = (1, self._model.fewest) if width == 1 else (max(width, FEWEST_ROWS), 1)
        tokens_BT, log_probs_BT, out = self._model.Step(parts, width, max(len(texts), rows))
        if "experts" in out and self._steps % _WATCHED == 0:
            self._Note(out["experts"].numpy()[:, : len(texts)], int(out["num_experts"]))
        self._steps += 1
        for text, ids, *drawn in zip(texts, drafts, tokens_BT.tolist(), log_probs_BT.tolist()):
            self._Take(text, ids, *drawn)

    def _Take(
        self, text: RunningText, draft: list[int], tokens: list[int], log_probs: list[float]
    ) -> None:
        """Adds the tokens that were drawn after the newest one and after those of a draft, as far as that is right."""
        before, taken = len(text.ids), 0
        for token, log_prob, proposed in zip(tokens, log_probs, [*draft, None]):
            if not self._Add(text, token, log_prob) or token != proposed:
                break
            taken += 1
        self._Filled(text, before + taken)
        text.ahead = min(text.ahead, text.filled)
        for one in (self, text):
            one.drafted, one.taken = one.drafted + len(draft), one.taken + taken

    def _Drafts(self, texts: Sequence[RunningText]) -> list[list[int]]:
        """The tokens that the draft proposes for each text."""
        drafts: list[list[int]] = [[] for _ in texts]
        if self._draft is None:
            return drafts
        going = [(t, ids, self._MostDrafted(t)) for t, ids in zip(texts, drafts)]
        while going := [(t, ids, most) for t, ids, most in going if len(ids) < most]:
            parts = [(t, t.ahead, (t.ids + ids)[t.ahead :]) for t, ids, _ in going]
            width = max(len(ids) for *_, ids in parts)
            tokens_BT, *_ = self._draft.Step(parts, width, len(parts))
            following = []
            for one, (text, start, ids), row in zip(going, parts, tokens_BT.tolist()):
                text.ahead = start + len(ids)
                if (token := row[len(ids) - 1]) >= 0:  # behind an end there is nothing to propose
                    one[1].append(token)
                    following.append(one)
            going = following
        return drafts

    def _MostDrafted(self, text: RunningText) -> int:
        """The number of tokens to propose, for which the text takes pages that are free.

        With a repetition penalty it is 0: each token would be drawn by others before it.
        """
        most = min(DRAFTED, text.settings.max_tokens - len(text.log_probs) - 1)
        if text.settings.repetition_penalty != 1:
            return 0
        while len(text.pages) < pages_of(len(text.ids) + most) and (page := self._pools[0].Take()):
            text.pages.append(page)
        return min(most, len(text.pages) * PAGE - len(text.ids))


def pages_of(tokens: int) -> int:
    """The number of pages that so many tokens fill."""
    return -(-tokens // PAGE)


# A text, a position of it, and the ids from there on.
_Part = tuple[RunningText, int, list[int]]


class _Model:
    """The functions of a model, and its pages."""

    def __init__(self, functions: PagedFunctions, pages: int):
        self._functions, self.fewest = functions, functions.fewest_rows
        self._pool = functions.Pool(pages + 1)

    def Fill(self, parts: Sequence[_Part], width: int) -> None:
        """Reads tokens."""
        self._pool = self._functions.Fill(_places(parts, width, len(parts)), self._pool)

    def Step(
        self, parts: Sequence[_Part], width: int, rows: int
    ) -> tuple[np.ndarray, np.ndarray, Mapping[str, tf.Tensor]]:
        """Draws the token after each of some; see PagedSearch.Step."""
        texts = [text for text, *_ in parts]
        values = [text.settings.Values()[1:] for text in texts]
        values += [Sampling().Values()[1:]] * (rows - len(texts))
        step_B = np.zeros([rows], np.int32)
        step_B[: len(texts)] = [start + 1 - text.prompt for text, start, _ in parts]
        penalized = any(text.settings.repetition_penalty != 1 for text in texts)
        longest = max(len(text.ids) for text in texts) if penalized else 0
        before_BL = np.zeros([rows, longest], np.int32)
        for row, text in zip(before_BL, texts):
            row[:] = (text.ids + text.ids[:1] * longest)[:longest]
        more = [before_BL, step_B, *map(list, zip(*values))]
        places = _places(parts, width, rows)
        self._pool, tokens_BT, log_probs_BT, out = self._functions.Step(places, more, self._pool)
        return tokens_BT, log_probs_BT, out


def _places(parts: Sequence[_Part], width: int, rows: int) -> list[np.ndarray]:
    """The arguments PLACES for the tokens of texts; what is padding goes to page 0."""
    ids_BT, at_BT, slot_BT = (np.zeros([rows, width], np.int32) for _ in range(3))
    pages, owners, firsts = [], [], []
    for row, (text, start, ids) in enumerate(parts):
        at = np.arange(start, start + len(ids))
        used = np.asarray(text.pages[: pages_of(start + len(ids))])
        ids_BT[row, : at.size] = ids
        at_BT[row] = start + np.arange(width)
        slot_BT[row, : at.size] = used[at // PAGE] * PAGE + at % PAGE
        pages.append(used)
        owners.append(np.full(used.size, row))
        firsts.append(np.arange(used.size) * PAGE)
    padding = np.arange(len(parts), rows)
    pages, owners, firsts = [*pages, padding * 0], [*owners, padding], [*firsts, padding * 0]
    flat = (np.concatenate(x).astype(np.int32) for x in (pages, owners, firsts))
    return [ids_BT, at_BT, slot_BT, *flat]
