"""Writes plans as one HTML page without scripts or external files, so that it can be sent by mail."""

from collections.abc import Sequence
from html import escape

from lingvo_moe.core.console import units
from lingvo_moe.core.pages import markup
from lingvo_moe.core.pages.colours import COLOURS
from lingvo_moe.core.planner import figures, host_figures, pipeline_figures, state_figures
from lingvo_moe.core.planner.figures import Plan
from lingvo_moe.core.planner.suggestions import suggestions

_HOLDERS = 16
_STACKED = (*figures.PHASES, "network")
_METHOD = (
    "Memory, operation counts and collectives come from the compiled program; the buffers live at the peak are traced "
    "through its schedule. Times are estimates, not measurements. Each instruction takes the longest of three: its "
    "arithmetic at the chip's peak, its traffic at the memory's bandwidth, and the compiler's own count of cycles. "
    "Collectives take what the interconnect model stated with the plan gives. Nothing overlaps, but moves from and to "
    "the hosts' memory."
)


def html_report(plans: Sequence[Plan]) -> str:
    """Returns the page: a comparison if there are several plans, then each plan.

    Args:
        plans: at least one dict as described in docs/planning.md.

    Raises:
        ValueError: there is no plan.
    """
    if not plans:
        raise ValueError("html_report: there is no plan to show")
    several = len(plans) > 1
    title = (
        f"{len(plans)} plans" if several else f"{figures.name(plans[0])} on {_topology(plans[0])}"
    )
    body = [_comparison(plans)] if several else []
    body += [_plan(plan, i, "h2" if several else "h1") for i, plan in enumerate(plans)]
    return markup.document(title, "".join(body), _METHOD, COLOURS)


# --- several plans


def _comparison(plans: Sequence[Plan]) -> str:
    columns = figures.compared_columns(plans)
    heads = [(h, i > 2, estimated) for i, (h, estimated) in enumerate(columns)]
    rows = [
        [f"<a href='#plan-{i}'>{escape(row[0])}</a>", *map(escape, row[1:])]
        for i, row in enumerate(figures.compared(plans))
    ]
    budgets = figures.budgets(plans)
    notes = ["Figures in italics are estimated."]
    if budgets:
        budget = " or ".join(units.quantity(b) for b in budgets)
        notes.append(f"Days, chip-days and device-years are for {budget} tokens.")
    for plan in plans:
        if figures.why_no_time(plan):
            notes.append(f"{_label(plan)}: {figures.why_no_time(plan)}.")
    parts = [
        "<header><p class='kicker'>Compiled without the machines at hand</p>",
        f"<h1>{len(plans)} plans side by side</h1></header>",
        f"<div class='compare'>{markup.table(heads, rows)}</div>",
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
        rows.append(
            (escape(_label(plan)), markup.bar(pieces, mark), units.size(figures.needed(plan)))
        )
    used = [
        k for k in figures.KINDS if any(k == kind for p in plans for kind, _ in figures.kinds(p))
    ]
    legend = markup.legend((k, figures.KINDS[k]) for k in used)
    caption = "<figcaption>The upright line is the HBM of the device.</figcaption>"
    return f"<figure>{markup.rows(rows)}{legend}{caption}</figure>"


def _compared_time(timed: Sequence[tuple[Plan, list[figures.PartTime]]], longest: float) -> str:
    rows = []
    for plan, parts in timed:
        seconds = {phase: sum(p.phases[phase] for p in parts) for phase in figures.PHASES}
        seconds["network"] = sum(p.network for p in parts)
        pieces = [(k, k, s / longest, units.duration(s)) for k, s in seconds.items()]
        total = units.duration(sum(seconds.values()) or None)
        rows.append((escape(_label(plan)), markup.bar(pieces), total))
    return f"<figure>{markup.rows(rows)}{markup.legend((k, k) for k in _STACKED)}</figure>"


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
        markup.facts(figures.setting(plan)),
        _memory(plan),
        _state(plan),
        _host(plan),
        _time(plan),
    ]
    parts += [_pipelines(plan), _collectives(plan), _compiling(plan), "</article>"]
    return "".join(parts)


def _headline(plan: Plan) -> str:
    return markup.figures(
        (label, value, "estimated" if estimated and value != units.DASH else "")
        for label, value, estimated in figures.headline(plan)
    )


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
                markup.bar([(figures.KINDS[k], k, held / most, units.size(held))]),
                units.size(held),
            )
            for k, held in kinds
        ]
        caption = f"Against {units.size(hbm)} of HBM. {figures.compiler_figures(plan)}"
        parts.append(
            f"<figure>{markup.bar(pieces, hbm / scale, 'whole')}{markup.rows(rows)}"
            f"<figcaption>{escape(caption)}</figcaption></figure>"
        )
    if advice := suggestions(plan):
        lines = "".join(f"<li>{escape(line)}</li>" for line in advice)
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
    return markup.table(heads + [("bytes", True, False)], rows)


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
        rows.append((escape(_words(part.part)), markup.bar(pieces), units.duration(part.total)))
    heads = [("part", False, False)]
    heads += [(h, True, f not in ("flops", "num_bytes")) for f, h in figures.TIMES.items()]
    table = [[escape(_words(part.part)), *figures.cells([part])] for part in parts]
    total = figures.cells(parts)
    return (
        "<h2>Time of a step, estimated</h2>"
        f"<figure>{markup.rows(rows)}{markup.legend((k, k) for k in _STACKED)}</figure>"
        + markup.table(heads, table, ["in all", *total])
        + "<p class='note'>Roofline: for each instruction the longer of arithmetic and memory. Compiler: the "
        "compiler's own count of cycles, without network. In all: for each instruction the longer of roofline and "
        "compiler, plus network.</p>"
    )


def _state(plan: Plan) -> str:
    """The parts of the training state; '' for a plan without."""
    if not plan.get("state"):
        return ""
    heads = [(h, i > 2, False) for i, h in enumerate(state_figures.PARTS)]
    rows = [list(map(escape, row)) for row in state_figures.part_rows(plan)]
    notes = "".join(f"<p class='note'>{escape(s)}</p>" for s in state_figures.sentences(plan))
    return f"<h2>Training state</h2>{markup.table(heads, rows)}{notes}"


def _host(plan: Plan) -> str:
    """Renders the bytes in the hosts' memory and the moves from and to it; '' for a plan without."""
    if not plan.get("host"):
        return ""
    heads = [(h, i > 3, h in host_figures.ESTIMATED) for i, h in enumerate(host_figures.MOVES)]
    rows = [[escape(_words(cell)) for cell in row] for row in host_figures.move_rows(plan)]
    notes = "".join(f"<p class='note'>{escape(s)}</p>" for s in host_figures.sentences(plan))
    return f"<h2>Memory of the hosts</h2>{markup.table(heads, rows)}{notes}"


def _pipelines(plan: Plan) -> str:
    """The loops over ticks of the plan's pipelines; '' without any."""
    if not plan.get("pipelines"):
        return ""
    heads = [
        (h, i > 1, h in pipeline_figures.ESTIMATED) for i, h in enumerate(pipeline_figures.LOOPS)
    ]
    rows = [list(map(escape, row)) for row in pipeline_figures.loop_rows(plan)]
    notes = "".join(f"<p class='note'>{escape(s)}</p>" for s in pipeline_figures.sentences(plan))
    return f"<h2>Pipelines</h2>{markup.table(heads, rows)}{notes}"


def _collectives(plan: Plan) -> str:
    items = figures.collectives(plan)
    if not items:
        return ""
    located = any(map(figures.spans, items))
    heads = [(h, False, False) for h in ("kind", "layer", "part", "phase")]
    heads += [(figures.spanned(plan), True, False)] * located
    heads += [(h, True, False) for h in ("a step", "bytes of one", "devices")]
    heads.append(("seconds", True, True))
    rows = [
        [
            escape(item["kind"]),
            *(escape(_words(item[key]) or units.DASH) for key in ("layer", "part", "phase")),
            *([figures.spans(item)] if located else []),
            f"{item['count']:,}",
            units.size(item["bytes"]),
            f"{item['participants']:,}",
            units.duration(item.get("seconds")),
        ]
        for item in items
    ]
    seconds = sum(item.get("seconds") or 0.0 for item in items)
    count = sum(item["count"] for item in items)
    blank = [""] * (3 + located)
    foot = ["in all", *blank, f"{count:,}", "", "", units.duration(seconds)]
    model = figures.get(plan, "topology.model") or ""
    return (
        f"<h2>Collectives of a step</h2>{markup.table(heads, rows, foot)}<p class='note'>{escape(model)}</p>"
        + _between_slices(plan)
        + _mesh_axes(plan)
    )


def _between_slices(plan: Plan) -> str:
    """The collectives that cross TPU slices; '' for a plan of a single slice."""
    in_all = figures.between_slices_in_all(plan)
    if not in_all:
        return ""
    rows = [[escape(_words(cell)) for cell in row] for row in figures.between_slices(plan)]
    heads = [(h, i > 3, h == "seconds") for i, h in enumerate(figures.BETWEEN)]
    table = markup.table(heads, rows) if rows else ""
    return f"<h3>Between slices, over the data-centre network</h3>{table}<p class='note'>{escape(in_all)}</p>"


def _mesh_axes(plan: Plan) -> str:
    """Renders the bytes that each GPU of a cluster sends, by mesh axis and by order of the axes; '' for a TPU slice."""
    if not plan.get("mesh_axes"):
        return ""
    parts = ["<h3>Mesh axes and nodes</h3>"]
    orders = figures.mesh_rows(plan, "orders", "mesh")
    tables = [("axis", figures.mesh_rows(plan, "by_axis", "axes"))]
    for heading, rows in tables + ([("order", orders)] if len(orders) > 1 else []):
        heads = [(heading, False, False), *((h, True, h == "seconds") for h in figures.MOVED)]
        parts.append(markup.table(heads, [[escape(row[0]), *row[1:]] for row in rows]))
    advice = escape(figures.get(plan, "mesh_axes.advice"))
    return "".join(parts) + f"<p class='note'>{advice}</p>"


def _compiling(plan: Plan) -> str:
    pairs = figures.compile_figures(plan)
    return f"<h2>Compiling</h2>{markup.facts(pairs)}" if pairs else ""


def _topology(plan: Plan) -> str:
    return str(figures.get(plan, "topology.name") or units.DASH)


def _label(plan: Plan) -> str:
    return f"{figures.name(plan)}, {_topology(plan)}"


def _words(name: str) -> str:
    return name.replace("_", " ")
