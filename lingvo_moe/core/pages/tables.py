"""Describes tables once, for terminals, for Markdown and for pages, whose template parts.html draws them."""

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

# Colours of a terminal for those of pages.
_COLOURS = {"first": "blue", "third": "cyan", "fourth": "yellow"}


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    heading: str  # above it
    numeric: bool = True  # its cells stand at the right
    estimated: bool = False  # its heading is in italics
    wide: bool = False  # a narrow terminal leaves it out


def words(*headings: str) -> list[Column]:
    """Columns whose cells stand at the left."""
    return [Column(heading, numeric=False) for heading in headings]


def numbers(*headings: str) -> list[Column]:
    """Columns whose cells stand at the right."""
    return [Column(heading) for heading in headings]


class Piece(NamedTuple):
    """A piece of a stacked bar: its name, its colour in the style of pages, its value and the value in words."""

    what: str
    colour: str
    value: float
    text: str


class PageCell(str):
    """A cell that a page shows with a patch of a colour before it, as a link, or with a bar, of which 100 is all."""

    colour: str
    link: str
    piece: Piece | None
    faint: bool  # whether the bar is pale

    def __new__(
        cls,
        text: str,
        colour: str = "",
        link: str = "",
        piece: Piece | None = None,
        faint: bool = False,
    ) -> "PageCell":
        cell = super().__new__(cls, text)
        cell.colour, cell.link, cell.piece, cell.faint = colour, link, piece, faint
        return cell


@dataclass(frozen=True)
class Table:
    """Rows of cells under columns, and perhaps a last row that sums them up."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    foot: Sequence[str] = ()

    def First(self, most: int | None) -> "Table":
        """The table with its first `most` rows, and a row that counts the others; None shows all."""
        if most is None or len(self.rows) <= most:
            return self
        more = [f"{len(self.rows) - most} more", *[""] * (len(self.columns) - 1)]
        return replace(self, rows=[*self.rows[:most], more])


@dataclass(frozen=True)
class Section:
    """Tables and sentences under a title; a terminal adds `aside` to the title."""

    title: str
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    aside: str = ""


def terminal(table: Table, wide: bool = True, bars: Sequence[Text] = ()) -> RichTable:
    """The table for a terminal, without lines; rows without a cell that is shown are left out.

    Args:
        wide: whether the terminal has room for all columns.
        bars: for each row, a bar in a last column.
    """
    out = RichTable(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    shown = [i for i, column in enumerate(table.columns) if wide or not column.wide]
    for column in (table.columns[i] for i in shown):
        style = "bold italic" if column.estimated else "bold"
        side: Literal["left", "right"] = "right" if column.numeric else "left"
        out.add_column(column.heading, justify=side, header_style=style, overflow="fold")
    for number, row in enumerate(table.rows):
        if any(row[i] for i in shown):
            out.add_row(*(_coloured(row[i]) for i in shown), *bars[number : number + 1])
    if table.foot:
        out.add_row(*(Text(table.foot[i]) for i in shown), style="bold")
    return out


def _coloured(cell: str) -> Text:
    """The cell in the colour that a terminal has for a page's, if it has one; brackets in it are text, not markup."""
    return Text(cell, style=_COLOURS.get(getattr(cell, "colour", ""), ""))


def show(table: Table, console: Console | None = None, wide: bool = True) -> None:
    """Prints the table to a terminal, by default on standard output; `wide` as for `terminal`."""
    (console or Console()).print(terminal(table, wide))


def pairs(items: Sequence[tuple[str, str]]) -> RichTable:
    """Names and values for a terminal."""
    out = RichTable(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name, value in items:
        out.add_row(Text(name, style="dim"), Text(value))
    return out


def lines(table: Table) -> list[str]:
    """The table as lines of text, however wide; columns without a cell are left out."""
    used = [i for i in range(len(table.columns)) if any(row[i] for row in table.rows)]
    rows = [[row[i] for i in used] for row in table.rows]
    console = Console(file=io.StringIO(), width=10_000)
    with console.capture() as shown:
        console.print(terminal(Table([table.columns[i] for i in used], rows)))
    return [line.rstrip() for line in shown.get().splitlines()]


def markdown(table: Table) -> str:
    """The table in Markdown, with a line break at its end."""
    heads = [column.heading for column in table.columns]
    rule = ["---:" if column.numeric else "---" for column in table.columns]
    rows = [heads, rule, *table.rows, *([table.foot] if table.foot else [])]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
