"""Writes the pieces of Markdown of the page's sections."""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lingvo_moe.core.console import units

DASH = "–"


@dataclass
class Finding:
    """A row of the page's summary.

    Attributes:
        claim: in words, with its place in the paper.
        paper, ours: the figures.
        kind: 'exact', 'estimated', 'model' or 'timed': the source of our figure.
    """

    claim: str
    paper: str
    ours: str
    kind: str


@dataclass
class Section:
    """A part of the page.

    Attributes:
        title: its heading.
        lines: Markdown below it.
        findings: for the summary.
    """

    title: str
    lines: list[str]
    findings: list[Finding] = field(default_factory=list)

    def Markdown(self) -> str:
        return "\n".join([f"## {self.title}", "", *(wrapped(line) for line in self.lines)])


def wrapped(line: str, width: int = 110) -> str:
    """Prose in lines of `width`; tables, pictures and lists as they are."""
    if line.startswith(("|", "!", "-")):
        return line
    prefix = "> " if line.startswith("> ") else ""
    return textwrap.fill(
        line.removeprefix(prefix),
        width,
        initial_indent=prefix,
        subsequent_indent=prefix,
        break_long_words=False,
        break_on_hyphens=False,
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table with an empty line behind it."""
    lines = [list(head), ["---"] * len(head), *(list(row) for row in rows)]
    return [f"| {' | '.join(cells)} |" for cells in lines] + [""]


def picture(name: str, what: str) -> list[str]:
    """A picture of docs/images."""
    return [f"![{what}](images/{name})", ""]


def listed(items: Sequence[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}"


def gib(num_bytes: float) -> str:
    return units.size(num_bytes, 1)


def figure(value: float, digits: int = 3) -> str:
    """Three figures, with all digits before the point: '0.715', '22.4', '1,036'."""
    if value == 0:
        return "0"
    whole = len(f"{abs(value):.0f}") if abs(value) >= 1 else 0
    if whole == 0:
        return f"{value:.{digits}g}"
    return f"{value:,.{max(digits - whole, 0)}f}"


def count(value: float) -> str:
    """A rounded number of parameters: '619.4 billion', '1.03 trillion'."""
    for scale, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if value >= scale:
            return f"{figure(value / scale, 4).rstrip('0').rstrip('.')} {name}"
    return f"{value:,.0f}"


def percent(share: float) -> str:
    return f"{100 * share:.0f}%"
