"""Draws the tables and pictures of tools.compare_experts.

Letters: L layer, E expert.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import NullLocator

from lingvo_moe.core.pages import drawing
from lingvo_moe.core.pages.tables import Table, markdown, numbers, words

from .expert_variants import GROUPS

_STACKS = ("encoder", "decoder")
_HEADS = {
    "experts": "experts",
    "routers": "router, 16 experts",
    "recipes": "recipe",
    "balance": "balanced by",
}
# Losses are compared with these.
_BASES = {
    "experts": "dense",
    "routers": "dense",
    "recipes": "default",
    "balance": "by_loss_seed1",
}
_SETTLED = 50  # from this step on a router should lose few choices, and no expert should be dead


def routing(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Summarises how the MoE layers of a run routed its tokens, by the rows of its metrics.jsonl; {} for a dense model.

    Returns:
        Means over the last five rows and all layers: `dropped`, the share of choices that found their expert full, in
        training; `without_expert`, the share of tokens that no expert processed; `imbalance`, the load of the busiest
        expert divided by the mean. From four rows on `busiest`, the same ratio for each quarter of the rows and each
        layer. From step 50 on `worst_dropped` and `worst_dead`, the largest share of dropped choices, and of experts
        without a token, in any row and layer.
    """
    if not any(name.startswith("moe/") for name in rows[-1]):
        return {}
    last, settled = rows[-5:], [row for row in rows if row["step"] >= _SETTLED]
    out: dict[str, Any] = {
        "dropped": float(np.mean(_of_layers(last, "over_capacity_ratio"))),
        "without_expert": float(np.mean(_of_layers(last, "dispatch_0"))),
        "imbalance": float(np.mean(_peaks(last))),
    }
    if settled:
        out["worst_dropped"] = float(np.max(_of_layers(settled, "over_capacity_ratio")))
        out["worst_dead"] = float(np.max(_of_layers(settled, "dead_experts")))
    if len(rows) >= 4:
        quarters = np.array_split(_peaks(rows), 4)
        out["busiest"] = [quarter.mean(0).round(3).tolist() for quarter in quarters]
    return out


def _peaks(rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """The load of the busiest expert divided by the mean, [R,L] for R rows."""
    load_RLE = _of_layers(rows, "expert_load")
    return np.asarray(load_RLE.max(-1) / load_RLE.mean(-1))


def _of_layers(rows: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    """A metric of all MoE layers, of the encoder first: [R,L,...] for R rows."""
    of_rows = [
        [row[f"moe/{s}/{name}"] for s in _STACKS if f"moe/{s}/{name}" in row] for row in rows
    ]
    return np.array([np.concatenate(stacks) for stacks in of_rows])


def groups(results: Mapping[str, Any]) -> list[str]:
    """The groups that results are of: each has a variant that is in no other."""
    return [group for group in GROUPS if any(r["group"] == group for r in results.values())]


def table(results: Mapping[str, Any], group: str) -> str:
    """A Markdown table of a group. The worst layer's shares are those from step 50 on."""
    base = _BASES[group]
    columns = words(_HEADS[group]) + numbers(
        *("parameters", "steps", "held-out loss", f"against {base}", "dropped", "without expert"),
        *("busiest / mean", "in each quarter, by layer", "most dropped", "most dead", "CPU s"),
    )
    return markdown(Table(columns, [_row(r, results.get(base)) for r in _of(results, group)]))


def _of(results: Mapping[str, Any], group: str) -> list[Mapping[str, Any]]:
    return [r for r in results.values() if group in r["group"].split()]


def _row(r: Mapping[str, Any], base: Mapping[str, Any] | None) -> list[str]:
    def share(name: str) -> str:
        return f"{100 * r[name]:.1f} %" if name in r else ""

    return [
        *(r["says"], f"{r['params']:,}", str(r["steps"]), f"{r['held_out_nll']:.3f}"),
        f"{r['held_out_nll'] - base['held_out_nll']:+.3f}" if base else "",
        *(share("dropped"), share("without_expert")),
        f"{r['imbalance']:.1f}" if "imbalance" in r else "",
        "; ".join(" ".join(f"{x:.2f}" for x in layers) for layers in r.get("busiest", ())),
        *(share("worst_dropped"), share("worst_dead")),
        str(r.get("cpu_seconds", "")),
    ]


def picture(results: Mapping[str, Any], group: str) -> bytes:
    """SVG: held-out loss by experts, or by router."""
    rows = _of(results, group)
    if group == "experts":
        return loss_by_experts(sorted((r["experts"], r["held_out_nll"], r["params"]) for r in rows))
    return loss_by_router([(r["says"], r["held_out_nll"]) for r in rows])


@drawing.picture
def loss_by_experts(points: Sequence[tuple[int, float, int]]) -> drawing.Figure:
    """Held-out loss by the number of experts: (experts, nats a token, parameters)."""
    figure, axes = drawing.plt.subplots(figsize=(5.4, 3.2))
    experts = [number for number, _, _ in points]
    axes.plot(experts, [nll for _, nll, _ in points], marker="o", color=drawing.FIRST)
    for number, nll, params in points:
        label = f"{params / 1e6:.1f}M"
        axes.annotate(label, (number, nll), (4, 5), textcoords="offset points")
    axes.set(xscale="log", xlabel="experts (1: dense)", ylabel="held-out loss, nats a token")
    axes.set_xticks(experts, [str(number) for number in experts])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.margins(x=0.12, y=0.15)
    axes.grid(axis="x", visible=False)
    return figure


@drawing.picture
def loss_by_router(bars: Sequence[tuple[str, float]]) -> drawing.Figure:
    """Held-out loss of each router, (what it is, nats a token), the lowest on top."""
    figure, axes = drawing.plt.subplots(figsize=(7.2, 0.5 + 0.3 * len(bars)))
    ordered = sorted(bars, key=lambda bar: -bar[1])
    axes.barh([says for says, _ in ordered], [nll for _, nll in ordered], color=drawing.FIRST)
    axes.bar_label(axes.containers[0], fmt="%.3f", padding=3)
    low, high = ordered[-1][1], ordered[0][1]
    margin = max(high - low, 0.02)
    axes.set(xlim=(low - 0.6 * margin, high + 0.3 * margin))
    axes.set(xlabel="held-out loss, nats a token (the axis does not begin at 0)")
    axes.grid(visible=False)
    return figure
