"""Checks whether a text is in the script of its language, which detects wrongly labelled languages.

The scripts of a language come from CLDR (through Babel); the script of a letter is the first word of its Unicode name.
"""

import functools
import unicodedata

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
