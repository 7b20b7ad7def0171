"""Draws the schedules of pipelines, docs/images/pipelines.svg, from the ticks of `make_schedule`.

A row is a stage and a column is a kind of work in a tick; the computation of the loss, which no stage has, is left out.
Columns are equally wide, whatever their work takes.
"""

from dataclasses import dataclass

from lingvo_moe.core.pages import drawing
from lingvo_moe.core.pipeline.schedule import (
    BACKWARD,
    FORWARD,
    WEIGHTS,
    Order,
    Schedule,
    Work,
    make_schedule,
)

STAGES, MICRO_BATCHES = 4, 8
# Title, schedule, repeats.
DRAWN = (
    ("gpipe", "gpipe", 1),
    ("1f1b", "1f1b", 1),
    ("interleaved, 2 repeats", "interleaved", 2),
    ("zb_h1", "zb_h1", 1),
)
_BUBBLE = "bubble"
_KINDS = {
    FORWARD: ("forward", drawing.FIRST),
    BACKWARD: ("backward (with zb_h1, of inputs only)", drawing.SECOND),
    WEIGHTS: ("gradients of weights (zb_h1)", drawing.THIRD),
    _BUBBLE: ("bubble", drawing.RULE),
}
_INCHES = 0.17


@dataclass(frozen=True)
class TickCell:
    """The work of one stage in one column; `micro_batch` is None in the bubble."""

    # `stage`, `column`: its place in the picture.
    stage: int
    column: int
    kind: str  # FORWARD, BACKWARD or WEIGHTS
    micro_batch: int | None  # its number, or None


def micro_batch_of(schedule: Schedule, work: Work, tick: int, stage: int) -> int | None:
    """The micro-batch of a stage in a tick in which a kind of work exists; None in the bubble."""
    K, V = schedule.stages, schedule.repeats
    behind = {Order.FROM_FIRST: stage, Order.FROM_LAST: K - 1 - stage, Order.TOGETHER: 0}
    turn = tick - work.start - behind[work.order]
    if not 0 <= turn < V * schedule.micro_batches:
        return None
    # K micro-batches pass V times before the next K do.
    return turn // (V * K) * K + turn % K


def cells_of(schedule: Schedule) -> list[TickCell]:
    """All cells of a picture."""
    cells, column = [], 0
    works = [work for work in schedule.works if work.kind in _KINDS]
    for tick in range(max(work.stop for work in works)):
        for work in works:
            if work.start <= tick < work.stop:
                cells += [
                    TickCell(k, column, work.kind, micro_batch_of(schedule, work, tick, k))
                    for k in range(schedule.stages)
                ]
                column += 1
    return cells


@drawing.picture
def draw() -> drawing.Figure:
    """The schedules of DRAWN below each other, with 4 stages and 8 micro-batches."""
    drawn = {
        title: cells_of(make_schedule(name, STAGES, MICRO_BATCHES, repeats))
        for title, name, repeats in DRAWN
    }
    widest = 1 + max(cell.column for cells in drawn.values() for cell in cells)
    size = 0.8 + _INCHES * widest, 0.4 + len(drawn) * (0.4 + _INCHES * STAGES)
    figure, axes = drawing.plt.subplots(len(drawn), 1, figsize=size)
    for axis, (title, cells) in zip(axes, drawn.items(), strict=True):
        axis.set(title=title, xlim=(0, widest), ylim=(STAGES - 0.5, -0.5), xticks=[])
        axis.set_yticks(range(STAGES), [f"stage {k + 1}" for k in range(STAGES)])
        axis.tick_params(length=0)
        axis.grid(False)
        axis.spines[:].set_visible(False)
        for kind, (label, colour) in _KINDS.items():
            work = [c for c in cells if (c.kind if c.micro_batch is not None else _BUBBLE) == kind]
            places, stages = [c.column + 0.04 for c in work], [c.stage for c in work]
            axis.barh(stages, 0.92, 0.92, places, color=colour, label=label)
        for c in cells:
            number = "" if c.micro_batch is None else f"{c.micro_batch + 1}"
            at = {"ha": "center", "va": "center", "fontsize": 5.5, "color": drawing.PAPER}
            axis.text(c.column + 0.5, c.stage, number, **at)
    handles, labels = axes[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure
