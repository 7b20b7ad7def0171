"""Tidies texts, for data and for the lines that a model is given; and makes the keys by which data are split."""

import re
import unicodedata

# Patterns of tidying, as Python and RE2 (TensorFlow) read them.
CONTROL = r"[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f]"
SPACES = "[\t-\r \x85\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+"
# Marks that nobody sees, by the version of tidy_text: those of direction, byte order marks, soft hyphens; of version 2
# also invisible operators, annotations, noncharacters. Joiners and variation selectors stay: they change what is seen.
_MARKS = "\u00ad\u200b\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff"
_MORE = "\u034f\u061c\u180e\u2060-\u2065\u206a-\u206f\ufff9-\ufffb\ufdd0-\ufdef"
_NONE = "".join(f"{chr(at)}-{chr(at + 1)}" for at in range(0xFFFE, 0x110000, 0x10000))
INVISIBLE = {1: f"[{_MARKS}]", 2: f"[{_MARKS}{_MORE}{_NONE}]"}
TIDIED = 2  # the version of tidy_text that new data are tidied by; 0: not at all
KEYS = 2  # the version of sentence_key that new data are split by; version 1 took vowel signs for spaces
_compiled = {pattern: re.compile(pattern) for pattern in (CONTROL, *INVISIBLE.values())}
_NOT_WORD = re.compile(r"[\W\d_]+")  # of version 1


def tidy_text(text: str, version: int = TIDIED) -> str:
    """Removes control characters and invisible marks from a text; collapses spaces; NFC.

    `version` is that of the data; 0 leaves the text as it is. tidy_strings of decoding/tokenizer.py does the same in a
    graph.
    """
    if not version:
        return text
    if text.isascii() and text.isprintable():
        return " ".join(text.split())
    text = _compiled[INVISIBLE[version]].sub("", text)
    text = _compiled[CONTROL].sub(" ", text)
    return unicodedata.normalize("NFC", " ".join(text.split()))


def sentence_key(text: str, version: int = KEYS) -> str:
    """A sentence without case, digits and punctuation: the key that keeps held-out sentences out of training."""
    text = text.casefold()
    text = text.translate(_WORDS) if version > 1 else _NOT_WORD.sub(" ", text)
    return " ".join(text.split())


class _Words(dict[int, int]):
    """Translates what is neither a letter nor a mark, such as a vowel sign, to a space; variation selectors too."""

    def __missing__(self, code: int) -> int:
        c = chr(code)
        is_mark = unicodedata.category(c) in ("Mn", "Mc") and not "\ufe00" <= c <= "\ufe0f"
        self[code] = code if is_mark or (c.isalnum() and not c.isdecimal()) else ord(" ")
        return self[code]


_WORDS = _Words()
