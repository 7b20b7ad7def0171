"""Sources, the lines that are read from them, and the pairs of a JSON object or a row of a table."""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lingvo_moe.core.config.checks import did_you_mean
from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.data.tsv import LANGUAGE

TFDS_FOLDER = "TranslateFolder:"
_COLUMNS = ("lang", "source", "target", "_")
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")


@dataclasses.dataclass(frozen=True)
class Fields:
    """The columns or fields of a line that hold source, target and language."""

    # What the columns of TSVs are: source, target, lang, or _ for one that says nothing.
    columns: tuple[str, ...] = ("source", "target")
    # `source`, `target`, `lang`: names of JSON fields or columns, the first of which that is there counts.
    source: tuple[str, ...] = ("source", "src")
    target: tuple[str, ...] = ("target", "tgt")
    lang: tuple[str, ...] = ("lang", "language")
    target_lang: str = "en"  # the code of the target language
    # Whether <lang>.txt may hold texts without a translation. Each becomes both sides of a pair.
    texts: bool = False

    def __post_init__(self) -> None:
        for column in self.columns:
            if column not in _COLUMNS:
                raise DataError(f"--columns: no column {column!r}{did_you_mean(column, _COLUMNS)}")
        for column in ("source", "target"):
            if self.columns.count(column) != 1:
                raise DataError(f"--columns={','.join(self.columns)}: must name {column!r} once")


@dataclasses.dataclass(frozen=True)
class Source:
    """Something to read pairs from."""

    form: str  # a key of formats.FORMATS
    path: str  # the file (with sources), or the builder's name
    lang: str | None  # the language of all its pairs; None where each line names its own
    target: str | None = None  # the file with the targets, of 'lines'

    @property
    def files(self) -> list[Path]:
        if self.form == "tfds":
            is_folder = self.path.startswith(TFDS_FOLDER)
            folder = Path(self.path.removeprefix(TFDS_FOLDER))
            return sorted(folder.glob("*.train.txt")) if is_folder else []
        return [Path(p) for p in (self.path, self.target) if p]


def is_language(code: str) -> bool:
    """Whether a text has the form of a language's code, such as de, zh-TW or sr_Latn."""
    return len(code) <= 35 and re.fullmatch(LANGUAGE, code) is not None


class ReadLine(NamedTuple):
    """A line that was read: a pair, or a reason why it is none."""

    number: int  # the number of the line in its file, from 1
    lang: str | None  # its language; None where it names none
    # `source`, `target`: the texts; empty with a reason.
    source: str
    target: str
    # 'header', 'no_tab', 'invalid_utf8', 'too_long_line', 'bad_json', 'no_field' or 'no_language'; '' for a pair.
    reason: str = ""


def pairs_of_item(
    number: int, item: dict[str, Any], lang: str | None, fields: Fields
) -> Iterator[ReadLine]:
    """The pairs of a JSON object or TFDS example.

    It has fields `source` and `target` (and `lang`), or one named by each language, perhaps within `translation`.
    """
    named = _first(item, fields.lang)
    lang = named if isinstance(named, str) else lang
    source, target = _first(item, fields.source), _first(item, fields.target)
    if isinstance(source, str) and isinstance(target, str):
        yield _whole_pair(number, lang, source, target)
        return
    inner = item.get("translation")
    texts = inner if isinstance(inner, dict) else item
    target = texts.get(fields.target_lang)
    sources = {lang: texts.get(lang)} if lang else texts if texts is inner else {}
    pairs = [
        (code, text)
        for code, text in sources.items()
        if isinstance(text, str) and code != fields.target_lang
    ]
    if not isinstance(target, str) or not pairs:
        yield bad(number, lang, "no_field")
    for code, text in pairs if isinstance(target, str) else ():
        yield _whole_pair(number, code, text, target)


def _first(item: dict[str, Any], names: Sequence[str]) -> Any:
    return next((item[name] for name in names if name in item), None)


def _whole_pair(number: int, lang: str | None, source: str, target: str) -> ReadLine:
    """Makes a pair, but no invalid UTF-8: JSON can spell halves of characters, and bytes of TFDS can be anything."""
    half = _HALF_CHARACTER.search(source) or _HALF_CHARACTER.search(target)
    return bad(number, lang, "invalid_utf8") if half else pair(number, lang, source, target)


def pair(number: int, lang: str | None, source: str, target: str) -> ReadLine:
    """A line that holds a pair; a bad one if the code of the language cannot be one."""
    if not lang or not is_language(lang):
        return bad(number, None, "no_language")
    return ReadLine(number, lang, source, target)


def bad(number: int, lang: str | None, reason: str) -> ReadLine:
    """A line that holds no pair, for a reason as ReadLine has it or 'too_long'."""
    if lang is not None and not is_language(lang):
        lang = None  # files and directories are named by it
    return ReadLine(number, lang, "", "", "too_long_line" if reason == "too_long" else reason)
