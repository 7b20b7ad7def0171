"""Writes pieces of the page's Markdown."""

import re
import textwrap
from collections.abc import Sequence


def fill(page: str, width: int = 110) -> str:
    """The page with its prose in lines of `width`; headings, tables, pictures, lists and commands stay as they are."""
    paragraphs = re.split(r"\n\s*\n", page.strip("\n"))
    return "\n\n".join(_fill(paragraph, width) for paragraph in paragraphs) + "\n"


def _fill(paragraph: str, width: int) -> str:
    if paragraph.startswith(("#", "|", "!", "- ", "`" * 3)):
        return paragraph
    prefix = "> " * paragraph.startswith("> ")
    return textwrap.fill(
        " ".join(paragraph.removeprefix(prefix).split()),
        width,
        initial_indent=prefix,
        subsequent_indent=prefix,
        break_long_words=False,
        break_on_hyphens=False,
    )


def listed(items: Sequence[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}"


def count(value: float) -> str:
    """A rounded number of parameters: '619.4 billion', '1.03 trillion'."""
    for scale, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if value >= scale:
            return f"{value / scale:.4g} {name}"
    return f"{value:,.0f}"
