"""Prints plans as tables in a terminal, or writes them as one HTML page, which can be sent by mail."""

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from lingvo_moe.analysis.plans import figures, sections
from lingvo_moe.analysis.plans.figures import Plan
from lingvo_moe.analysis.plans.suggestions import suggestions
from lingvo_moe.core.console import units
from lingvo_moe.core.pages import rendering
from lingvo_moe.core.pages.tables import Section, Table, numbers, pairs, terminal, words

_BAR = 24
_STYLES = dict(zip(figures.STACKED, ("cyan", "magenta", "blue", "green", "yellow")))
# Terminals narrower than this get fewer columns.
_WIDE = 116
_HOLDERS = 12
_MOST_ROWS = 16
# From this width on a comparison has a row for each plan.
_COMPARED_ACROSS = 150


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Prints one plan: verdict, headline, memory, time, collectives, compile figures."""
    console = console or Console()
    wide = console.width >= _WIDE
    console.print()
    console.print(Text(f"{figures.name(plan)} · {plan['what']} step", style="bold"), end="")
    console.print(f" on {figures.get(plan, 'topology.name')}")
    style = "bold green" if plan["memory"].get("fits") else "bold red"
    console.print(Text(figures.verdict(plan), style=style))
    if figures.why_no_time(plan):
        console.print(Text(f"No time: {figures.why_no_time(plan)}.", style="red"))
    console.print()
    headline = [(n, f"{v} ({note})" if note else v) for n, v, note in figures.headline(plan)]
    console.print(Padding(pairs(headline), (0, 0, 0, 2), expand=False))
    _print_body(console, "Setting", pairs(figures.setting(plan)))
    _print_body(console, "Memory of a device", *_memory(plan))
    for section in (
        sections.state(plan),
        sections.hosts(plan, _MOST_ROWS),
        sections.holders(plan, _HOLDERS),
    ):
        _print_section(console, section, wide)
    if advice := suggestions(plan):
        _print_body(console, "What would help", *(Text(f"• {line}") for line in advice))
    if table := sections.time(plan):
        _print_body(console, "Time of a step by part (estimated)", *_time(plan, table, console))
    _print_section(console, sections.pipelines(plan), wide)
    _print_section(console, _collectives(plan), wide)
    _print_section(console, sections.between_slices(plan, _MOST_ROWS), wide)
    _print_section(console, sections.mesh_axes(plan), wide)
    _print_body(console, "Compiling", pairs(figures.compile_figures(plan)))


def print_comparison(plans: Sequence[Plan], console: Console | None = None) -> None:
    """Prints several plans side by side, estimated figures in italics."""
    console = console or Console()
    table = sections.compared(plans)
    if console.width >= _COMPARED_ACROSS:
        across = terminal(table)
        for plan, row in zip(plans, across.rows):
            row.style = None if plan["memory"].get("fits") else "red"
        console.print(across)
    else:
        many = max((console.width - 16) // 24, 1)
        for first in range(0, len(plans), many):
            console.print(_down(replace(table, rows=table.rows[first : first + many])))
    if said := figures.for_budgets(plans):
        console.print(said, style="dim")
    console.print("Figures in italics are estimated.", style="dim")
    for plan in plans:
        reason = figures.why_no_time(plan)
        if reason:
            where = f"{figures.name(plan)} on {figures.get(plan, 'topology.name')}"
            console.print(f"{where}: {reason}.", style="dim")


def _down(table: Table) -> RichTable:
    """A line for each column and a column for each row, for narrow terminals."""
    down = RichTable(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for i, column in enumerate(table.columns):
        heading = Text(column.heading, style="italic dim" if column.estimated else "dim")
        down.add_row(heading, *(Text(row[i], overflow="fold") for row in table.rows))
    down.add_row()
    return down


def _memory(plan: Plan) -> list[RenderableType]:
    hbm = plan["memory"].get("hbm") or 1

    def cells(what: str, size: int) -> list[str]:
        return [what, units.size(size), units.share(size / hbm), bar(size / hbm, _BAR)]

    rows = [cells(figures.KINDS[kind], size) for kind, size in figures.kinds(plan)]
    needed = plan["memory"].get("needed")
    foot = cells("in all", needed) if needed else ()
    table = Table([*words(""), *numbers("bytes", "of HBM"), *words("")], rows, foot)
    said = Text(figures.compiler_figures(plan), style="dim")
    return [terminal(table), said] if rows or foot else [said]


def _time(plan: Plan, table: Table, console: Console) -> list[RenderableType]:
    """The table, in a wide terminal with a bar of each part's phases."""
    parts = figures.time_by_part(plan)
    if console.width < _WIDE + _BAR:
        return [terminal(table, console.width >= _WIDE)]
    legend = Text()
    for phase, style in _STYLES.items():
        legend.append("■ ", style=style).append(f"{phase}  ", style="dim")
    return [terminal(table, bars=[_stack(part, parts[0].total) for part in parts]), legend]


def _stack(part: figures.PartTime, longest: float) -> Text:
    out, done, drawn = Text(), 0.0, 0
    for piece in sections.time_pieces([part]):
        done += piece.value
        end = round(done / longest * _BAR)
        out.append("█" * (end - drawn), style=_STYLES[piece.what])
        drawn = end
    return out


def _collectives(plan: Plan) -> Section | None:
    table = sections.collectives(plan, _MOST_ROWS)
    if table is None:
        return None
    totals = "; ".join(
        f"{count:,} {kind} of {units.size(size)} in {units.duration(seconds)}"
        for kind, count, size, seconds in figures.collective_totals(plan)
    )
    title, aside = "Collectives of a step", " (seconds estimated)"
    return Section(title, [replace(table, foot=())], [f"In all: {totals}."], aside)


def bar(fraction: float, width: int) -> str:
    """Draws a bar, `width` characters long for 1.0, to an eighth of a character.

    A fraction above 1 is drawn as a full bar that ends in '▶'.
    """
    if fraction > 1:
        return "█" * (width - 1) + "▶"
    eighths = round(max(fraction, 0) * width * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _print_section(console: Console, section: Section | None, wide: bool) -> None:
    if section:
        tables = [terminal(table, wide) for table in section.tables]
        _print_body(console, section.title + section.aside, *tables, *map(Text, section.notes))


def _print_body(console: Console, title: str, *body: RenderableType) -> None:
    console.print()
    console.print(Text(title, style="bold"))
    console.print(Padding(Group(*body), (0, 0, 0, 2), expand=False))


def html_report(plans: Sequence[Plan]) -> str:
    """Returns the page: a comparison if there are several plans, then each plan.

    Args:
        plans: at least one dict as described in docs/plan_json.md.

    Raises:
        ValueError: there is no plan.
    """
    if not plans:
        raise ValueError("html_report: there is no plan to show")
    used = {kind for plan in plans for kind, _ in figures.kinds(plan)}
    return rendering.html(
        __package__,
        "plans.html",
        plans=plans,
        figures=figures,
        sections=sections,
        suggestions=suggestions,
        parts=[figures.time_by_part(plan) for plan in plans],
        kinds={kind: label for kind, label in figures.KINDS.items() if kind in used},
        scale=max(max(figures.needed(plan), plan["memory"]["hbm"]) for plan in plans),
    )
