"""Reads a page: its tags close, and it loads nothing."""

import re
from html.parser import HTMLParser

_VOID = frozenset({"meta", "br", "path", "rect", "use", "line", "image"})


class Page(HTMLParser):
    """A page that was checked.

    Attributes:
        text: its words, with single spaces.
        bars: of each SVG element, the widths of its pieces in percent.
    """

    def __init__(self, html: str):
        super().__init__()
        self._open, self._words, self.bars = list[str](), list[str](), list[list[float]]()
        self.feed(html)
        assert not self._open
        assert not re.search(r"@import|url\((?!#)", html)
        self.text = " ".join("".join(self._words).split())

    def handle_starttag(self, tag, attrs):
        assert tag not in ("script", "link", "img")
        for name, value in attrs:
            loads = name in ("src", "href", "xlink:href") and not value.startswith(("#", "data:"))
            assert not loads, value
        if tag == "svg":
            self.bars.append([])
        width = dict(attrs).get("width", "")
        if tag == "rect" and width.endswith("%") and "track" not in dict(attrs).get("fill", ""):
            self.bars[-1].append(float(width.rstrip("%")))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        if tag in _VOID:
            self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag):
        if tag not in _VOID:
            assert self._open.pop() == tag
            self._words.append(
                " " * (tag in ("td", "th", "dt", "dd", "p", "span", "h1", "h2", "h3"))
            )

    def handle_data(self, data):
        self._words.append(data)
