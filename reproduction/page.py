"""Writes the page on reproduction from recorded plans and the paper's figures."""

from collections.abc import Callable, Mapping
from typing import Any

from lingvo_moe.core.pages import rendering

from . import gpus, measures, models, paper, requests, scaling, text, thresholds
from .goldens import COMPILE_TIME, MissingGoldens
from .measures import Plans

Pictures = Callable[[], dict[str, bytes]]
_MODULES = (gpus, measures, models, paper, requests, scaling, text, thresholds)  # of the template


def write(plans: Plans, compiling: Mapping[str, Any] | None) -> tuple[str, Pictures]:
    """Returns the page's Markdown, and functions that draw its pictures: SVG by file name.

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
    forward = scaling.forward(plans)
    findings = [
        *models.findings(plans),
        scaling.finding_of_compiling(compiling),
        scaling.finding_of_memory(plans),
        *scaling.findings_of_forward(forward),
        *scaling.findings_of_collectives(),
        *models.findings_of_today(plans),
        *gpus.findings(plans),
    ]
    page = rendering.markdown(
        __package__,
        "reproduction.md",
        plans=plans,
        compiling=compiling,
        forward=forward,
        findings=findings,
        **{module.__name__.rpartition(".")[2]: module for module in _MODULES},
    )

    def pictures() -> dict[str, bytes]:
        from . import figures

        return {
            "reproduction_speed.svg": figures.speed(*models.speeds(plans)),
            "reproduction_compile_time.svg": figures.compile_time(compiling["entries"]),
            "reproduction_memory.svg": figures.memory(scaling.memory_bars(plans)),
            "reproduction_forward.svg": figures.forward_time(forward.plans),
            "reproduction_collectives.svg": figures.collectives(*scaling.figure9_lines()),
        }

    return text.fill(page), pictures
