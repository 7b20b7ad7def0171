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


def routing(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means over rows of a run's metrics.jsonl and all MoE layers; nothing for a dense model.

    Returns:
        dropped: the share of choices that found their expert full, in training; without_expert: the share of
        tokens that no expert processed; imbalance: the load of the busiest expert divided by the mean.
    """
    if not any(name.startswith("moe/") for name in rows[-1]):
        return {}

    def mean(name: str) -> float:
        return float(np.mean(_of_layers(rows, name)))

    loads = np.concatenate(_of_layers(rows, "expert_load"))  # of rows and layers
    return {
        "dropped": mean("over_capacity_ratio"),
        "without_expert": mean("dispatch_0"),
        "imbalance": float(np.mean(loads.max(1) / loads.mean(1))),
    }


def worst_routing(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The worst of any layer in the rows of a run's metrics.jsonl from step 50 on; nothing for a dense model.

    Returns:
        worst_dropped: the largest share of choices that found their expert full; worst_dead: the largest share
        of experts without a token.
    """
    rows = [row for row in rows if row["step"] >= _SETTLED]
    if not rows or not any(name.startswith("moe/") for name in rows[-1]):
        return {}

    def worst(name: str) -> float:
        return float(np.max(_of_layers(rows, name)))

    return {"worst_dropped": worst("over_capacity_ratio"), "worst_dead": worst("dead_experts")}


def busiest(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[list[float]]]:
    """Busiest / mean in each quarter of a run's metrics.jsonl and each MoE layer, averaged over rows; nothing for a
    dense model, or for less than four rows.
    """
    if len(rows) < 4 or not any(name.startswith("moe/") for name in rows[-1]):
        return {}
    load_RLE = _of_layers(rows, "expert_load")
    ratio_RL = load_RLE.max(-1) / load_RLE.mean(-1)
    return {
        "busiest": [quarter.mean(0).round(3).tolist() for quarter in np.array_split(ratio_RL, 4)]
    }


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
