"""Writes an explanation as one HTML page without scripts or external files, so that it can be mailed."""

from collections.abc import Sequence
from html import escape

from lingvo_moe.core.console import units
from lingvo_moe.core.pages import markup, rendering
from lingvo_moe.core.partitioner import spmd
from lingvo_moe.core.partitioner.explained import (
    Exchange,
    Explained,
    ShardedTensor,
    axes_text,
    dims,
    exchange_row,
    tensor_type,
)
from lingvo_moe.core.partitioner.sharding_figure import figure

_MOST_FLOWS, _MOST_CARDS, _MOST_ROWS = 24, 120, 400
_COLOURS = {
    spmd.RESHARD: "network",
    spmd.PARTIAL: "slots",
    spmd.HALO: "activations",
    spmd.RESULT: "padding",
}
_STYLE = """
.shards text { font: 10px ui-sans-serif, system-ui, sans-serif; text-anchor: middle; dominant-baseline: central;
  fill: #1d2126 }
.shards .dots { fill: var(--soft); font-size: 14px }
.shards .edge { fill: none; stroke: var(--paper); stroke-width: 1.5 }
.shards .pad { fill: url(#padding) } .shards rect[fill="var(--track)"] ~ text { fill: var(--ink) }
.hatch { position: absolute; width: 0; height: 0 }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 17rem), 1fr)); gap: 1.4rem 1.6rem }
.card, .flow { border-top: 1px solid var(--rule); padding-top: .6rem; min-width: 0 }
.card p, .flow p { margin: .1rem 0 .5rem; font-size: .82rem; color: var(--soft); overflow-wrap: anywhere;
  font-family: ui-sans-serif, system-ui, sans-serif }
.card b, .flow b { color: var(--ink); font-weight: 600 } code { font-size: .92em }
.flows { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 25rem), 1fr)); gap: 1.4rem 1.6rem }
.steps figcaption { overflow-wrap: anywhere } .steps svg { max-width: 100% }
.steps { display: grid; align-items: center; justify-content: start; gap: .8rem;
  grid-template-columns: minmax(0, max-content) 6rem minmax(0, max-content) }
.steps figure { margin: 0 } .arrow { text-align: center; font: .8rem ui-sans-serif, system-ui, sans-serif;
  color: var(--network) } .arrow span { display: block; font-size: 1.5rem; line-height: 1 }
"""
_PATTERN = (
    "<svg class='hatch' aria-hidden='true'><defs><pattern id='padding' width='6' height='6' "
    "patternUnits='userSpaceOnUse' patternTransform='rotate(45)'><rect width='6' height='6' fill='var(--track)'/>"
    "<line x1='0' y1='0' x2='0' y2='6' stroke='var(--soft)' stroke-width='1.5'/></pattern></defs></svg>"
)
_METHOD = (
    "Shardings are those that XLA's propagation chose; collectives are those that its SPMD partitioner inserted, with "
    "the bytes of one execution on one device. Colours and numbers stand for devices; hatching is the padding of a "
    "dimension that does not divide evenly."
)


def html_page(explanation: Explained) -> str:
    """Returns the HTML page for an explanation."""
    title = f"{explanation.name} on {explanation.mesh}"
    body = [
        "<header><p class='kicker'>How a program is sharded, and what it sends</p>",
        f"<h1>{escape(explanation.name)} <span>on mesh {escape(str(explanation.mesh))}</span></h1></header>",
        _headline(explanation),
        _wrong(explanation),
        _reasons(explanation),
        _flows(explanation),
        _table(explanation),
        _cards(explanation),
    ]
    return markup.document(
        title,
        f"{_PATTERN}\n{''.join(body)}",
        _METHOD,
        rendering.source("lingvo_moe.core.pages", "colours.css") + _STYLE,
    )


def _headline(explanation: Explained) -> str:
    pairs = [
        ("devices", f"{explanation.mesh.size:,}"),
        ("annotated tensors", f"{len(explanation.tensors):,}"),
        ("collectives", f"{len(explanation.exchanges):,}"),
        ("reshards", f"{len(explanation.reshards):,}"),
        ("sent for reshards", units.size(explanation.Bytes(spmd.RESHARD))),
        ("in all, one device, one run", units.size(explanation.Bytes())),
    ]
    return markup.figures((name, value, "") for name, value in pairs)


def _wrong(explanation: Explained) -> str:
    found = "".join(f"<li>{escape(str(wrong))}</li>" for wrong in explanation.wrong)
    if not found:
        return ""
    return f"<p class='verdict no'>Wrong numbers will come out of:</p><ul>{found}</ul>"


def _reasons(explanation: Explained) -> str:
    held = {reason: explanation.Bytes(reason) for reason in spmd.REASONS}
    held = {reason: count for reason, count in held.items() if count}
    if not held:
        return "<p class='verdict yes'>The partitioner inserted no communication.</p>"
    most = max(held.values())
    rows = markup.rows(
        (
            f"<i class='swatch' style='background:var(--{_COLOURS[reason]})'></i>{escape(reason)}",
            markup.bar([(reason, _COLOURS[reason], count / most, units.size(count))]),
            units.size(count),
        )
        for reason, count in sorted(held.items(), key=lambda item: -item[1])
    )
    notes = "; ".join(f"{reason}: {spmd.REASONS[reason]}" for reason in held)
    return (
        f"<h2>Why it communicates</h2><figure>{rows}"
        f"<figcaption>{escape(notes)}.</figcaption></figure>"
    )


def _flows(explanation: Explained) -> str:
    found = [e for e in explanation.reshards if e.what.shape]
    if not found:
        return ""
    kept: dict[tuple, list[Exchange]] = {}
    for exchange in sorted(found, key=lambda e: -e.total_bytes):
        what = exchange.what
        key = (exchange.tensor, what.op, what.shape, what.source, what.phase, what.times)
        kept.setdefault(key, []).append(exchange)
    groups = list(kept.values())
    flows = "".join(_flow(group, explanation) for group in groups[:_MOST_FLOWS])
    rest = len(groups) - _MOST_FLOWS
    note = f"<p class='note'>{rest} smaller ones are in the table below.</p>" if rest > 0 else ""
    return f"<h2>Reshards</h2><div class='flows'>{flows}</div>{note}"


def _flow(group: Sequence[Exchange], explanation: Explained) -> str:
    what, size = group[-1].what, explanation.mesh.size
    sides = []
    for sharding in (what.source, what.target):
        if sharding is None:
            sides.append("<figure><figcaption>as it is computed</figcaption></figure>")
            continue
        axes = axes_text(sharding, explanation.mesh)
        sides.append(
            f"<figure>{figure(sharding, what.shape, size)}<figcaption><code>{escape(axes)}</code>"
            f"</figcaption></figure>"
        )
    if what.target is None:
        sides[1] = (
            f"<figure><figcaption>as <code>{escape(what.op)}</code> needs it</figcaption></figure>"
        )
    kinds = ", then ".join(dict.fromkeys(e.what.kind for e in group))
    count = {None: "? × ", 1: ""}.get(what.times, f"{what.times} × ")
    held = units.size(sum(e.what.num_bytes for e in group))
    arrow = f"<div class='arrow'>{escape(kinds)}<span>→</span>{count}{escape(held)}</div>"
    return (
        f"<div class='flow'><p><b>{escape(group[0].tensor)}</b> "
        f"{escape(tensor_type(what.dtype, what.shape))}, {escape(what.phase)}<br>{_line(group[0])}</p>"
        f"<div class='steps'>{sides[0]}{arrow}{sides[1]}</div></div>"
    )


def _line(exchange: Exchange) -> str:
    line = exchange.line
    if line is None:
        return ""
    return f"{escape(line.place)} <code>{escape(line.text)}</code>"


def _table(explanation: Explained) -> str:
    if not explanation.exchanges:
        return ""
    heads = ("bytes", "times", "devices", "collective", "why", "tensor", "from", "to", "line")
    ordered = sorted(explanation.exchanges, key=lambda e: -e.total_bytes)
    rows = [
        [escape(cell) for cell in exchange_row(e, explanation.mesh)] for e in ordered[:_MOST_ROWS]
    ]
    table = markup.table([(name, i < 3, False) for i, name in enumerate(heads)], rows)
    return f"<h2>All communication</h2>{table}"


def _cards(explanation: Explained) -> str:
    shown = [t for t in explanation.tensors if t.phase == "forward"] or list(explanation.tensors)
    rest = len(explanation.tensors) - len(shown)
    cards = "".join(_card(t, explanation) for t in shown[:_MOST_CARDS])
    notes = []
    if rest:
        notes.append(f"{rest} more are their gradients, or are recomputed for the gradients.")
    if len(shown) > _MOST_CARDS:
        notes.append(f"{len(shown) - _MOST_CARDS} are not drawn.")
    note = f"<p class='note'>{' '.join(notes)}</p>" if notes else ""
    return f"<h2>Annotated tensors</h2>{note}<div class='cards'>{cards}</div>"


def _card(tensor: ShardedTensor, explanation: Explained) -> str:
    padding = ", ".join(f"{n} of dimension {d}" for d, n in enumerate(tensor.padding) if n)
    lines = [
        f"<b>{escape(tensor.annotates or tensor.name)}</b>",
        escape(tensor_type(tensor.dtype, tensor.shape)),
        f"<code>{escape(axes_text(tensor.sharding, explanation.mesh))}</code>, "
        f"{escape(dims(tensor.part_shape))} on a device"
        + (f", padded by {escape(padding)}" if padding else ""),
    ]
    if tensor.line is not None:
        lines.append(f"{escape(tensor.line.place)} <code>{escape(tensor.line.text)}</code>")
    drawing = figure(tensor.sharding, tensor.shape, explanation.mesh.size)
    return f"<div class='card'><p>{'<br>'.join(lines)}</p>{drawing}</div>"
