"""Writes pieces of the page's Markdown."""

import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lingvo_moe.core.console import units
from lingvo_moe.core.pages.tables import Table, markdown, words

DASH = units.DASH


class Finding(NamedTuple):
    """A row of the page's summary."""

    claim: str  # the claim in words, with its place in the paper
    # `paper`, `ours`: the figures.
    paper: str
    ours: str
    kind: str  # 'exact', 'estimated', 'model' or 'timed': the source of our figure


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


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose cells stand at the left."""
    return markdown(Table(words(*head), list(rows)))


def listed(items: Sequence[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}"


def gib(num_bytes: float) -> str:
    return units.size(num_bytes, 1)


def count(value: float) -> str:
    """A rounded number of parameters: '619.4 billion', '1.03 trillion'."""
    for scale, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if value >= scale:
            return f"{value / scale:.4g} {name}"
    return f"{value:,.0f}"


def percent(share: float) -> str:
    return f"{100 * share:.0f}%"
