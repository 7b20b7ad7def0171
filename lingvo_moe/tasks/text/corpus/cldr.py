"""Makes pairs from the Unicode CLDR, which Babel contains: names, and phrases built from them by CLDR's patterns.

Names are languages, territories, scripts, currencies, time zones, units and the like. Phrases are dates, spans of
time, measures, amounts of money and lists of names. The phrases drawn are the same for every language, so that an
English sentence can be held out of all of them at once.
"""

import datetime
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

from babel import Locale, dates, localedata, numbers, units
from babel.core import get_global
from babel.lists import format_list

PHRASES_PER_KIND = 400
_CONTEXTS = ("stand-alone", "format")
_NAME_SECTIONS = ("languages", "territories", "scripts", "variants", "currency_names")


def cldr_languages() -> list[str]:
    """The ISO 639-1 languages (two letters) that CLDR has names for, except English."""
    ids = {i for i in localedata.locale_identifiers() if len(i) == 2}
    # Norwegian is 'no' here: 'nb' and 'nn' are its two standards.
    return sorted(ids - {"en", "nb", "nn"})


def cldr_pairs(lang: str) -> Iterator[tuple[str, str]]:
    """Yields `(source, English)` of one language, names first; nothing for a language that is not in CLDR."""
    if not localedata.exists(lang):
        return
    ours, english = _names(lang), _names("en")
    root = _names("root")
    for path, name in english.items():
        # What a locale inherits from the root is no translation.
        if ours.get(path) and ours[path] != root.get(path):
            yield ours[path], name
    yield from _phrases(lang)


@functools.cache
def _names(lang: str) -> dict[tuple, str]:
    """Every name of a locale by its path in CLDR."""
    data = localedata.load(lang)
    out: dict[tuple, str] = {}
    for section in _NAME_SECTIONS:
        out.update({(section, code): name for code, name in data[section].items()})
    # Haitian inherits from French: it would have French months, unless Babel, which changes its data as it reads them,
    # had read French before.
    inherits = lang in get_global("parent_exceptions")
    for section in () if inherits else ("months", "days", "quarters"):
        for context in _CONTEXTS:
            words = _plain(data[section]).get(context, {}).get("wide")
            if isinstance(words, dict):
                out.update({(section, context, i): str(w) for i, w in words.items()})
    for zone, forms in data["meta_zones"].items():
        for form, name in forms.get("long", {}).items():
            out["meta_zones", zone, form] = name
    for zone, names in data["time_zones"].items():
        if "city" in names:
            out["time_zones", zone] = names["city"]
    for unit, forms in data["unit_display_names"].items():
        if "long" in forms:
            out["unit", unit] = forms["long"]
    return {path: name for path, name in out.items() if isinstance(name, str)}


def _plain(node: Any) -> dict:
    """Babel stores some nodes as `(alias, own values)`: only what a locale says itself counts here."""
    if isinstance(node, tuple):
        node = node[1]
    if not hasattr(node, "items"):
        return {}
    return {k: _plain(v) if isinstance(v, (dict, tuple)) else v for k, v in node.items()}


def _phrases(lang: str) -> Iterator[tuple[str, str]]:
    """Yields the drawn phrases in `lang` and in English, without those that `lang` has no words for."""
    ours, root = localedata.load(lang), localedata.load("root")
    has = {
        "date": _names(lang).get(("months", "format", 1)) not in (None, "M01"),
        "span": ours["date_fields"].get("day", {}).get("future")
        != root["date_fields"].get("day", {}).get("future"),
        "list": ours["list_patterns"]["standard"] != root["list_patterns"]["standard"],
        "unit": True,
        "money": True,
    }
    for kind, draw in _KINDS.items():
        if not has[kind]:
            continue
        rng = random.Random(f"cldr {kind}")
        for _ in range(PHRASES_PER_KIND):
            say = draw(rng)
            ours_said, english = say(lang), say("en")
            if ours_said and english:
                yield ours_said, english


def _draw_date(rng: random.Random) -> Callable[[str], str | None]:
    day = datetime.date(1950, 1, 1) + datetime.timedelta(days=rng.randrange(36_500))
    form = rng.choice(("full", "full", "long"))
    return lambda lang: dates.format_date(day, form, locale=lang)


def _draw_span(rng: random.Random) -> Callable[[str], str | None]:
    unit = rng.choice(("year", "month", "week", "day", "hour", "minute", "second"))
    count = rng.choice((1, 2, 3, 4, 5, rng.randrange(6, 60)))
    direction = rng.choice(("future", "past"))

    def say(lang: str) -> str | None:
        locale = Locale.parse(lang)
        data = localedata.LocaleDataDict(localedata.load(str(locale)))
        fields = data["date_fields"].get(unit, {}).get(direction, {})
        pattern = fields.get(locale.plural_form(count)) or fields.get("other")
        return pattern.format(count) if pattern else None

    return say


def _draw_unit(rng: random.Random) -> Callable[[str], str | None]:
    unit = rng.choice(_measures())
    count = rng.choice((1, 2, 5, rng.randrange(6, 1000), round(rng.uniform(0, 100), 1)))

    def say(lang: str) -> str | None:
        here, root = (
            localedata.load(name)["unit_patterns"].get(unit, {}).get("long")
            for name in (lang, "root")
        )
        if not here or here == root:
            return None
        return units.format_unit(count, unit, length="long", locale=lang)

    return say


def _draw_money(rng: random.Random) -> Callable[[str], str | None]:
    code = rng.choice(sorted(localedata.load("en")["currency_names_plural"]))
    amount = rng.choice((1, 2, 10, rng.randrange(3, 2_000)))

    def say(lang: str) -> str | None:
        if code not in localedata.load(lang)["currency_names"]:
            return None
        form = "#,##0"
        return numbers.format_currency(
            amount, code, format=form, locale=lang, format_type="name", currency_digits=False
        )

    return say


def _draw_list(rng: random.Random) -> Callable[[str], str | None]:
    section = rng.choice(("territories", "territories", "languages", "currency_names"))
    codes = rng.sample(sorted(localedata.load("en")[section]), rng.randint(2, 4))
    style = rng.choice(("standard", "standard", "or"))

    def say(lang: str) -> str | None:
        names = localedata.load(lang)[section]
        patterns = localedata.load(lang)["list_patterns"]
        if style not in patterns or any(code not in names for code in codes):
            return None
        if lang != "en" and patterns[style] == localedata.load("root")["list_patterns"].get(style):
            return None
        return format_list([names[code] for code in codes], style, locale=lang)

    return say


@functools.cache
def _measures() -> list[str]:
    """Units with a long English pattern, SI prefixes of rare sizes and 'per' units included."""
    return sorted(
        u for u, p in localedata.load("en")["unit_patterns"].items() if "other" in p.get("long", {})
    )


_KINDS: dict[str, Callable[[random.Random], Callable[[str], str | None]]] = {
    "date": _draw_date,
    "span": _draw_span,
    "unit": _draw_unit,
    "money": _draw_money,
    "list": _draw_list,
}
