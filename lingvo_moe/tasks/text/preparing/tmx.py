"""Reads pairs out of a translation memory (TMX), a unit at a time."""

import zlib
from collections.abc import Iterator
from typing import Any
from xml.parsers import expat

from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.data.opening import MAX_LINE_BYTES, open_binary
from lingvo_moe.tasks.text.preparing.lines import Fields, ReadLine, Source, bad, pairs_of_item

_BLOCK = 1 << 16  # bytes
_CODES = ("bpt", "ept", "it", "ph", "ut")  # elements of a segment whose texts are markup


class _Units:
    """The units that a parser has read: `done`, `{language: text}` with their lines, and the one that it is in."""

    def __init__(self) -> None:
        self.done: list[tuple[int, dict[str, str]]] = []
        self.parser = parser = expat.ParserCreate()
        parser.StartElementHandler, parser.EndElementHandler = self._Start, self._End
        parser.CharacterDataHandler, parser.EntityDeclHandler = self._Text, self._Entity
        self._unit: dict[str, str] = {}
        self._lang, self._in_segment, self._in_code = "", False, 0

    def _Start(self, name: str, about: dict[str, str]) -> None:
        if name == "tu":
            self._unit = {}
        elif name == "tuv":
            self._lang = about.get("xml:lang", about.get("lang", ""))
            self._unit[self._lang] = ""
        self._in_segment |= name == "seg"
        self._in_code += name in _CODES

    def _End(self, name: str) -> None:
        if name == "tu":
            self.done.append((self.parser.CurrentLineNumber, self._unit))
        self._in_segment &= name != "seg"
        self._in_code -= name in _CODES

    def _Text(self, text: str) -> None:
        if self._in_segment and not self._in_code and len(self._unit[self._lang]) < MAX_LINE_BYTES:
            self._unit[self._lang] += text

    def _Entity(self, name: str, *about: Any) -> None:
        raise DataError(f"declares the entity {name!r}, which is not read: it could be anything")


def read_tmx(source: Source, fields: Fields) -> Iterator[ReadLine]:
    """Streams the pairs of a TMX. Nothing outside it is read, and no entity of its own.

    Raises DataError: it cannot be read, is no XML or declares entities.
    """
    units = _Units()
    try:
        with open_binary(source.path) as file:
            while True:
                block = file.read(_BLOCK)
                units.parser.Parse(block, not block)
                for number, unit in units.done:
                    yield from _pairs(number, unit, source, fields)
                units.done.clear()
                if not block:
                    return
    except (expat.ExpatError, OSError, EOFError, zlib.error, KeyError, DataError) as e:
        raise DataError(f"{source.path}:{units.parser.CurrentLineNumber}: no TMX: {e}") from e


def _pairs(number: int, unit: dict[str, str], source: Source, fields: Fields) -> Iterator[ReadLine]:
    """The pairs of a unit. A region counts where it is asked for: de-AT is de in de.tmx."""
    texts = {}
    for code, text in unit.items():
        base, *rest = code.replace("_", "-").split("-")
        code = "-".join([base.lower(), *rest])
        bases = (name for name in (fields.target_lang, source.lang) if name == base.lower())
        texts[next(bases, code)] = text
    if source.lang:
        texts = {name: texts[name] for name in (source.lang, fields.target_lang) if name in texts}
    if max(map(len, texts.values()), default=0) >= MAX_LINE_BYTES:
        yield bad(number, source.lang, "too_long")
    else:
        yield from pairs_of_item(number, {"translation": texts}, source.lang, fields)
