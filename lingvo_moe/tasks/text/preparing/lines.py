"""Lines that were read from a source, and the pairs of a JSON object."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from lingvo_moe.tasks.text.preparing.sources import Fields, is_language

_HALF_CHARACTER = re.compile("[\ud800-\udfff]")


class ReadLine(NamedTuple):
    """A line that was read: a pair, or a reason why it is none."""

    number: int  # of the line in its file, from 1
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
    of = {lang: texts.get(lang)} if lang else texts if texts is inner else {}
    found = [
        (code, text)
        for code, text in of.items()
        if isinstance(text, str) and code != fields.target_lang
    ]
    if not isinstance(target, str) or not found:
        yield bad(number, lang, "no_field")
    for code, text in found if isinstance(target, str) else ():
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
