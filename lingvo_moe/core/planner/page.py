"""Plans as one HTML page that can be mailed around: nothing is loaded from anywhere, and nothing runs in it."""

from collections.abc import Iterable, Sequence
from html import escape

from lingvo_moe.core.planner import figures, units
from lingvo_moe.core.planner.figures import Plan
from lingvo_moe.core.planner.page_style import STYLE

_HOLDERS = 16
_STACKED = (*figures.PHASES, "network")
_METHOD = (
    "Memory, operation counts and collectives come from the program as the compiler made it; what was live at the "
    "peak is traced through its schedule. Times are estimates, not measurements: for each instruction the longest of "
    "its arithmetic at the chip's peak, its traffic at the memory's bandwidth and the compiler's own count of cycles, "
    "plus the collectives under the interconnect model that is stated with the plan; nothing overlaps."
)


def html_report(plans: Sequence[Plan]) -> str:
    """The page: a comparison where there are several plans, then each plan.

    Args:
        plans: dicts of docs/plan_json.md, at least one.
    """
    if not plans:
        raise ValueError("html_report: there is no plan to show")
    several = len(plans) > 1
    title = (
        f"{len(plans)} plans" if several else f"{figures.name(plans[0])} on {_topology(plans[0])}"
    )
    body = [_comparison(plans)] if several else []
    body += [_plan(plan, i, "h2" if several else "h1") for i, plan in enumerate(plans)]
    head = (
        "<meta charset='utf-8'><meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
    )
    return (
        f"<!doctype html>\n<html lang='en'><head>{head}</head>\n<body>\n{''.join(body)}"
        f"<footer>{escape(_METHOD)}</footer>\n</body></html>\n"
    )


# --- several plans


def _comparison(plans: Sequence[Plan]) -> str:
    heads = [(h, i > 2, estimated) for i, (h, estimated) in enumerate(figures.COMPARED)]
    rows = [
        [f"<a href='#plan-{i}'>{escape(row[0])}</a>", *map(escape, row[1:])]
        for i, row in enumerate(figures.compared(plans))
    ]
    budgets = sorted({figures.get(p, "time.budget_tokens") for p in plans} - {None})
    notes = ["Figures in italics are estimated."]
    if budgets:
        said = " or ".join(units.quantity(b) for b in budgets)
        notes.append(f"Days, chip-days and device-years are for {said} tokens.")
    for plan in plans:
        if figures.why_no_time(plan):
            notes.append(f"{_label(plan)}: {figures.why_no_time(plan)}.")
    parts = [
        "<header><p class='kicker'>Compiled for machines that need not be there</p>",
        f"<h1>{len(plans)} plans side by side</h1></header>",
        f"<div class='compare'>{_table(heads, rows)}</div>",
        f"<p class='note'>{escape(' '.join(notes))}</p>",
        "<h3>Memory of a device</h3>",
        _compared_memory(plans),
    ]
    timed = [(plan, figures.time_by_part(plan)) for plan in plans]
    longest = max((sum(p.total for p in parts_) for _, parts_ in timed), default=0.0)
    if longest:
        parts += ["<h3>Time of a step, estimated</h3>", _compared_time(timed, longest)]
    return "".join(parts) + "<div class='after'></div>"


def _compared_memory(plans: Sequence[Plan]) -> str:
    scale = max(max(figures.needed(p), figures.get(p, "memory.hbm") or 0) for p in plans) or 1
    rows = []
    for plan in plans:
        pieces = [
            (figures.KINDS[k], k, held / scale, units.size(held)) for k, held in figures.kinds(plan)
        ]
        if not pieces:
            pieces = [
                (
                    "needed",
                    "temporaries",
                    figures.needed(plan) / scale,
                    units.size(figures.needed(plan)),
                )
            ]
        mark = (figures.get(plan, "memory.hbm") or 0) / scale
        rows.append((escape(_label(plan)), _bar(pieces, mark), units.size(figures.needed(plan))))
    used = [
        k for k in figures.KINDS if any(k == kind for p in plans for kind, _ in figures.kinds(p))
    ]
    legend = _legend((k, figures.KINDS[k]) for k in used)
    return f"<figure>{_rows(rows)}{legend}<figcaption>The upright line is the HBM of the device.</figcaption></figure>"


def _compared_time(timed: Sequence[tuple[Plan, list[figures.PartTime]]], longest: float) -> str:
    rows = []
    for plan, parts in timed:
        seconds = {phase: sum(p.phases[phase] for p in parts) for phase in figures.PHASES}
        seconds["network"] = sum(p.network for p in parts)
        pieces = [(k, k, s / longest, units.duration(s)) for k, s in seconds.items()]
        total = units.duration(sum(seconds.values()) or None)
        rows.append((escape(_label(plan)), _bar(pieces), total))
    return f"<figure>{_rows(rows)}{_legend((k, k) for k in _STACKED)}</figure>"


# --- one plan


def _plan(plan: Plan, number: int, tag: str) -> str:
    fits = plan["memory"].get("fits")
    parts = [
        f"<article id='plan-{number}'><p class='kicker'>Plan of the {escape(plan['what'])} step</p>",
        f"<{tag} class='title'>{escape(figures.name(plan))} <span>on {escape(_topology(plan))}</span></{tag}>",
        f"<p class='verdict {'yes' if fits else 'no'}'>{escape(figures.verdict(plan))}</p>",
        _headline(plan),
    ]
    if figures.why_no_time(plan):
        parts.append(f"<p class='note'>No times: {escape(figures.why_no_time(plan))}.</p>")
    parts += [
        "<h3>What was planned</h3>",
        _facts(figures.setting(plan)),
        _memory(plan),
        _time(plan),
    ]
    parts += [_collectives(plan), _compiling(plan), "</article>"]
    return "".join(parts)


def _headline(plan: Plan) -> str:
    cells = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(value)}"
        + ("<span class='estimated'>estimated</span>" if estimated and value != units.DASH else "")
        + "</dd></div>"
        for label, value, estimated in figures.headline(plan)
    )
    return f"<dl class='figures'>{cells}</dl>"


def _memory(plan: Plan) -> str:
    memory, kinds = plan["memory"], figures.kinds(plan)
    hbm = memory.get("hbm") or 0
    scale = max(hbm, figures.needed(plan)) or 1
    parts = ["<h2>Memory of a device</h2>"]
    if kinds:
        pieces = [(figures.KINDS[k], k, held / scale, units.size(held)) for k, held in kinds]
        most = max(held for _, held in kinds)
        rows = [
            (
                f"<i class='swatch' style='background:var(--{k})'></i>{escape(figures.KINDS[k])}",
                _bar([(figures.KINDS[k], k, held / most, units.size(held))]),
                units.size(held),
            )
            for k, held in kinds
        ]
        caption = f"Against {units.size(hbm)} of HBM. {figures.said_by_compiler(plan)}"
        parts.append(
            f"<figure>{_bar(pieces, hbm / scale, 'whole')}{_rows(rows)}"
            f"<figcaption>{escape(caption)}</figcaption></figure>"
        )
    if memory.get("advice"):
        lines = "".join(f"<li>{escape(line)}</li>" for line in memory["advice"])
        parts.append(f"<h3>What would help</h3><ul>{lines}</ul>")
    if memory.get("holders"):
        parts += ["<h3>What is live at the peak</h3>", _holders(memory["holders"])]
    return "".join(parts)


def _holders(holders: Sequence[Plan]) -> str:
    rows = []
    for item in holders[:_HOLDERS]:
        swatch = f"<i class='swatch' style='background:var(--{item['kind']})'></i>"
        places = (escape(_words(item[key]) or units.DASH) for key in ("layer", "part", "phase"))
        what = swatch + escape(figures.KINDS[item["kind"]])
        rows.append([what, *places, units.size(item["bytes"])])
    rest = holders[_HOLDERS:]
    if rest:
        held = units.size(sum(item["bytes"] for item in rest))
        rows.append([f"{len(rest)} more", "", "", "", held])
    heads = [(name, False, False) for name in ("what", "layer", "part", "phase")]
    return _table(heads + [("bytes", True, False)], rows)


def _time(plan: Plan) -> str:
    parts = figures.time_by_part(plan)
    if not parts:
        return ""
    longest = parts[0].total
    rows = []
    for part in parts:
        pieces = [
            (p, p, part.phases[p] / longest, units.duration(part.phases[p])) for p in figures.PHASES
        ]
        pieces.append(("network", "network", part.network / longest, units.duration(part.network)))
        rows.append((escape(_words(part.part)), _bar(pieces), units.duration(part.total)))
    heads = [("part", False, False)]
    heads += [(h, True, f not in ("flops", "num_bytes")) for f, h in figures.TIMES.items()]
    table = [[escape(_words(part.part)), *figures.cells([part])] for part in parts]
    total = figures.cells(parts)
    return (
        "<h2>Time of a step, estimated</h2>"
        f"<figure>{_rows(rows)}{_legend((k, k) for k in _STACKED)}</figure>"
        + _table(heads, table, ["in all", *total])
        + "<p class='note'>Roofline: for each instruction the longer of arithmetic and memory. Compiler: the cycles "
        "that the compiler itself counts, network left out. In all: for each instruction the longer of the two, "
        "plus network.</p>"
    )


def _collectives(plan: Plan) -> str:
    items = figures.collectives(plan)
    if not items:
        return ""
    heads = [(h, False, False) for h in ("kind", "layer", "part", "phase")]
    heads += [(h, True, False) for h in ("a step", "bytes of one", "devices")]
    heads.append(("seconds", True, True))
    rows = [
        [
            escape(item["kind"]),
            *(escape(_words(item[key]) or units.DASH) for key in ("layer", "part", "phase")),
            f"{item['count']:,}",
            units.size(item["bytes"]),
            f"{item['participants']:,}",
            units.duration(item.get("seconds")),
        ]
        for item in items
    ]
    seconds = sum(item.get("seconds") or 0.0 for item in items)
    count = sum(item["count"] for item in items)
    foot = ["in all", "", "", "", f"{count:,}", "", "", units.duration(seconds)]
    model = figures.get(plan, "topology.model") or ""
    return f"<h2>Collectives of a step</h2>{_table(heads, rows, foot)}<p class='note'>{escape(model)}</p>"


def _compiling(plan: Plan) -> str:
    pairs = figures.compile_figures(plan)
    return f"<h2>Compiling</h2>{_facts(pairs)}" if pairs else ""


# --- pieces


def _bar(
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


def _rows(rows: Iterable[tuple[str, str, str]]) -> str:
    """Bars below one another; (label as HTML, bar, value)."""
    cells = "".join(
        f"<span>{label}</span>{bar}<b>{escape(value)}</b>" for label, bar, value in rows
    )
    return f"<div class='rows'>{cells}</div>"


def _legend(items: Iterable[tuple[str, str]]) -> str:
    marks = "".join(
        f"<span><i class='swatch' style='background:var(--{colour})'></i>{escape(text)}</span>"
        for colour, text in items
    )
    return f"<div class='legend'>{marks}</div>"


def _facts(pairs: Iterable[tuple[str, str]]) -> str:
    cells = "".join(f"<dt>{escape(a)}</dt><dd>{escape(b)}</dd>" for a, b in pairs)
    return f"<dl class='facts'>{cells}</dl>"


def _table(
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


def _topology(plan: Plan) -> str:
    return str(figures.get(plan, "topology.name") or units.DASH)


def _label(plan: Plan) -> str:
    return f"{figures.name(plan)}, {_topology(plan)}"


def _words(name: str) -> str:
    return name.replace("_", " ")
