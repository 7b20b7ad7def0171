"""Computes the page's figures from plans: seconds by part, memory, rates, fitted exponents."""

import math
from collections.abc import Mapping, Sequence
from statistics import linear_regression
from typing import Any

from lingvo_moe.analysis.plans.figures import Plan as Plan, needed
from lingvo_moe.core.console import units

Plans = Mapping[str, Plan]  # by name

# The page states a reason for a ratio to the paper's figure from these on, and for such differences of shares (of 1)
# or of exponents.
RATIO = 1.25
COMPILE_RATIO = 1.3
FLAT_RATIO = 1.1
SHARE = 0.05
EXPONENT = 0.1

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


def times_apart(ratio: float) -> float:
    """The factor between two numbers whose ratio is `ratio`: the larger divided by the smaller, at least 1."""
    return max(ratio, 1 / ratio)


def fits(plan: Plan) -> bool:
    return bool(plan["memory"]["fits"])


def held(plan: Plan) -> str:
    """The memory that a program needs of what a device has."""
    return f"{units.size(needed(plan), 1)} of {units.size(plan['memory']['hbm'], 1)}"


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
    return seconds if host is None else f"{seconds}, {units.size(host, 1)}"


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


def count(plan: Plan, **fields: str) -> int:
    """Number of collectives in a step whose fields have these values, e.g. kind='all-to-all', phase='forward'."""
    rows = plan["collectives"]
    return sum(r["count"] for r in rows if all(r[name] == value for name, value in fields.items()))


def counts(plan: Plan) -> list[str]:
    """The number of collectives of each kind in a step, e.g. '18 all-to-all'."""
    kinds = sorted({row["kind"] for row in plan["collectives"]})
    return [f"{count(plan, kind=kind)} {kind}" for kind in kinds]


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
