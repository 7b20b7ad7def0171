"""Builds the parts of self-contained HTML pages, without scripts or external files.

Functions take plain text and escape it, unless an argument is called HTML.
"""

from collections.abc import Iterable, Sequence
from html import escape

from lingvo_moe.core.pages import rendering

Text = str
Html = str


def document(title: Text, body: Html, footer: Text = "", style: str = "") -> Html:
    """A complete page; `style` is added to the style of all pages."""
    head = (
        "<meta charset='utf-8'><meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{rendering.source(__package__, 'style.css')}{style}</style>"
    )
    end = f"<footer>{escape(footer)}</footer>\n" if footer else ""
    return (
        f"<!doctype html>\n<html lang='en'><head>{head}</head>\n<body>\n{body}{end}</body></html>\n"
    )


def figures(items: Iterable[tuple[Text, Text, Text]]) -> Html:
    """The numbers that open a page: (what, value, a word below it or '')."""
    cells = "".join(
        f"<div><dt>{escape(what)}</dt><dd>{escape(value)}"
        + (f"<span class='estimated'>{escape(below)}</span>" if below else "")
        + "</dd></div>"
        for what, value, below in items
    )
    return f"<dl class='figures'>{cells}</dl>"


def bar(
    pieces: Iterable[tuple[str, str, float, str]], mark: float | None = None, cls: str = "bar"
) -> str:
    """A stacked bar: (what, colour, share of the width, value) of each piece, and an upright line at `mark`."""
    x, drawn, said = 0.0, [], []
    for what, colour, width, value in pieces:
        if width <= 0:
            continue
        tip = f"{what}: {value}"
        drawn.append(
            f"<rect x='{100 * x:.3f}%' width='{100 * width:.3f}%' height='100%' fill='var(--{colour})'>"
            f"<title>{escape(tip)}</title></rect>"
        )
        said.append(tip)
        x += width
    line = ""
    if mark is not None:
        at = f"{100 * mark:.3f}%"
        line = (
            f"<line x1='{at}' x2='{at}' y1='-12%' y2='112%' stroke='var(--ink)' stroke-width='2'/>"
        )
    track = "<rect width='100%' height='100%' fill='var(--track)'/>"
    label = escape("; ".join(said), quote=True)
    return (
        f"<svg class='{cls}' role='img' aria-label=\"{label}\">{track}{''.join(drawn)}{line}</svg>"
    )


def rows(rows: Iterable[tuple[str, str, str]]) -> str:
    """Bars below one another; (label as HTML, bar, value)."""
    cells = "".join(
        f"<span>{label}</span>{bar}<b>{escape(value)}</b>" for label, bar, value in rows
    )
    return f"<div class='rows'>{cells}</div>"


def legend(items: Iterable[tuple[str, str]]) -> str:
    """(colour, what it stands for)."""
    marks = "".join(
        f"<span><i class='swatch' style='background:var(--{colour})'></i>{escape(text)}</span>"
        for colour, text in items
    )
    return f"<div class='legend'>{marks}</div>"


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """A list of (name, value)."""
    cells = "".join(f"<dt>{escape(a)}</dt><dd>{escape(b)}</dd>" for a, b in pairs)
    return f"<dl class='facts'>{cells}</dl>"


def table(
    heads: Sequence[tuple[str, bool, bool]],
    rows: Sequence[Sequence[str]],
    foot: Sequence[str] | None = None,
) -> str:
    """A table of cells that are HTML already; heads are (text, whether numeric, whether estimated)."""

    def line(cells: Sequence[str], tag: str) -> str:
        return (
            "<tr>"
            + "".join(
                f"<{tag}{' class=n' if number else ''}>{cell}</{tag}>"
                for cell, (_, number, _) in zip(cells, heads)
            )
            + "</tr>"
        )

    names = [
        f"<i>{escape(text)}</i>" if estimated else escape(text) for text, _, estimated in heads
    ]
    body = "".join(line(row, "td") for row in rows)
    end = f"<tfoot>{line(foot, 'td')}</tfoot>" if foot else ""
    return f"<div class='wide'><table><thead>{line(names, 'th')}</thead><tbody>{body}</tbody>{end}</table></div>"
