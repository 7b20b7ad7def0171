"""Words for errors: the known names nearest to an unknown one, and lists of choices."""

import difflib
from collections.abc import Iterable


def either(choices: Iterable[object]) -> str:
    """Returns '1', '1 or 2', or '1, 2 or 4'. There is at least one choice."""
    *first, last = map(str, choices)
    return f"{', '.join(first)} or {last}" if first else last


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns ' (did you mean ...?)' with the nearest known names, else the list of known names,
    else ''."""
    known = sorted(known)
    if hint := nearest(name, known):
        return hint
    if known and len(known) <= 30:
        return f" (known: {', '.join(known)})"
    return ""


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns ' (did you mean ...?)' with the nearest known names, else ''."""
    near = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.6)
    return f" (did you mean {' or '.join(repr(n) for n in near)}?)" if near else ""
