"""The cost of a planned step, from a user's own prices of machines; and how long users of a server may wait."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lingvo_moe.analysis.plans.figures import Plan
from lingvo_moe.analysis.plans.machines.base_machine import PlanError
from lingvo_moe.core.config.checks import did_you_mean
from lingvo_moe.core.topology_names import TopologyName

SECONDS_AN_HOUR = 3600.0
_HOURS_A_DAY = 24.0
_TIME = re.compile(r"(\d+\.?\d*)(ms|s)")


def read_prices(text: str) -> tuple[tuple[str, float], ...]:
    """Reads 'v5p:4.2,h100:3': for TPU generations and GPU cards, what one chip costs an hour.

    Raises ValueError: with what would be right.
    """
    prices: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        kind, _, number = part.partition(":")
        try:
            price = float(number)
        except ValueError:
            price = math.nan
        if not (0 < price < math.inf):
            raise ValueError(
                f"{part!r} is no price of a chip-hour; a price is e.g. v5p:4.2, and several are separated by commas"
            )
        if kind.lower() in prices:
            raise ValueError(f"two prices of {kind}")
        prices[kind.lower()] = price
    return tuple(prices.items())


def check_prices(prices: Mapping[str, float], kinds: Iterable[str]) -> None:
    """Raises PlanError for a price of a machine that no plan is for."""
    kinds = sorted(set(kinds))
    for kind in prices:
        if kind not in kinds:
            raise PlanError(
                f"--price={kind}:{prices[kind]:g}: no plan is for {kind}{did_you_mean(kind, kinds)}; the plans are for "
                f"{', '.join(kinds)}"
            )


def kind_of(plan: Plan) -> str:
    """The TPU generation or the GPU card of a plan, e.g. 'v5p' or 'h100'."""
    return TopologyName.parse(plan["topology"]["name"]).kind


def priced(plan: dict[str, Any], prices: Mapping[str, float]) -> dict[str, Any]:
    """The plan with `price`, `step_cost` and `budget_cost` in its `time`, if it has times and its machine a price."""
    price, time = prices.get(kind_of(plan)), plan.get("time")
    if price is None or not time:
        return plan
    chips = plan["topology"]["chips"]
    days = time.get("chip_days")
    cost = {
        "price": price,
        "step_cost": price * chips * time["step_seconds"] / SECONDS_AN_HOUR,
        "budget_cost": None if days is None else price * days * _HOURS_A_DAY,
    }
    return plan | {"time": time | cost}


@dataclass(frozen=True)
class LatencyLimits:
    """The longest times that a user may wait, in seconds."""

    first_token: float
    between: float  # between two tokens

    def Keeps(self, first_token: float, between: float) -> bool:
        """Whether waits of so many seconds are within the limits."""
        return first_token <= self.first_token and between <= self.between

    def __str__(self) -> str:
        return f"{self.first_token:g}s/{self.between:g}s"


def read_limits(text: str) -> LatencyLimits:
    """Reads '200ms/30ms'. Raises ValueError with what would be right."""
    times = [_TIME.fullmatch(part) for part in text.split("/")]
    if len(times) != 2 or None in times:
        raise ValueError(f"{text!r} is no pair of times, e.g. 200ms/30ms or 1.5s/50ms")
    first, between = (float(t[1]) * (1e-3 if t[2] == "ms" else 1) for t in times if t)
    if not (first > 0 and between > 0):
        raise ValueError(f"{text!r}: both times must be positive")
    return LatencyLimits(first, between)
