"""Writes plans as one HTML page without scripts or external files, so that it can be sent by mail."""

from collections.abc import Sequence

from lingvo_moe.core.pages import rendering
from lingvo_moe.core.planner import figures, sections
from lingvo_moe.core.planner.figures import Plan
from lingvo_moe.core.planner.suggestions import suggestions


def html_report(plans: Sequence[Plan]) -> str:
    """Returns the page: a comparison if there are several plans, then each plan.

    Args:
        plans: at least one dict as described in docs/planning.md.

    Raises:
        ValueError: there is no plan.
    """
    if not plans:
        raise ValueError("html_report: there is no plan to show")
    used = {kind for plan in plans for kind, _ in figures.kinds(plan)}
    return rendering.html(
        __package__,
        "plans.html",
        plans=plans,
        figures=figures,
        sections=sections,
        suggestions=suggestions,
        parts=[figures.time_by_part(plan) for plan in plans],
        kinds={kind: label for kind, label in figures.KINDS.items() if kind in used},
        scale=max(max(figures.needed(plan), plan["memory"]["hbm"]) for plan in plans),
    )
