"""A running batch of a language model on one host.

A draft, another model, may propose tokens: a step then reads them all at once, and a text gets those that the model
draws too, and one more (Leviathan et al. 2023). What is drawn depends on the seed and on the token's place, so that
texts are the same as without a draft, drawn ones too. Both models have their keys and values in pages of the same
numbers; those of tokens that the model did not draw are written again.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from lingvo_moe.core.decode.pages import PAGE, PagePool
from lingvo_moe.core.decode.ranges import Sampling
from lingvo_moe.core.kernels.weights import FEWEST_ROWS
from lingvo_moe.tasks.text.decoding.text_batch import WIDTH, RunningText, TextBatch, pages_of

_WATCHED = 8  # steps on one host, and the steps of a block over a mesh, of which one is noted
DRAFTED = 3  # tokens that a draft proposes; with the newest one they are the rows that a product has anyhow


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


class RunningBatch(TextBatch[RunningText]):
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
        width = -(-max(until - text.filled for text, until in parts) // WIDTH) * WIDTH
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
