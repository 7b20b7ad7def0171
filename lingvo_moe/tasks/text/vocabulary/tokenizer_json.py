"""The tokenizer.json of a checkpoint as a vocabulary, by the library `tokenizers`; ids are those of the checkpoint."""

import contextlib
import functools
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lingvo_moe.core.console.quiet import quiet
from lingvo_moe.core.files.files import read_object
from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.data.tidying import tidy_text

NAME, CONFIG = "tokenizer.json", "tokenizer_config.json"
# The file of a checkpoint that may list the ids that end an answer; config.json does, where it does not.
GENERATION = "generation_config.json"
ENDS, _TEMPLATE = "eos_token_id", "chat_template"
_MOST_TEMPLATE = 1 << 20  # characters
_MARKS = ("bos_token", "eos_token", "pad_token", "unk_token")
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")  # a piece of one byte, of tokenizers with byte fallback


class JsonVocabulary:
    """A tokenizer and the tokens that mark a text; see Vocabulary for what is the same.

    Where a tokenizer has no mark for the begin of a text, that of its end stands there too; a missing pad_id is that of
    the end, which padding's place tells apart, and a missing unk_id is -1. A text that spells a mark is text.

    Attributes:
        marks: the spelling of each mark, by its name in tokenizer_config.json.
        special: the spellings of all tokens that are no text.
        other_ends: ids, beside eos_id, that end an answer.
        chat_template: a program for Chat; '' for none.
    """

    def __init__(self, model_bytes: bytes, path: str | os.PathLike | None = None, tidied: int = 0):
        """`model_bytes` are as Load makes them. Raises DataError: they are not, or the library is not installed."""
        where = path or NAME
        try:
            from tokenizers import Tokenizer
        except ImportError as e:
            how = "pip install --no-deps -r requirements-tokenizers.txt"
            raise DataError(
                f"{where}: is read by the library tokenizers, which is not installed: {how}"
            ) from e
        self.model_bytes, self.path = model_bytes, Path(path) if path else None
        self.tidied = tidied
        with quiet(DataError), _library(f"{where}: no tokenizer, or damaged"):
            about = json.loads(model_bytes)
            self._tokenizer = Tokenizer.from_str(json.dumps(about[NAME]))
            marks = dict(about[CONFIG])
            self.chat_template = str(marks.pop(_TEMPLATE, ""))
            ends = {int(i) for i in about.get(ENDS, [])}
            self._tokenizer.no_padding()
            self._tokenizer.no_truncation()
            self._tokenizer.encode_special_tokens = True
            self.size: int = 1 + max(self._tokenizer.get_vocab().values())
            added = self._tokenizer.get_added_tokens_decoder()
        self._special = {i for i, token in added.items() if token.special}
        self.special = [added[i].content for i in sorted(self._special)]
        self._has_bytes = '"ByteFallback"' in json.dumps(about[NAME].get("decoder"))
        ids = {name: self._Id(marks[name], name, where) for name in _MARKS if marks.get(name)}
        self.marks = {name: self._tokenizer.id_to_token(i) for name, i in ids.items()}
        if "eos_token" not in ids:
            raise DataError(
                f'{where}: {CONFIG} must name the mark of a text\'s end, as "eos_token"'
            )
        self.eos_id: int = ids["eos_token"]
        self.bos_id: int = ids.get("bos_token", self.eos_id)
        self.pad_id: int = ids.get("pad_token", self.eos_id)
        self.unk_id: int = ids.get("unk_token", -1)
        if outside := [i for i in ends if i not in range(self.size)]:
            raise DataError(f"{where}: {ENDS} has {outside[0]}; there are {self.size} tokens")
        self.other_ends = tuple(sorted(ends - {self.eos_id}))

    @classmethod
    def Load(cls, directory: str | os.PathLike) -> "JsonVocabulary":
        """Reads tokenizer.json and tokenizer_config.json of a checkpoint. Raises DataError, as the class."""
        content: dict[str, Any] = {}
        for name in (NAME, CONFIG):
            path = Path(directory) / name
            try:
                content[name] = json.loads(path.read_bytes())
                # It has no half of a surrogate pair.
                json.dumps(content[name], ensure_ascii=False).encode()
            except (OSError, ValueError, RecursionError) as e:
                raise DataError(
                    f"{path}: {getattr(e, 'strerror', None) or e}; expected a file of a checkpoint"
                ) from e
        marks = content[CONFIG] if isinstance(content[CONFIG], dict) else {}
        content[CONFIG] = {name: marks[name] for name in _MARKS if marks.get(name)}
        content[CONFIG] |= _chat_template(Path(directory), marks.get(_TEMPLATE))
        content |= _ends(Path(directory))
        return cls(json.dumps(content, ensure_ascii=False).encode(), Path(directory) / NAME)

    def _Id(self, mark: Any, name: str, where: Any) -> int:
        text = mark.get("content") if isinstance(mark, dict) else mark
        token_id = self._tokenizer.token_to_id(text) if isinstance(text, str) else None
        if token_id is None:
            raise DataError(f"{where}: {CONFIG} names {name}={text!r}, which is no token of {NAME}")
        return token_id

    def Encode(self, text: str) -> list[int]:
        """The ids of a text, without marks."""
        return self.EncodeBatch([text])[0]

    def EncodeBatch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode for many texts, faster."""
        tidy = [tidy_text(text, self.tidied) for text in texts]
        with _library(f"{self.path or NAME}: the tokenizer fails at a text"):
            encoded = self._tokenizer.encode_batch(tidy, add_special_tokens=False)
            return [one.ids for one in encoded]

    def EncodeMarked(self, text: str) -> list[int]:
        """The ids of a text in which what spells a mark is that mark."""
        with _library(f"{self.path or NAME}: the tokenizer fails at a text"):
            return self._marking.encode(text, add_special_tokens=False).ids

    @functools.cached_property
    def _marking(self) -> Any:
        """A tokenizer of its own: other threads encode texts with the other one meanwhile."""
        tokenizer = type(self._tokenizer).from_str(self._tokenizer.to_str())
        tokenizer.encode_special_tokens = False
        return tokenizer

    def Pieces(self, ids: Sequence[int]) -> list[str]:
        """The piece that each id stands for, as tokenizer.json spells it: bytes often as other letters."""
        return [self._tokenizer.id_to_token(i) or "" for i in ids]

    def Decode(self, ids: Iterable[int]) -> str:
        """The text of ids without marks, up to the mark of its end. U+FFFD stands for a character that is not whole."""
        tokens: list[int] = []
        for i in ids:
            if i == self.eos_id and tokens:
                break
            tokens.append(int(i))
        with _library(f"{self.path or NAME}: the tokenizer fails at tokens"):
            if not self._has_bytes:
                return self._tokenizer.decode(tokens)
            pieces = [self._tokenizer.id_to_token(i) for i in tokens if i not in self._special]
            return self._tokenizer.decoder.decode(_without_broken_bytes(filter(None, pieces)))


def _chat_template(directory: Path, template: Any) -> dict[str, str]:
    """The chat template by its key: that of a file of its own, or of tokenizer_config.json. Raises DataError."""
    path = directory / f"{_TEMPLATE}.jinja"
    try:
        if path.exists():
            template = path.read_text("utf-8")
    except (OSError, ValueError) as e:
        raise DataError(f"{path}: {getattr(e, 'strerror', None) or e}") from e
    if isinstance(template, list):  # several, by name
        named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("default")
    if template is None:
        return {}
    if not isinstance(template, str) or len(template) > _MOST_TEMPLATE:
        raise DataError(
            f"{directory}: {_TEMPLATE} must be a text of at most {_MOST_TEMPLATE:,} characters"
        )
    return {_TEMPLATE: template} if template else {}


def _ends(directory: Path) -> dict[str, list[int]]:
    """The ids that end an answer, by their key. Raises DataError."""
    for path in (directory / name for name in (GENERATION, "config.json")):
        ends = read_object(path, DataError).get(ENDS) if path.exists() else None
        if ends is not None:
            ends = ends if isinstance(ends, list) else [ends]
            if not all(type(i) is int for i in ends):
                raise DataError(f"{path}: {ENDS} must be an id or a list of ids")
            return {ENDS: sorted(ends)}
    return {}


def _without_broken_bytes(pieces: Iterable[str]) -> list[str]:
    """The pieces, with U+FFFD for each part of a run of bytes that is no character, as Python decodes UTF-8.

    The library takes a run with such a part for so many U+FFFD, also its characters.
    """
    out: list[str] = []
    for is_byte, run in itertools.groupby(pieces, lambda piece: bool(_BYTE.fullmatch(piece))):
        if not is_byte:
            out += run
            continue
        text = bytes(int(piece[3:5], 16) for piece in run).decode("utf-8", "replace")
        for letter in text:
            spelled = [f"<0x{byte:02X}>" for byte in letter.encode()]
            out += [letter] if letter == "\ufffd" else spelled
    return out


@contextlib.contextmanager
def _library(failed: str) -> Iterator[None]:
    """Raises DataError, with what has failed, for any error of the library: plain ones, and panics, which are no
    Exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as e:
        raise DataError(f"{failed}: {' '.join(str(e).split())[:300]}") from e
