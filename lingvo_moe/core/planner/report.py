"""Prints plans as tables in a terminal."""

from collections.abc import Sequence
from typing import Literal

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lingvo_moe.core.console import units
from lingvo_moe.core.planner import figures, host_figures, pipeline_figures, state_figures
from lingvo_moe.core.planner.figures import Plan
from lingvo_moe.core.planner.page import html_report
from lingvo_moe.core.planner.suggestions import suggestions

__all__ = ["html_report", "print_comparison", "print_plan"]

_BAR = 24
_PHASE_STYLES = dict(zip(figures.PHASES, ("cyan", "magenta", "blue", "green")))
# Terminals narrower than this get fewer columns.
_WIDE = 116
_NARROW_TIMES = ("flops", "total", "compute", "memory", "network")
_HOLDERS = 12
_COLLECTIVES = 16
# From this width on a comparison has a row for each plan.
_COMPARED_ACROSS = 150


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Prints one plan: verdict, headline, memory, time, collectives, compile figures.

    Args:
        plan: a dict as described in docs/planning.md.
        console: where to print; default: standard output.
    """
    console = console or Console()
    console.print()
    console.print(Text(f"{figures.name(plan)} · {plan['what']} step", style="bold"), end="")
    console.print(f" on {figures.get(plan, 'topology.name')}")
    style = "bold green" if plan["memory"].get("fits") else "bold red"
    console.print(Text(figures.verdict(plan), style=style))
    if figures.why_no_time(plan):
        console.print(Text(f"No time: {figures.why_no_time(plan)}.", style="red"))
    console.print()
    _print_pairs(console, _headline(plan))
    _section(console, "Setting", _pairs(figures.setting(plan)))
    _section(console, "Memory of a device", _memory(plan))
    if plan.get("state"):
        _section(console, "Training state", _state(plan))
    if plan.get("host"):
        _section(console, "Memory of the hosts (seconds estimated)", _host(plan, console.width))
    holders = _holders(plan)
    if holders.row_count:
        _section(
            console, "What is live at the peak (traced through the compiled schedule)", holders
        )
    if advice := suggestions(plan):
        _section(console, "What would help", Group(*(Text(f"• {line}") for line in advice)))
    if figures.time_by_part(plan):
        _section(console, "Time of a step by part (estimated)", _time(plan, console.width))
    if plan.get("pipelines"):
        _section(console, "Pipelines (seconds estimated)", _pipelines(plan, console.width))
    if plan.get("collectives"):
        _section(
            console, "Collectives of a step (seconds estimated)", _collectives(plan, console.width)
        )
    if in_all := figures.between_slices_in_all(plan):
        _section(
            console,
            "Between slices, over the data-centre network (seconds estimated)",
            _between_slices(plan, in_all, console.width),
        )
    if plan.get("mesh_axes"):
        _section(console, "Mesh axes and nodes (seconds estimated)", _mesh_axes(plan))
    _section(console, "Compiling", _pairs(figures.compile_figures(plan)))


def print_comparison(plans: Sequence[Plan], console: Console | None = None) -> None:
    """Prints several plans side by side, estimated figures in italics."""
    console = console or Console()
    if console.width >= _COMPARED_ACROSS:
        console.print(_across(plans))
    else:
        many = max((console.width - 16) // 24, 1)
        for first in range(0, len(plans), many):
            console.print(_down(plans[first : first + many], plans))
    budgets = figures.budgets(plans)
    if budgets:
        budget = " or ".join(units.quantity(b) for b in budgets)
        counted = "Days, chip-days and device-years"
        if any(figures.get(plan, "time.price") for plan in plans):
            counted = "Cost in all, days, chip-days and device-years"
        console.print(f"{counted} are for {budget} tokens.", style="dim")
    console.print("Figures in italics are estimated.", style="dim")
    for plan in plans:
        reason = figures.why_no_time(plan)
        if reason:
            where = f"{figures.name(plan)} on {figures.get(plan, 'topology.name')}"
            console.print(f"{where}: {reason}.", style="dim")


def _across(plans: Sequence[Plan]) -> Table:
    """A table with one row for each plan."""
    table = _table()
    for i, (heading, estimated) in enumerate(figures.compared_columns(plans)):
        style = "bold italic" if estimated else "bold"
        justify: Literal["left", "right"] = "left" if i < 3 else "right"
        table.add_column(heading, justify=justify, header_style=style, overflow="fold")
    for plan, row in zip(plans, figures.compared(plans)):
        table.add_row(*row, style=None if plan["memory"].get("fits") else "red")
    return table


def _down(plans: Sequence[Plan], every: Sequence[Plan]) -> Table:
    """A table with one column for each of some plans, for narrow terminals; `every` decides the rows."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    rows = figures.compared(every)
    rows = [rows[every.index(plan)] for plan in plans]
    for i, (heading, estimated) in enumerate(figures.compared_columns(every)):
        style = "italic dim" if estimated else "dim"
        table.add_row(Text(heading, style=style), *(Text(row[i], overflow="fold") for row in rows))
    table.add_row()
    return table


def _headline(plan: Plan) -> list[tuple[str, str]]:
    marked = " (estimated)"
    return [
        (label, value + marked * (estimated and value != units.DASH))
        for label, value, estimated in figures.headline(plan)
    ]


def _memory(plan: Plan) -> Group:
    memory = plan["memory"]
    table = _table("", "bytes", "of HBM", "")
    hbm = memory.get("hbm") or 1
    for kind, held in figures.kinds(plan):
        row = figures.KINDS[kind], units.size(held), units.share(held / hbm)
        table.add_row(*row, bar(held / hbm, _BAR))
    needed = memory.get("needed")
    if needed:
        total = Text(units.size(needed), style="bold")
        table.add_row(
            Text("in all", style="bold"),
            total,
            units.share(needed / hbm),
            bar(needed / hbm, _BAR),
        )
    parts = [table] if table.row_count else []
    return Group(*parts, Text(figures.compiler_figures(plan), style="dim"))


def _holders(plan: Plan) -> Table:
    table = _table("what", "layer", "part", "phase", "bytes")
    holders = plan["memory"].get("holders") or []
    for item in holders[:_HOLDERS]:
        cells = (item[key] or units.DASH for key in ("layer", "part", "phase"))
        table.add_row(figures.KINDS[item["kind"]], *cells, units.size(item["bytes"]))
    rest = holders[_HOLDERS:]
    if rest:
        held = units.size(sum(item["bytes"] for item in rest))
        table.add_row(f"{len(rest)} more", "", "", "", held, style="dim")
    return table


def _time(plan: Plan, width: int) -> Group:
    parts = figures.time_by_part(plan)
    fields = [f for f in figures.TIMES if f in _NARROW_TIMES or width >= _WIDE]
    bar_width = _BAR if width >= _WIDE + _BAR else 0
    table = _table("part", *(figures.TIMES[f] for f in fields), *([""] if bar_width else []))
    for part in parts:
        stack = [_stack(part, parts[0].total, bar_width)] if bar_width else []
        table.add_row(part.part.replace("_", " "), *figures.cells([part], fields), *stack)
    table.add_row("in all", *figures.cells(parts, fields), style="bold")
    if not bar_width:
        return Group(table)
    legend = Text()
    for phase, style in _PHASE_STYLES.items():
        legend.append("■ ", style=style).append(f"{phase}  ", style="dim")
    legend.append("■ ", style="yellow").append("network", style="dim")
    return Group(table, legend)


def _stack(part: figures.PartTime, longest: float, width: int) -> Text:
    out, done, drawn = Text(), 0.0, 0
    pieces = [(part.phases[phase], style) for phase, style in _PHASE_STYLES.items()]
    for seconds, style in [*pieces, (part.network, "yellow")]:
        done += seconds
        end = round(done / longest * width)
        out.append("█" * (end - drawn), style=style)
        drawn = end
    return out


def _collectives(plan: Plan, width: int) -> Group:
    spanned = figures.spanned(plan)
    places = ("kind", "layer", "part", "phase", spanned)
    columns = (*places, "a step", "bytes of one", "devices", "seconds")
    items = figures.collectives(plan)
    narrow = () if width >= _WIDE else ("part", "devices")
    left_out = narrow if any(map(figures.spans, items)) else (*narrow, spanned)
    shown = [c for c in columns if c not in left_out]
    table = _table(*shown)

    def add(cells: Sequence[str], style: str | None = None) -> None:
        table.add_row(*(cell for c, cell in zip(columns, cells) if c in shown), style=style)

    for item in items[:_COLLECTIVES]:
        add(
            [
                *(item[key] or units.DASH for key in ("kind", "layer", "part", "phase")),
                figures.spans(item),
                f"{item['count']:,}",
                units.size(item["bytes"]),
                f"{item['participants']:,}",
                units.duration(item.get("seconds")),
            ]
        )
    rest = items[_COLLECTIVES:]
    if rest:
        count = f"{sum(item['count'] for item in rest):,}"
        seconds = units.duration(sum(item.get("seconds") or 0.0 for item in rest))
        add([f"{len(rest)} more", "", "", "", "", count, "", "", seconds], "dim")
    totals = "; ".join(
        f"{count:,} {kind} of {units.size(held)} in {units.duration(seconds)}"
        for kind, count, held, seconds in figures.collective_totals(plan)
    )
    return Group(table, Text(f"In all: {totals}.", style="dim"))


def _state(plan: Plan) -> Group:
    table = _table(*state_figures.PARTS)
    for row in state_figures.part_rows(plan):
        table.add_row(*row)
    return Group(table, *(Text(line) for line in state_figures.sentences(plan)))


def _host(plan: Plan, width: int) -> Group:
    """Renders the moves from and to the hosts; a narrow terminal leaves out the part."""
    shown = [i for i, h in enumerate(host_figures.MOVES) if width >= _WIDE or h != "part"]
    table = _table(*(host_figures.MOVES[i] for i in shown))
    rows = host_figures.move_rows(plan)
    for row in rows[:_COLLECTIVES]:
        table.add_row(*(row[i] for i in shown))
    if len(rows) > _COLLECTIVES:
        table.add_row(f"{len(rows) - _COLLECTIVES} more", style="dim")
    return Group(table, *(Text(line) for line in host_figures.sentences(plan)))


def _pipelines(plan: Plan, width: int) -> Group:
    """The loops over ticks; a narrow terminal leaves out their permutes."""
    shown = len(pipeline_figures.LOOPS) if width >= _WIDE else pipeline_figures.PERMUTES
    table = _table(*pipeline_figures.LOOPS[:shown])
    for row in pipeline_figures.loop_rows(plan):
        if any(row[:shown]):
            table.add_row(*row[:shown])
    return Group(table, *(Text(line) for line in pipeline_figures.sentences(plan)))


def _between_slices(plan: Plan, in_all: str, width: int) -> Group:
    rows = figures.between_slices(plan)
    narrow = () if width >= _WIDE else ("part", "sent by one")
    shown = [i for i, heading in enumerate(figures.BETWEEN) if heading not in narrow]
    table = _table(*(figures.BETWEEN[i] for i in shown))
    for row in rows[:_COLLECTIVES]:
        table.add_row(*(row[i] for i in shown))
    if len(rows) > _COLLECTIVES:
        table.add_row(f"{len(rows) - _COLLECTIVES} more", style="dim")
    return Group(*([table] if rows else []), Text(in_all, style="dim"))


def _mesh_axes(plan: Plan) -> Group:
    """Renders the bytes that each GPU sends by mesh axis and by order of the axes, if several, and the proposal."""
    parts: list[Table | Text] = []
    orders = figures.mesh_rows(plan, "orders", "mesh")
    tables = [("axis", figures.mesh_rows(plan, "by_axis", "axes"))]
    for heading, rows in tables + ([("order", orders)] if len(orders) > 1 else []):
        table = _table(heading, *figures.MOVED)
        for row in rows:
            table.add_row(*row)
        parts.append(table)
    return Group(*parts, Text(figures.get(plan, "mesh_axes.advice")))


def bar(fraction: float, width: int) -> str:
    """Draws a bar, `width` characters long for 1.0, to an eighth of a character.

    A fraction above 1 is drawn as a full bar that ends in '▶'.
    """
    if fraction > 1:
        return "█" * (width - 1) + "▶"
    eighths = round(max(fraction, 0) * width * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _table(*headings: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    words = ("what", "layer", "part", "phase", "kind", "axis", "order", "pipeline", "move", "")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in words else "right")
    return table


def _pairs(pairs: Sequence[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for label, value in pairs:
        table.add_row(Text(label, style="dim"), value)
    return table


def _print_pairs(console: Console, pairs: Sequence[tuple[str, str]]) -> None:
    console.print(Padding(_pairs(pairs), (0, 0, 0, 2), expand=False))


def _section(console: Console, title: str, body: Group | Table) -> None:
    console.print()
    console.print(Text(title, style="bold"))
    console.print(Padding(body, (0, 0, 0, 2), expand=False))
