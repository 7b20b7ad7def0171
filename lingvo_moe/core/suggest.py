"""Suggests the nearest known names in errors about an unknown name."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns ' (did you mean ...?)' with the nearest known names, else the list of known names,
    else ''."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    if near:
        return f" (did you mean {' or '.join(repr(n) for n in near)}?)"
    if known and len(known) <= 30:
        return f" (known: {', '.join(known)})"
    return ""
