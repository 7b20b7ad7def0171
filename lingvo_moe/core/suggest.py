"""Suggests the nearest known names in errors about an unknown name."""

import difflib
from collections.abc import Iterable


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
