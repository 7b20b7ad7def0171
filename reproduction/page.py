"""Writes the page on reproduction from recorded plans and the paper's figures."""

from collections.abc import Mapping
from typing import Any

from lingvo_moe.analysis.plans.figures import needed
from lingvo_moe.analysis.plans.machines.gpu_cluster import CARDS
from lingvo_moe.core.console import units
from lingvo_moe.core.pages import rendering

from . import measures, models, paper, requests, scaling, text
from .goldens import COMPILE_TIME, MissingGoldens
from .measures import Plans

_MODULES = (measures, models, paper, requests, scaling, text, units)  # of the template


def write(plans: Plans, compiling: Mapping[str, Any] | None) -> str:
    """Returns the page's Markdown. Its pictures are files, docs/images/reproduction_*.svg.

    Raises MissingGoldens: a plan, or what benchmarks/compile_time.py measures, is not recorded.
    """
    missing = [name for name in requests.REQUESTS if name not in plans]
    if missing:
        raise MissingGoldens(
            f"plans are missing in docs/plans: {', '.join(missing)}; "
            "python -m tools.reproduce --plans --missing --update makes them"
        )
    if compiling is None:
        raise MissingGoldens(
            f"{COMPILE_TIME} is missing in docs/plans; python -m benchmarks.compile_time makes it"
        )
    page = rendering.markdown(
        __package__,
        "reproduction.md",
        plans=plans,
        compiling=compiling,
        forward=scaling.forward(plans),
        cards={card: CARDS[card] for card in requests.CARDS},
        needed=needed,
        **{module.__name__.rpartition(".")[2]: module for module in _MODULES},
    )
    return text.fill(page)
