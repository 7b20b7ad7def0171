"""Writes the page on reproduction from recorded plans and the paper's figures."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lingvo_moe.core.pages import rendering

from . import gpus, measures, models, paper, requests, scaling, text, thresholds
from .goldens import COMPILE_TIME, MissingGoldens
from .measures import Plan

Plans = Mapping[str, Plan]
Pictures = Callable[[], dict[str, bytes]]
_MODULES = (gpus, measures, models, paper, requests, scaling, text, thresholds)  # of the template

_TITLES = {
    "table3": "tables 1 and 3",
    "figure2": "figure 2",
    "figure7": "figure 7",
    "figure8": "figure 8",
    "figure9": "figure 9",
    "decode": "decoding",
    **{generation: f"today's TPU {generation}" for generation in requests.GENERATIONS},
    "stages": "MoE(2048E, 36L) in stages",
    "state": "MoE(2048E, 60L) without copies",
    "cluster": "MoE(2048E, 36L) on 256 GPUs",
    **{card: f"{card.upper()} clusters" for card in requests.CARDS},
}


def write(
    plans: Plans, compiling: Mapping[str, Any] | None, partial: bool = False
) -> tuple[str, Pictures]:
    """Returns the page's Markdown, and functions that draw its pictures: SVG by file name.

    Raises:
        MissingGoldens: some are, and not `partial`; or all are.
    """
    missing = _missing(plans, compiling)
    if missing and not partial:
        raise MissingGoldens(_tell(missing))
    groups = [group for group in requests.GROUPS if group not in missing]
    if not any(requests.GROUPS[group] for group in groups):
        raise MissingGoldens(_tell(missing))
    drawn = _pictures(groups, plans, compiling)
    generations = [group for group in groups if group in requests.GENERATIONS]
    cards = [group for group in groups if group in requests.CARDS]
    forward = scaling.forward(plans) if "figure8" in groups else None
    findings = _findings(groups, plans, compiling, forward)
    page = rendering.markdown(
        __package__,
        "reproduction.md",
        plans=plans,
        compiling=compiling,
        groups=groups,
        generations=generations,
        cards=cards,
        forward=forward,
        pictures=drawn,
        left_out=[_TITLES[group] for group in missing],
        findings=findings,
        **{module.__name__.rpartition(".")[2]: module for module in _MODULES},
    )
    return text.fill(page), lambda: {name: draw() for name, draw in drawn.items()}


def _missing(plans: Plans, compiling: Mapping[str, Any] | None) -> dict[str, list[str]]:
    """The plans that each group lacks."""
    missing = {
        group: [name for name in names if name not in plans]
        for group, names in requests.GROUPS.items()
    }
    for group in requests.PARTLY:
        if len(missing[group]) < len(requests.GROUPS[group]):
            missing[group] = []
    if compiling is None:
        missing["figure2"].append(COMPILE_TIME)
    return {group: names for group, names in missing.items() if names}


def _tell(missing: Mapping[str, list[str]]) -> str:
    lines = [f"{_TITLES[group]}: {', '.join(names)}" for group, names in missing.items()]
    if any(COMPILE_TIME in names for names in missing.values()):
        lines.append(f"{COMPILE_TIME} is made by `python -m benchmarks.compile_time`")
    lines.append(
        "the others by `python -m tools.reproduce --plans --missing --update`; "
        "--partial leaves out what they are for"
    )
    return "plans are missing in docs/plans:\n  " + "\n  ".join(lines)


def _findings(
    groups: Sequence[str], plans: Plans, compiling: Any, forward: scaling.Forward | None
) -> list[text.Finding]:
    """The rows of the summary, in the order of the page."""
    found = models.findings(plans) if "table3" in groups else []
    found += [scaling.finding_of_compiling(compiling)] if "figure2" in groups else []
    found += [scaling.finding_of_memory(plans)] if "figure7" in groups else []
    found += scaling.findings_of_forward(forward) if forward else []
    found += scaling.findings_of_collectives() if "figure9" in groups else []
    found += models.findings_of_today(plans, [g for g in groups if g in requests.GENERATIONS])
    return found + gpus.findings(plans, [g for g in groups if g in requests.CARDS])


def _pictures(
    groups: Sequence[str], plans: Plans, compiling: Any
) -> dict[str, Callable[[], bytes]]:
    """Functions that draw the pictures, by file name."""
    from . import figures

    out: dict[str, Callable[[], bytes]] = {}
    if "table3" in groups and models.speeds(plans)[0]:
        out["reproduction_speed.svg"] = lambda: figures.speed(*models.speeds(plans))
    if "figure2" in groups:
        out["reproduction_compile_time.svg"] = lambda: figures.compile_time(compiling["entries"])
    if "figure7" in groups:
        bars = scaling.memory_bars(plans)
        out["reproduction_memory.svg"] = lambda: figures.memory(bars)
    if "figure8" in groups and (forward := scaling.forward(plans)):
        out["reproduction_forward.svg"] = lambda: figures.forward_time(forward.plans)
    if "figure9" in groups:
        lines = scaling.figure9_lines()
        out["reproduction_collectives.svg"] = lambda: figures.collectives(*lines)
    return out
