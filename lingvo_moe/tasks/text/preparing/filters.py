"""Decides which pairs are dropped, and why.

Text that is not in a script of its language is a sign that the language is labelled wrongly.
"""

import functools
import unicodedata
from dataclasses import dataclass

from lingvo_moe.tasks.text.corpus.clean import MAX_LENGTH_RATIO

# Below so many characters lengths differ by chance.
_SHORT = 20

# By the order in which they are looked for; those of lines, those of pairs, and what is decided about good pairs.
REASONS = {
    "no_tab": "a TSV line with too few columns",
    "bad_json": "a line that is no JSON object",
    "no_field": "a JSON object without source or target",
    "no_language": "a line that names no language, or no code of one",
    "invalid_utf8": "bytes that are no UTF-8",
    "too_long_line": "a line of more than 20,000 bytes",
    "empty": "a side without text",
    "no_letters": "a side without a letter",
    "too_long": "a side of more than --max_chars characters",
    "length_ratio": "a side more than --max_ratio times as long as the other",
    "equal_sides": "source and target are the same",
    "wrong_script": "the source is not in its language's script",
    "wrong_target_script": "the target is not in its language's script",
    "held_out": "the target is a held-out sentence",
    "duplicate": "the pair was there before",
    "no_tokens": "a side that the tokeniser makes nothing of",
}


@dataclass(frozen=True)
class Rules:
    """The conditions that a pair must meet."""

    max_chars: int = 1000  # of a side, characters
    # Of the longer side's length to the shorter's, in characters and in bytes of UTF-8, where the longer has more than
    # 20 characters.
    max_ratio: float = MAX_LENGTH_RATIO
    check_script: bool = True  # whether sides must be in the script of their language
    target_lang: str = "en"  # the code of the target language

    def Reason(self, lang: str, source: str, target: str, one_text: bool = False) -> str:
        """The reason to drop a pair of cleaned texts: a key of REASONS; '' for a good pair.

        `one_text` says that both sides are the same text without a translation.
        """
        if not source or not target:
            return "empty"
        if not any(map(str.isalpha, source)) or not any(map(str.isalpha, target)):
            return "no_letters"
        shorter, longer = sorted((len(source), len(target)))
        if longer > self.max_chars:
            return "too_long"
        if longer > _SHORT and longer > self.max_ratio * shorter:
            # A Chinese character says as much as several letters, and has as many bytes.
            shorter, longer = sorted((len(source.encode()), len(target.encode())))
            if longer > self.max_ratio * shorter:
                return "length_ratio"
        if not one_text and source.casefold() == target.casefold():
            return "equal_sides"
        if self.check_script:
            if not in_script(source, scripts_of(lang)):
                return "wrong_script"
            if not one_text and not in_script(target, scripts_of(self.target_lang)):
                return "wrong_target_script"
        return ""


# --- scripts

# The scripts of a language come from CLDR (through Babel); that of a letter is the first word of its Unicode name.
LATIN = "LATIN"
# CLDR's codes of scripts whose letters' Unicode names begin otherwise than CLDR's English name of the script.
_LETTERS_OF = {
    "Beng": ("BENGALI",),
    "Cans": ("CANADIAN",),
    "Hans": ("CJK", "BOPOMOFO"),
    "Hant": ("CJK", "BOPOMOFO"),
    "Jpan": ("CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA"),
    "Kore": ("HANGUL", "CJK"),
    "Nkoo": ("NKO",),
    "Orya": ("ORIYA",),
}
_UNKNOWN = ("Zyyy", "Zzzz")
# CLDR has these in Latin letters too, which is not how they are written.
_ROMANISED = ("hi", "kok", "zh")


@functools.cache
def scripts_of(lang: str) -> frozenset[str] | None:
    """The scripts of a language (codes such as de, zh-TW, sr_Latn), as letters' Unicode names begin; None: unknown."""
    from babel import Locale, localedata
    from babel.core import get_global

    parts = lang.replace("-", "_").split("_")
    base, rest = parts[0].lower(), parts[1:]
    if named := [part.title() for part in rest if len(part) == 4 and part.isalpha()]:
        codes = set(named)
    else:
        likely = get_global("likely_subtags").get(base, "").split("_")
        # A language with locales of its own in several scripts, as Serbian, may be in any of them.
        others = (i.split("_") for i in localedata.locale_identifiers())
        codes = {i[1] for i in others if i[0] == base and len(i) > 1 and len(i[1]) == 4}
        codes |= {likely[1]} if len(likely) > 1 else set()
        codes -= {"Latn"} if base in _ROMANISED else set()
    codes -= set(_UNKNOWN)
    names = Locale("en").scripts
    letters = {
        word
        for code in codes
        for word in _LETTERS_OF.get(code, (names.get(code, "").split(" ")[0].upper(),))
    }
    return frozenset(letters - {""}) or None


@functools.lru_cache(maxsize=1 << 16)
def script_of(letter: str) -> str:
    """The first word of a letter's Unicode name, such as 'LATIN' or 'CYRILLIC'; '' for other characters."""
    if not letter.isalpha():
        return ""
    words = unicodedata.name(letter, "").split(" ")
    # "FULLWIDTH LATIN SMALL LETTER A", "HALFWIDTH KATAKANA LETTER A", "MODIFIER LETTER SMALL H"
    if words[0] in ("FULLWIDTH", "HALFWIDTH"):
        return words[1]
    return "" if words[0] == "MODIFIER" else words[0]


def in_script(text: str, scripts: frozenset[str] | None) -> bool:
    """Whether a text may be of a language of these scripts; always, where they are unknown.

    It may not where none of its letters is in them (Latin words alone are no Greek), or where more than half of its
    different letters are in others, Latin aside: names and brands are Latin in any language.
    """
    if scripts is None:
        return True
    if text.isascii():
        return LATIN in scripts or not any(map(str.isalpha, text))
    ours = foreign = letters = 0
    for script in map(script_of, set(text)):
        if script:
            letters += 1
            if script in scripts:
                ours += 1
            elif script != LATIN:
                foreign += 1
    return (ours > 0 or not letters) and 2 * foreign <= letters
