"""Tables and the picture of tools.compare_experts.

Letters: L layer, E expert.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lingvo_moe.reproduction import figures

_STACKS = ("encoder", "decoder")


def routing(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means over rows of a run's metrics.jsonl and all MoE layers; nothing for a dense model.

    Returns:
        dropped: the share of choices that found their expert full, in training; without_expert: the share of
        tokens that no expert saw; imbalance: the load of the busiest expert over the mean.
    """
    if not any(name.startswith("moe/") for name in rows[-1]):
        return {}

    def mean(name: str) -> float:
        return float(np.mean([row[f"moe/{stack}/{name}"] for row in rows for stack in _STACKS]))

    loads = np.concatenate([row[f"moe/{stack}/expert_load"] for row in rows for stack in _STACKS])
    return {
        "dropped": mean("over_capacity_ratio"),
        "without_expert": mean("dispatch_0"),
        "imbalance": float(np.mean(loads.max(1) / loads.mean(1))),
    }


def table(results: Mapping[str, Any]) -> str:
    """Two Markdown tables: more experts, and the routers side by side."""
    lines: list[str] = []
    for group, head in (("experts", "experts"), ("routers", "router, 16 experts")):
        rows = {n: r for n, r in results.items() if group in r["group"].split()}
        if lines:
            lines.append("")
        lines += [
            f"| {head} | parameters | held-out loss | against dense | dropped | without expert | busiest / mean |",
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        lines += [_row(r, results.get("dense")) for r in rows.values()]
    return "\n".join(lines) + "\n"


def _row(r: Mapping[str, Any], dense: Mapping[str, Any] | None) -> str:
    gain = f"{r['held_out_nll'] - dense['held_out_nll']:+.3f}" if dense else ""
    share = [f"{100 * r[k]:.1f} %" if k in r else "" for k in ("dropped", "without_expert")]
    imbalance = f"{r['imbalance']:.1f}" if "imbalance" in r else ""
    cells = (r["says"], f"{r['params']:,}", f"{r['held_out_nll']:.3f}", gain, *share, imbalance)
    return f"| {' | '.join(cells)} |"


def picture(results: Mapping[str, Any]) -> bytes:
    """SVG: held-out loss by experts, and by router."""
    return figures.expert_comparison(
        sorted(
            (r["experts"], r["held_out_nll"], r["params"])
            for r in results.values()
            if "experts" in r["group"].split()
        ),
        [
            (r["says"], r["held_out_nll"])
            for r in results.values()
            if "routers" in r["group"].split()
        ],
    )
