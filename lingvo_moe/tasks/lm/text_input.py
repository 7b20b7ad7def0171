"""LmInput: packed rows of text. Letters: B row of the batch, T time.

A text stands between the marks of its begin and its end. A row has a position for each token but the last, which is
only predicted. So a text longer than a row goes on in others: a part begins with the token that the part before
predicted last.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams
from lingvo_moe.core.input.base_input import ArraySpec
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.text.batches.packed_input import PackedBatches, PackedInput
from lingvo_moe.tasks.text.batches.rows_of_pairs import Shape, Sized
from lingvo_moe.tasks.text.vocabulary.tokenizer_json import NAME, JsonVocabulary

_ROWS = ("ids", "labels", "segment_ids", "segment_pos")


def text_batch(rows: Sequence[Sequence[Any]], shape: Shape) -> NestedMap:
    """The arrays of a batch from the parts of texts in each row, int32 [at most T + 1] each.

    Returns:
        NestedMap of int32 [B,T]: `ids` and `labels`, all tokens of a part but its last, and its first; `segment_ids`
        (1, 2, ... by part, 0 for padding) and `segment_pos` (0, 1, ... within a part). Padding is 0.
    """
    size = shape.rows, shape.target_length
    batch = NestedMap({name: np.zeros(size, np.int32) for name in _ROWS})
    for row, parts in enumerate(rows):
        start = 0
        for segment, part in enumerate(parts, 1):
            end = start + len(part) - 1
            batch.ids[row, start:end], batch.labels[row, start:end] = part[:-1], part[1:]
            batch.segment_ids[row, start:end] = segment
            batch.segment_pos[row, start:end] = np.arange(end - start)
            start = end
    return batch


class LmInput(PackedInput):
    """The input of a language model: texts, or the target sides of pairs, so that one data directory serves both tasks.

    The vocabulary is that of the data's targets, or a checkpoint's tokenizer.json.
    """

    TOO_LONG: ClassVar[tuple[str, ...]] = ("split", *PackedInput.TOO_LONG)
    BATCH_SIZES: ClassVar[tuple[str, ...]] = ("batch_size", "target_length")
    DATA: ClassVar[str] = (
        "<lang>.tsv.gz files, or of texts in NAME.txt, NAME.jsonl, plain, .gz or .zst"
    )
    VOCAB_SETTINGS: ClassVar[Mapping[str, str]] = {
        "target": "input.target_vocab_size={most};task.vocab_size={most}"
    }
    ToBatch = staticmethod(text_batch)
    WORDS = "texts", "files"

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.OnlyWith("source_vocab_size", lambda p: f"cls={p.cls.__name__}")
        p.Define("text_field", "text", "The field with the text, in files of JSON.", checks.TEXT)
        return p

    def BatchSpec(self) -> NestedMap:
        """See BaseInput: int32 [B,T] arrays."""
        spec = ArraySpec((self.p.batch_size, self.p.target_length), "int32", "BT")
        return NestedMap(dict.fromkeys(_ROWS, spec))

    def Warnings(self) -> list[str]:
        """See PackedInput; a text that is split is not lost."""
        return [] if self.p.too_long == "split" else super().Warnings()

    def Parts(self, ids: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """The parts of a text, int32 [at most T + 1]; none of one that is dropped."""
        p, vocabulary = self.p, self.vocabs.target
        if p.too_long != "split" and len(ids) >= p.target_length:
            ids = [] if p.too_long == "drop" else ids[: p.target_length - 1]
        whole = marked(ids, vocabulary)
        starts = range(0, len(whole) - 1, p.target_length) if len(ids) else ()
        return [whole[at : at + p.target_length + 1] for at in starts]

    def _Field(self) -> str:
        return self.p.text_field

    def _Load(self, directory: str | os.PathLike, sides: Sequence[str]) -> NestedMap:
        if not (Path(directory) / NAME).exists():
            return super()._Load(directory, sides)
        vocabulary = JsonVocabulary.Load(directory)
        return NestedMap(source=vocabulary, target=vocabulary)

    @staticmethod
    def Whole(
        source: Sequence[int], target: Sequence[int], about: tuple[Any, ...], vocabs: NestedMap
    ) -> Any:
        return marked(target, vocabs.target)

    def __iter__(self) -> "TextIterator":
        """Endless batches from the beginning; each call starts from the beginning."""
        return TextIterator(self)

    def _HeldOutPairs(self, pairs: Sequence[tuple[str, str]]) -> Sequence[np.ndarray]:
        texts = self.vocabs.target.EncodeBatch([text for _, text in pairs])
        return [part for ids in texts for part in self.Parts(ids)]

    def _HeldOutSized(self, part: np.ndarray, about: tuple[Any, ...]) -> Sized:
        return len(part) - 2, len(part) - 2, part


class TextIterator(PackedBatches):
    """Batches of packed texts, without end; see BaseInput. Of texts longer than a row each part is drawn by itself."""

    _input: LmInput

    def _Sizes(self) -> tuple[Mapping[str, int], Mapping[str, Sequence[int]]]:
        """The parts of each language, in all and of each shard."""
        records, length = self._records, self._shape.target_length
        # Of each language, for each text the number of parts up to its end; None where all texts are of one part.
        self._ends: list[np.ndarray | None] = [None] * len(records.languages)
        if self._input.p.too_long != "split":
            return super()._Sizes()
        shards = dict(records.shards)
        for language, name in enumerate(shards):
            parts = records.Lengths(language)[:, 1] // length + 1
            if parts.max() > 1:
                ends = self._ends[language] = np.cumsum(parts, dtype=np.int64)
                shards[name] = np.diff(ends[np.cumsum(shards[name]) - 1], prepend=0).tolist()
        return {name: sum(counts) for name, counts in shards.items()}, shards

    def _identity(self) -> dict[str, Any]:
        splits = any(ends is not None for ends in self._ends)
        more = {"target_length": self._shape.target_length} if splits else {}
        return super()._identity() | more

    def _At(self, language: int, parts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The texts of parts, and the number of each part in its text: int64 [N]."""
        if (ends := self._ends[language]) is None:
            return parts, np.zeros_like(parts)
        texts = np.searchsorted(ends, parts, side="right")
        return texts, parts - np.where(texts > 0, ends[texts - 1], 0)

    def _lengths(self, language: int, positions: np.ndarray) -> np.ndarray:
        texts, numbers = self._At(language, positions)
        lengths, length = super()._lengths(language, texts)[:, [1, 1]], self._shape.target_length
        if self._ends[language] is None:
            return lengths
        return np.minimum(lengths - (numbers * length)[:, np.newaxis], length - 1)

    def _read(self, language: int, position: int) -> np.ndarray:
        (text,), (number,) = self._At(language, np.array([position]))
        ids = self._records.Read(language, int(text))[1]
        return self._input.Parts(ids)[number]


def marked(ids: Sequence[int] | np.ndarray, vocabulary: Any) -> np.ndarray:
    """A text's ids between the marks of its begin and its end, int32."""
    return np.concatenate([[vocabulary.bos_id], ids, [vocabulary.eos_id]]).astype(np.int32)
