"""The cost of a planned step, from a user's own prices of machines."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from lingvo_moe.analysis.plans.figures import Plan
from lingvo_moe.analysis.plans.machines.base_machine import PlanError
from lingvo_moe.core.config.checks import did_you_mean
from lingvo_moe.core.topology_names import TopologyName

_SECONDS_AN_HOUR = 3600.0
_HOURS_A_DAY = 24.0


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
        "step_cost": price * chips * time["step_seconds"] / _SECONDS_AN_HOUR,
        "budget_cost": None if days is None else price * days * _HOURS_A_DAY,
    }
    return plan | {"time": time | cost}
