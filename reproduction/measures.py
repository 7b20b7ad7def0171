"""Computes the page's figures from plans: seconds by part, memory, rates, fitted exponents."""

import math
from collections.abc import Mapping, Sequence
from statistics import linear_regression
from typing import Any

from lingvo_moe.analysis.plans.figures import Plan as Plan, needed
from lingvo_moe.core.console import units

from . import text

Plans = Mapping[str, Plan]  # by name

# Figure 8's parts of the forward pass, in the order in which they are shown.
FORWARD = {
    "attention": "attention",
    "dense_ffn": "dense feed-forward",
    "experts": "experts",
    "gating": "gating",
    "dispatch_combine": "dispatch and combine: arithmetic",
    "dispatch_network": "dispatch and combine: all-to-all",
    "rest": "the rest",
}
# Figure 7's kinds of memory; what a plan has besides is added to the last.
MEMORY = {
    "weights": "weights",
    "slots": "optimizer slots",
    "weight_copies": "copies of weights",
    "activations": "activations kept for backward",
    "gradients": "gradients",
    "temporaries": "temporaries",
    "rest": "inputs, program, padding",
}


def has_time(plan: Plan | None) -> bool:
    """Whether the program was compiled, and so has a time."""
    return plan is not None and plan.get("time") is not None


def fits(plan: Plan) -> bool:
    return bool(plan["memory"]["fits"])


def held(plan: Plan) -> str:
    """The memory that a program needs of what a device has."""
    return f"{text.gib(needed(plan))} of {text.gib(plan['memory']['hbm'])}"


def machine_cells(plan: Plan) -> list[str]:
    """The machine of a plan, its chips, the memory of a device, and the costs of a step and of the budget."""
    time, top = plan["time"], plan["topology"]
    return [
        f"`{top['name']}`",
        f"{top['chips']:,}",
        held(plan),
        f"{time['step_seconds']:.2f} s",
        f"{time['tokens_per_second']:,.0f}",
        units.number(time["days"]),
        f"{time['chip_days']:,.0f}",
    ]


def machine_and_days(plan: Plan) -> str:
    """The machine of a plan, and the chip-days of the budget."""
    return f"`{plan['topology']['name']}`, {plan['time']['chip_days']:,.0f}"


def made_in(took: Mapping[str, Any]) -> str:
    """The seconds of lowering and compiling, and the host's memory, if it is known."""
    host = took.get("host_peak_bytes")
    seconds = f"{took['lower_seconds'] + took['compile_seconds']:.0f} s"
    return seconds if host is None else f"{seconds}, {text.gib(host)}"


def memory_kinds(plan: Plan) -> dict[str, float]:
    """Bytes by the keys of MEMORY; empty if the compiler reported only a sum."""
    kinds = plan["memory"].get("kinds") or {}
    if not kinds:
        return {}
    out = {key: float(kinds.get(key) or 0) for key in MEMORY if key != "rest"}
    rest = sum(v or 0 for k, v in kinds.items() if k not in out)
    return out | {"rest": float(max(rest, 0))}


def kept_for_backward(plan: Plan) -> int | None:
    """Bytes of activations kept for the backward pass; None if the compiler refused the program."""
    memory = plan["memory"]
    if not memory["fits"]:
        return None
    return memory.get("kept_for_backward", (memory.get("kinds") or {}).get("activations"))


def forward_seconds(plan: Plan) -> dict[str, float]:
    """Seconds of a forward pass by the keys of FORWARD. Communication counts to the part that it serves."""
    out = dict.fromkeys(FORWARD, 0.0)
    for row in plan["work"]:
        if row["phase"] == "forward":
            out[row["part"] if row["part"] in out else "rest"] += row["seconds"]
    for row in plan["collectives"]:
        if row["phase"] == "forward":
            part = row["part"] if row["part"] in out else "rest"
            out["dispatch_network" if part == "dispatch_combine" else part] += row["seconds"]
    return out


def forward_roofline(plan: Plan) -> float:
    """The share of a forward pass that its roofline, without communication, takes."""
    roofline = sum(r["roofline_seconds"] for r in plan["work"] if r["phase"] == "forward")
    return roofline / sum(forward_seconds(plan).values())


def collective_counts(plan: Plan) -> dict[str, int]:
    """Number of collectives of each kind in a step."""
    counts: dict[str, int] = {}
    for row in plan["collectives"]:
        counts[row["kind"]] = counts.get(row["kind"], 0) + row["count"]
    return dict(sorted(counts.items()))


def exchanges(plan: Plan) -> int:
    """Number of all-to-alls in the forward pass."""
    rows = [r for r in plan["collectives"] if r["phase"] == "forward"]
    return sum(r["count"] for r in rows if r["kind"] == "all-to-all")


def gathers_of_experts(plan: Plan) -> int:
    """Number of all-gathers in a step that serve the experts."""
    rows = [r for r in plan["collectives"] if r["part"] == "experts"]
    return sum(r["count"] for r in rows if r["kind"] == "all-gather")


def attributed(plan: Plan, what: str) -> float:
    """The share of `what` of the step's work, 'flops' or 'bytes', that belongs to named parts of the model."""
    named = sum(row[what] for row in plan["work"] if row["part"] not in ("loop", "other"))
    return named / sum(row[what] for row in plan["work"])


def without_layer(plan: Plan) -> dict[str, list[Mapping[str, Any]]]:
    """The collectives that belong to no layer, by part."""
    by_part: dict[str, list[Mapping[str, Any]]] = {}
    for row in plan["collectives"]:
        if not row["layer"]:
            by_part.setdefault(row["part"], []).append(row)
    return by_part


def exponent(xs: Sequence[float], ys: Sequence[float]) -> float:
    """The exponent p of the least-squares fit y = c x^p on logarithmic axes."""
    return linear_regression([math.log(x) for x in xs], [math.log(y) for y in ys]).slope


def spread(values: Sequence[float]) -> float:
    """The largest value divided by the smallest."""
    return max(values) / min(values)
