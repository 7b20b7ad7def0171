"""Derives what reports show of pipelines from a plan's `pipelines`."""

from collections.abc import Mapping, Sequence
from typing import Any

from lingvo_moe.core.console import units
from lingvo_moe.core.pipeline.blocks import describe_padding
from lingvo_moe.core.planner.figures import Plan

# The columns of the table of loops.
LOOPS = (
    "pipeline",
    "phase",
    "ticks",
    "a tick",
    "in all",
    "permutes a tick",
    "bytes of one",
    "seconds",
    "overlapped",
)
PERMUTES = 5  # where the columns of permutes begin
# Those that are estimated.
ESTIMATED = ("a tick", "in all", "seconds", "overlapped")


def sentences(plan: Plan) -> list[str]:
    """One sentence for each pipeline: its schedule and its bubble."""
    return [_sentence(pipeline) for pipeline in plan.get("pipelines") or ()]


def _sentence(pipeline: Mapping[str, Any]) -> str:
    name = pipeline["name"] or "pipeline"
    if "bubble" not in pipeline:
        return f"{name}: its schedule is not known, so neither is its bubble."
    repeats = f", {pipeline['repeats']} chunks a stage" if pipeline["repeats"] > 1 else ""
    share = pipeline["bubble"]
    found = (
        "The bubble is not known: seconds of each kind of work do not follow from these loops."
        if share is None
        else f"The bubble is {units.share(share)} of a stage's time in these loops."
    )
    return (
        f"{name}: {pipeline['schedule']} of {pipeline['stages']} stages and {pipeline['micro_batches']}"
        f" micro-batches{repeats}. {found}{_padding(pipeline)}"
    )


def _padding(pipeline: Mapping[str, Any]) -> str:
    stacks = list((pipeline.get("blocks") or {}).items())
    found = describe_padding(stacks, pipeline["stages"], pipeline["repeats"])
    return found and f" {found}."


def loop_rows(plan: Plan) -> list[list[str]]:
    """Returns rows of cells in the columns of LOOPS: one for each loop, and for each further size of its permutes."""
    rows = []
    for pipeline in plan.get("pipelines") or ():
        name = pipeline["name"] or units.DASH
        for loop in pipeline["loops"]:
            runs = f"{loop['runs']} × " if loop["runs"] > 1 else ""
            cells = [
                name,
                loop["phase"].replace("_", " "),
                f"{runs}{loop['ticks']:,}",
                units.duration(loop["tick_seconds"]),
                units.duration(loop["seconds"]),
            ]
            for permute in loop["permutes"] or [None]:
                rows.append([*cells, *_permute(permute)])
                cells = [""] * len(cells)
            name = ""
    return rows


def _permute(permute: Mapping[str, Any] | None) -> Sequence[str]:
    if permute is None:
        return [units.DASH] * 4
    return [
        f"{permute['count']:g}",
        units.size(permute["bytes"]),
        units.duration(permute["seconds"]),
        units.share(
            permute["overlapped_seconds"] / permute["seconds"] if permute["seconds"] else None
        ),
    ]
