"""Writes an explanation as one HTML page without scripts or external files, so that it can be mailed."""

from lingvo_moe.core.console import units
from lingvo_moe.core.pages import rendering
from lingvo_moe.core.pages.tables import Piece
from lingvo_moe.core.partitioner import spmd
from lingvo_moe.core.partitioner.explained import (
    Exchange,
    Explained,
    ShardedTensor,
    axes_text,
    dims,
    exchanges_table,
    tensor_type,
)
from lingvo_moe.core.partitioner.sharding_figure import figure

_MOST_ROWS = 400
_COLOURS = {
    spmd.RESHARD: "network",
    spmd.PARTIAL: "slots",
    spmd.HALO: "activations",
    spmd.RESULT: "padding",
}


def html_page(explanation: Explained) -> str:
    """Returns the HTML page for an explanation."""
    headline = [
        ("devices", f"{explanation.mesh.size:,}"),
        ("annotated tensors", f"{len(explanation.tensors):,}"),
        ("collectives", f"{len(explanation.exchanges):,}"),
        ("reshards", f"{len(explanation.reshards):,}"),
        ("sent for reshards", units.size(explanation.Bytes(spmd.RESHARD))),
        ("in all, one device, one run", units.size(explanation.Bytes())),
    ]
    reasons = [
        Piece(reason, _COLOURS[reason], held, units.size(held))
        for reason in spmd.REASONS
        if (held := explanation.Bytes(reason))
    ]
    return rendering.html(
        __package__,
        "sharding.html",
        e=explanation,
        headline=[(what, value, "") for what, value in headline],
        reasons=sorted(reasons, key=lambda piece: -piece.value),
        explained=spmd.REASONS,
        flows=_flows(explanation),
        exchanges=exchanges_table(explanation, _MOST_ROWS),
        cards=[t for t in explanation.tensors if t.phase == "forward"] or explanation.tensors,
        padding=_padding,
        figure=figure,
        axes_text=axes_text,
        dims=dims,
        tensor_type=tensor_type,
    )


def _flows(explanation: Explained) -> list[list[Exchange]]:
    """The reshards, the largest first; those of one tensor that follow each other are together."""
    groups: dict[tuple, list[Exchange]] = {}
    for exchange in sorted(explanation.reshards, key=lambda e: -e.total_bytes):
        what = exchange.what
        if what.shape:
            key = (exchange.tensor, what.op, what.shape, what.source, what.phase, what.times)
            groups.setdefault(key, []).append(exchange)
    return list(groups.values())


def _padding(tensor: ShardedTensor) -> str:
    return ", ".join(f"{n} of dimension {d}" for d, n in enumerate(tensor.padding) if n)
