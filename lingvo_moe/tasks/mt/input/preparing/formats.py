"""Reads pairs out of a source, a line at a time: TSV, JSON lines, two files side by side, a TFDS builder."""

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from lingvo_moe.tasks.mt.input.errors import DataError
from lingvo_moe.tasks.mt.input.opening import read_lines
from lingvo_moe.tasks.mt.input.preparing.sources import Fields, Source, is_language

_HALF_CHARACTER = re.compile("[\ud800-\udfff]")


class Line(NamedTuple):
    """A line that was read: a pair, or a reason why it is none.

    Attributes:
        number: of the line in its file, from 1.
        lang: its language; None where it names none.
        source, target: the texts; empty with a reason.
        reason: 'no_tab', 'invalid_utf8', 'too_long_line', 'bad_json', 'no_field' or 'no_language'; '' for a pair.
    """

    number: int
    lang: str | None
    source: str
    target: str
    reason: str = ""


def read_source(source: Source, fields: Fields) -> Iterator[Line]:
    """Streams the lines of a source, good and bad.

    Raises:
        DataError: a file cannot be read or is damaged, or two files have different numbers of lines.
    """
    if source.form == "tfds":
        from lingvo_moe.tasks.mt.input.preparing.tfds_source import read_builder

        return read_builder(source.path, fields)
    readers = {"tsv": _read_tsv, "jsonl": _read_json, "lines": _read_two_files, "txt": _read_texts}
    return readers[source.form](source, fields)


def _read_tsv(source: Source, fields: Fields) -> Iterator[Line]:
    at = {name: fields.columns.index(name) for name in fields.columns}
    last = max(i for name, i in at.items() if name != "_")
    for number, text, reason in read_lines(source.path):
        if text is None:
            yield _bad(number, source.lang, reason)
            continue
        columns = text.split("\t", last + 1)
        if len(columns) <= last:
            yield _bad(number, source.lang, "no_tab")
            continue
        lang = source.lang or columns[at["lang"]].strip()
        yield _pair(number, lang, columns[at["source"]], columns[at["target"]])


def _read_two_files(source: Source, fields: Fields) -> Iterator[Line]:
    del fields
    lines = read_lines(source.path), read_lines(source.target or "")
    for ours, theirs in itertools.zip_longest(*lines):
        if ours is None or theirs is None:
            done = (ours or theirs)[0]
            longer = done + sum(1 for _ in lines[ours is None])
            counts = (longer, done - 1) if theirs is None else (done - 1, longer)
            raise DataError(
                f"{source.path} has {counts[0]:,} lines and {source.target} has {counts[1]:,}: the lines of a pair"
                " of files must belong together, one by one"
            )
        number, text, reason = ours
        if text is None or theirs[1] is None:
            yield _bad(number, source.lang, reason or theirs[2])
        else:
            yield _pair(number, source.lang, text, theirs[1])


def _read_texts(source: Source, fields: Fields) -> Iterator[Line]:
    del fields
    for number, text, reason in read_lines(source.path):
        if text is None:
            yield _bad(number, source.lang, reason)
        else:
            yield _pair(number, source.lang, text, text)


def _read_json(source: Source, fields: Fields) -> Iterator[Line]:
    for number, text, reason in read_lines(source.path):
        if text is None:
            yield _bad(number, source.lang, reason)
            continue
        try:
            item = json.loads(text)
        except (ValueError, RecursionError):
            item = None
        if not isinstance(item, dict):
            yield _bad(number, source.lang, "bad_json")
            continue
        yield from pairs_of_item(number, item, source.lang, fields)


def pairs_of_item(
    number: int, item: dict[str, Any], lang: str | None, fields: Fields
) -> Iterator[Line]:
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
    of = {lang: texts.get(lang)} if lang else texts if texts is inner else {}
    found = [
        (code, text)
        for code, text in of.items()
        if isinstance(text, str) and code != fields.target_lang
    ]
    if not isinstance(target, str) or not found:
        yield _bad(number, lang, "no_field")
    for code, text in found if isinstance(target, str) else ():
        yield _whole_pair(number, code, text, target)


def _first(item: dict[str, Any], names: Sequence[str]) -> Any:
    return next((item[name] for name in names if name in item), None)


def _whole_pair(number: int, lang: str | None, source: str, target: str) -> Line:
    """As _pair. JSON can spell halves of characters, and bytes of TFDS can be anything; no file of text holds such."""
    half = _HALF_CHARACTER.search(source) or _HALF_CHARACTER.search(target)
    return _bad(number, lang, "invalid_utf8") if half else _pair(number, lang, source, target)


def _pair(number: int, lang: str | None, source: str, target: str) -> Line:
    if not lang or not is_language(lang):
        return _bad(number, None, "no_language")
    return Line(number, lang, source, target)


def _bad(number: int, lang: str | None, reason: str) -> Line:
    if lang is not None and not is_language(lang):
        lang = None  # files and directories are named by it
    return Line(number, lang, "", "", "too_long_line" if reason == "too_long" else reason)
