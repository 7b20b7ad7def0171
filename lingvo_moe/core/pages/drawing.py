"""Embeds Matplotlib drawings in a page as SVG, in the page's light or dark colours."""

import functools
import io
import re
from collections.abc import Callable
from html import escape
from typing import Any, ParamSpec

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

# What Matplotlib draws with, the colours of a light page, and what colours.css calls them.
INK, SOFT, RULE, PAPER = "#1d2126", "#5d656e", "#dcd9d1", "#fbfaf7"
FIRST, SECOND, THIRD, FOURTH = "#35508f", "#c9552f", "#23807f", "#cf9436"
_NAMES = {
    INK: "ink",
    SOFT: "soft",
    RULE: "rule",
    PAPER: "paper",
    FIRST: "first",
    SECOND: "second",
    THIRD: "third",
    FOURTH: "fourth",
}
_STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": RULE,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": SOFT,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 8.5,
    "figure.constrained_layout.use": True,
    "figure.facecolor": PAPER,
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "savefig.facecolor": "none",
    "svg.fonttype": "none",
    "svg.hashsalt": "lingvo_moe",
    "text.color": INK,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
}
_SVG: dict[str, Any] = {"format": "svg", "metadata": {"Date": None, "Creator": None}}

_P = ParamSpec("_P")


def styled(draw: Callable[_P, Figure]) -> Callable[_P, Figure]:
    """Decorator: draws in the style of pages, and leaves others' as it was."""

    @functools.wraps(draw)
    def drawn(*args: _P.args, **kwargs: _P.kwargs) -> Figure:
        with plt.rc_context(_STYLE):
            figure = draw(*args, **kwargs)
            figure.canvas.draw()  # lays it out while the style holds
            return figure

    return drawn


def picture(draw: Callable[_P, Figure]) -> Callable[_P, bytes]:
    """Decorator: draws in the style of pages and returns an SVG file in the colours of a light page."""

    @functools.wraps(draw)
    def drawn(*args: _P.args, **kwargs: _P.kwargs) -> bytes:
        return _saved(styled(draw)(*args, **kwargs), **_SVG, facecolor=PAPER)

    return drawn


def svg(figure: Figure, alt: str) -> str:
    """The figure as an HTML element that follows the page's colours; the figure is closed.

    Args:
        alt: what it shows, for those who do not see it.
    """
    text = _saved(figure, **_SVG).decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # Groups are never referred to, and the names that they are given repeat from drawing to drawing.
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    for colour, name in _NAMES.items():
        text = text.replace(colour, f"var(--{name})")
    view = re.search(r'viewBox="[^"]*"', text)
    assert view, "Matplotlib writes a viewBox"
    rest = text[text.index(">") + 1 :]
    xlink = "xmlns:xlink='http://www.w3.org/1999/xlink'"
    return f"<svg {xlink} {view[0]} role='img' aria-label=\"{escape(alt, quote=True)}\">{rest}"


def png(figure: Figure) -> bytes:
    """The figure as a picture file, in the colours of a light page; the figure is closed."""
    return _saved(figure, format="png", dpi=110, facecolor=PAPER)


def _saved(figure: Figure, **how: Any) -> bytes:
    """The file that Matplotlib's savefig writes; the figure is closed."""
    buffer = io.BytesIO()
    with plt.rc_context(_STYLE):
        figure.savefig(buffer, **how)
    plt.close(figure)
    return buffer.getvalue()
