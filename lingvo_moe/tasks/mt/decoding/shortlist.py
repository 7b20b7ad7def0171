"""A vocabulary shortlist: for each source piece the target pieces that it is translated by, and those for every line.

Decoding with one scores, for a line, the candidates of its pieces and the frequent ones, and no others
(shortlist_columns.py). tools.shortlist makes the file: a compressed .npz, whose comment, the last bytes of a zip file,
ends with the SHA-256 of all before it.
"""

import hashlib
import io
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lingvo_moe.core.files.files import write_atomic
from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.vocabulary.special_ids import EOS_ID, PAD_ID, UNK_ID

_FORMAT = 2
_DIGITS = 64  # of a SHA-256 in hex
_COMMENT = b"sha256 of the bytes before: "
_MAKE = "make one with python -m tools.shortlist --logdir=RUN --output=FILE"
_ZIP = b"PK\x03\x04"  # how a zip file begins
_SIDES = ("source", "target")


@dataclass(frozen=True)
class Shortlist:
    """The target pieces that a search scores: those for each source piece, and those for every line."""

    # int32 [source pieces, K], the target pieces for each source piece, filled up with EOS.
    candidates: np.ndarray
    # int32 [n], the target pieces for every line, in ascending order. They begin with PAD, BOS, EOS and UNK, of which
    # a search emits EOS only.
    always: np.ndarray
    digests: dict[str, str]  # SHA-256, in hex, of the vocabularies, by side: 'source' and 'target'
    name: str = field(default="the shortlist", compare=False)  # the name in error messages

    def __post_init__(self) -> None:
        """Raises DataError if a part has a wrong type, shape or range."""
        if self.candidates.ndim != 2 or min(self.candidates.shape) < 1 or self.always.ndim != 1:
            raise DataError(
                f"a shortlist of {self.candidates.shape} and {self.always.shape} ids; it must be [pieces, K] and [n]"
            )
        if (self.candidates[PAD_ID] != EOS_ID).any():
            raise DataError("a shortlist with candidates of padding: lines would depend on others'")
        if self.always[: UNK_ID + 1].tolist() != [0, 1, 2, 3] or (np.diff(self.always) < 1).any():
            raise DataError("a shortlist whose pieces for every line are not 0, 1, 2, 3 and rising")

    @classmethod
    def Make(
        cls,
        candidates: Sequence[Sequence[int] | np.ndarray],
        always: Sequence[int],
        vocabs: dict[str, bytes],
    ) -> "Shortlist":
        """Makes a shortlist from lists of any lengths.

        Args:
            candidates: for each source piece, its target pieces; those for PAD are ignored.
            always: target pieces for every line; 0 to 3 are added.
            vocabs: serialised SentencePiece models, by side: 'source' and 'target'.
        """
        longest = max(1, *map(len, candidates))
        table = np.full((len(candidates), longest), EOS_ID, np.int32)
        for row, ids in zip(table[PAD_ID + 1 :], candidates[PAD_ID + 1 :], strict=True):
            row[: len(ids)] = ids
        every = np.union1d(np.arange(UNK_ID + 1), np.asarray(always, np.int64)).astype(np.int32)
        return cls(table, every, {side: _digest(vocabs[side]) for side in _SIDES})

    def Of(self, source_ids: Sequence[int]) -> np.ndarray:
        """Returns the target pieces that a line is scored for: int32, in ascending order, each once.

        Args:
            source_ids: the line's source pieces, including EOS.
        """
        return np.union1d(self.always, self.candidates[list(source_ids)])

    def Save(self, path: str | os.PathLike) -> None:
        """Writes the file atomically. Raises OSError, which names the file."""
        ids = np.uint16 if max(self.candidates.max(), self.always.max()) < 2**16 else np.int32
        arrays: dict[str, Any] = {
            "format": np.int32(_FORMAT),
            "candidates": self.candidates.astype(ids),
            "always": self.always.astype(ids),
            **{f"{side}_sha256": np.bytes_(self.digests[side]) for side in _SIDES},
        }
        file = io.BytesIO()
        np.savez_compressed(file, **arrays)
        with zipfile.ZipFile(file, "a") as archive:
            archive.comment = _COMMENT + b"0" * _DIGITS
        body = file.getvalue()[:-_DIGITS]
        write_atomic(path, body + _digest(body).encode())

    @classmethod
    def Load(cls, path: str | os.PathLike) -> "Shortlist":
        """Reads what Save wrote.

        Raises DataError: it is missing, damaged, or no shortlist; the message names --shortlist and the file.
        """
        flag = f"--shortlist={path}"
        if not os.path.exists(path):
            raise DataError(f"{flag}: there is no such file; {_MAKE}")
        if not os.path.isfile(path):
            raise DataError(f"{flag} is not a file; {_MAKE}")
        try:
            with open(path, "rb") as file:
                start = file.read(len(_ZIP))
                data = start + file.read() if start == _ZIP else b""
        except OSError as e:
            raise DataError(f"{flag}: {e.strerror or e}") from e
        if not data:
            raise DataError(f"{flag} is not a file of tools.shortlist; {_MAKE}")
        body, digest = data[:-_DIGITS], data[-_DIGITS:]
        if not body.endswith(_COMMENT) or digest != _digest(body).encode():
            raise DataError(
                f"{flag} is damaged, or not of this version of tools.shortlist; {_MAKE}"
            )
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                if arrays["format"] != _FORMAT:
                    raise ValueError(f"format {arrays['format']}, where {_FORMAT} is known")
                return cls(
                    arrays["candidates"].astype(np.int32),
                    arrays["always"].astype(np.int32),
                    {side: arrays[f"{side}_sha256"].item().decode() for side in _SIDES},
                    flag,
                )
        # Of zipfile, zlib and NumPy: bytes with a right digest may be anything.
        except Exception as e:
            raise DataError(
                f"{flag} is not of this version of tools.shortlist ({type(e).__name__}: {e}); {_MAKE}"
            ) from e

    def Check(self, vocabs: dict[str, bytes], sizes: dict[str, int]) -> None:
        """Checks that the shortlist was made for these vocabularies.

        Raises DataError: it was made for others, or contains ids that they do not have.
        """
        for side in _SIDES:
            if self.digests[side] != _digest(vocabs[side]):
                raise DataError(
                    f"{self.name} was made for another {side} vocabulary than the model's: "
                    "make one with tools.shortlist --logdir=RUN, of this model's run"
                )
        least, largest = self.candidates.min(), max(self.candidates.max(), self.always.max())
        if len(self.candidates) != sizes["source"] or least < 0 or largest >= sizes["target"]:
            raise DataError(
                f"{self.name} has {len(self.candidates)} source pieces and target pieces from {least} to {largest}, "
                f"the vocabularies {sizes['source']} and {sizes['target']}: it is damaged"
            )

    def About(self) -> dict[str, Any]:
        """Returns its sizes, for printing and JSON: `per_source_piece` (K) and `every_line` (n)."""
        return {"per_source_piece": self.candidates.shape[1], "every_line": len(self.always)}


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
