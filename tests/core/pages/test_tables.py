"""One description of a table is rendered for terminals, as lines, as Markdown and as HTML."""

import io

from html_page import Page
from rich.console import Console

from lingvo_moe.core.pages import rendering
from lingvo_moe.core.pages.tables import (
    Column,
    PageCell,
    Table,
    lines,
    markdown,
    pairs,
    terminal,
    words,
)

_TABLE = Table(
    [*words("layer", "empty"), Column("bytes", estimated=True), Column("seconds", wide=True)],
    [[PageCell("<b>_1", colour="first", link="#x'"), "", "12", "3"], ["c_d", "", "9", "4"]],
    ["in all", "", "21", "7"],
)


def _printed(table: Table, wide: bool) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=60).print(terminal(table, wide))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_each_form_has_the_same_cells():
    wide, narrow = _printed(_TABLE, True), _printed(_TABLE, False)
    assert [line.split() for line in wide][1:3] == [["<b>_1", "12", "3"], ["c_d", "9", "4"]]
    assert wide[-1].split() == ["in", "all", "21", "7"] and narrow[-1].split()[-1] == "21"
    assert lines(_TABLE) == [
        "layer  bytes  seconds",
        "<b>_1     12        3",
        "c_d        9        4",
    ]
    assert markdown(_TABLE).splitlines()[1:3] == [
        "| --- | --- | ---: | ---: |",
        "| <b>_1 |  | 12 | 3 |",
    ]
    assert _printed(_TABLE.First(1), True)[2] == "1 more"


def test_brackets_are_text_in_a_terminal():
    table = Table(words("parameter", "value"), [["offload", "[slots]"]], ["[/a]", ":smile:"])
    assert [line.split() for line in _printed(table, True)][1:] == [
        ["offload", "[slots]"],
        ["[/a]", ":smile:"],
    ]
    out = io.StringIO()
    Console(file=out, width=60).print(pairs([("offload", "[slots]")]))
    assert out.getvalue().split() == ["offload", "[slots]"]


def test_a_page_escapes_the_text_of_cells():
    page = rendering.environment("lingvo_moe.core.pages", True).from_string(
        "{% from 'parts.html' import table %}{{ table(t, words=true) }}"
    )
    html = page.render(t=_TABLE)
    assert "<a href='#x&#39;'>" in html and "var(--first)" in html and "<i>bytes</i>" in html
    assert "&lt;b&gt;_1</a>" in html and "<td>c d</td>" in html
    assert Page(html).text.endswith("in all 21 7")
