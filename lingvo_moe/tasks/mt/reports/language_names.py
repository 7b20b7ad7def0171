"""English names of languages, for people who do not know their codes."""

import functools

from babel import Locale
from babel.core import get_global, parse_locale


@functools.cache
def english_name(code: str) -> str:
    """The English name of a language: 'German' for 'de', 'Brazilian Portuguese' for 'pt-BR'; '' if there is none.

    Names are those of the Unicode CLDR, which Babel carries. So are the codes: ISO 639, with a script or a territory
    or without.
    """
    english = Locale("en")
    try:
        language, territory, script, *_ = parse_locale(code.replace("-", "_"))
    except ValueError:
        return ""
    parts = [part for part in (language, script, territory) if part]
    if whole := english.languages.get("_".join(parts)):
        return whole
    name = english.languages.get(get_global("language_aliases").get(language, language), "")
    details = [english.scripts.get(script or ""), english.territories.get(territory or "")]
    more = ", ".join(filter(None, details))
    return f"{name} ({more})" if name and more else name


def name_and_code(code: str) -> str:
    """'German, de'; the code alone where it has no name."""
    name = english_name(code)
    return f"{name}, {code}" if name else code
