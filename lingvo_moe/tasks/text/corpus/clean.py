"""Cleans strings of user interfaces into text, and decides which pairs are worth translating."""

import functools
import html
import re

from lingvo_moe.tasks.text.data.tidying import tidy_text

MIN_CHARS, MAX_CHARS = 2, 300
# A translation this many times longer than the other side is a mistake of the catalog, not a translation.
MAX_LENGTH_RATIO = 5.0

_MARKUP = re.compile(r"[&_<\[]")  # most texts have none, and skip what follows
_TAG = re.compile(r"</?[a-zA-Z][^<>]*>|<!--.*?-->", re.S)
_NUMBERED_TAG = re.compile(r"\[\d+:([^\[\]]*)\]")  # "[1:text]", a link or emphasis in some catalogs
_MNEMONIC_IN_PARENTHESES = re.compile(r"\s*\([&_][A-Za-z0-9]\)")  # "(&F)" after CJK menu entries
_MNEMONIC = re.compile(r"&(?!#|[a-zA-Z]+;)(?=\w)")
_LETTER = re.compile(r"[^\W\d_]")
_TWO_LETTERS = re.compile(r"[^\W\d_].*?[^\W\d_]")
_BEYOND_LATIN = re.compile(r"[^\W\d_\u0000-\u024f]")
_PLACEHOLDER = re.compile(r"%\(\w+\)\w|%\d*\$?[sdrif]|\$\{?\w+\}?|\{[^{}]*\}")


def clean_text(text: str) -> str:
    """Plain text of one line: without tags, entities, mnemonics and invisible marks; spaces collapsed, NFC.

    Placeholders such as `%s`, `%(name)s` and `{name}` stay: a translator must copy them.
    """
    if _MARKUP.search(text):
        text = _MNEMONIC_IN_PARENTHESES.sub("", text)
        text = _MNEMONIC.sub("", text)
        text = _TAG.sub("", text)
        text = _NUMBERED_TAG.sub(r"\1", text)
        text = html.unescape(text)
    return tidy_text(text)


@functools.cache
def writes_latin(lang: str) -> bool:
    """Whether a language is written in Latin letters alone (CLDR's likely script); unknown languages may be."""
    from babel.core import get_global

    subtags = get_global("likely_subtags").get(lang, "")
    return lang == "sr" or "_" not in subtags or subtags.split("_")[1] == "Latn"


def usable(lang: str, source: str, english: str) -> bool:
    """Whether a cleaned pair is a translation: two sides that differ, of sane length, in the expected script."""
    shorter, longer = sorted((len(source), len(english)))
    if shorter < MIN_CHARS and not (source and not writes_latin(lang)):
        return False
    if longer > MAX_CHARS or (longer > 20 and longer > MAX_LENGTH_RATIO * shorter):
        return False
    if source.casefold() == english.casefold():
        return False
    words = _PLACEHOLDER.sub(" ", english), _PLACEHOLDER.sub(" ", source)
    if not _TWO_LETTERS.search(words[0]) or not _LETTER.search(words[1]):
        return False
    return writes_latin(lang) or bool(_BEYOND_LATIN.search(source))
