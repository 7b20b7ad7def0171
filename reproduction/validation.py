"""Holds estimates of steps against the measured ones of published.py, and writes the page on it."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lingvo_moe.analysis.plans import tables
from lingvo_moe.analysis.plans.machines import pace
from lingvo_moe.analysis.plans.machines.machine import parse_machine
from lingvo_moe.core.console import units
from lingvo_moe.core.pages import rendering
from lingvo_moe.core.pages.tables import Table, markdown, numbers, words

from . import goldens, published, text
from .published import ROWS, Row

_DEVICES = {"tpu": "TPU", "gpu": "GPU"}


@dataclass(frozen=True)
class Validated:
    """A published step beside the estimate for it."""

    row: Row
    time: Mapping[str, Any]  # the time of the plan

    @property
    def ratio(self) -> float:
        """The estimate as a multiple of the measured time."""
        return float(self.time["step_seconds"] / self.row.seconds)

    @property
    def error(self) -> float:
        return abs(self.ratio - 1)

    @property
    def bounded(self) -> bool:
        """Whether the measured time lies within the plan's bounds."""
        return bool(self.time["lower_seconds"] <= self.row.seconds <= self.time["upper_seconds"])

    def Entry(self) -> dict[str, Any]:
        """The entry that `tools.plan --validate --output` writes."""
        return {
            "row": self.row.number,
            "device": self.row.device,
            "measured_seconds": self.row.seconds,
            "estimated_seconds": self.time["step_seconds"],
            "lower_seconds": self.time["lower_seconds"],
            "upper_seconds": self.time["upper_seconds"],
            "fitted": self.row.fitted,
            "doubt": self.row.doubt,
        }


def held(plans: Path) -> list[Validated]:
    """The rows whose plans are recorded in a directory, with the seconds that today's model of time gives.

    Raises:
        MissingGoldens: none is recorded there.
    """
    recorded = goldens.read_all(plans, [row.name for row in ROWS])
    if not recorded:
        raise goldens.MissingGoldens(
            f"no plan of a published step is recorded in {plans}; python -m tools.reproduce --plans --only=published "
            "--update makes them, in a checkout"
        )
    pairs = [(row, recorded[row.name]) for row in ROWS if row.name in recorded]
    return [Validated(row, _time(row, plan)) for row, plan in pairs]


def _time(row: Row, plan: dict[str, Any]) -> Mapping[str, Any]:
    """The plan's `time`. Programs of others have kernels in place of loops, whose turns do not count then."""
    if not row.ours:
        plan = plan | {"work": [part | {"turns": 0} for part in plan["work"]]}
    machine = parse_machine(plan["topology"]["name"])
    time: Mapping[str, Any] = tables.timed_again(plan, machine)["time"]
    return time


def table(rows: Iterable[Validated]) -> Table:
    """Each row: estimate beside measurement, error and bounds."""
    columns = [
        *words("row", "step", "machine"),
        *numbers("measured", "estimated", "error", "at least", "at most"),
    ]
    return Table([*columns, *words("fitted")], [_cells(row) for row in rows])


def _cells(validated: Validated) -> list[str]:
    times = ("step_seconds", "lower_seconds", "upper_seconds")
    estimated, least, most = (units.duration(validated.time[name]) for name in times)
    outside = "" if validated.bounded else " (outside)"
    return [
        validated.row.number + ("*" if validated.row.doubt else ""),
        validated.row.what,
        validated.row.wanted.topology,
        units.duration(validated.row.seconds),
        estimated,
        f"{validated.ratio - 1:+.1%}",
        least,
        most + outside,
        "yes" if validated.row.fitted else "",
    ]


def errors(rows: Sequence[Validated]) -> Table:
    """The median error by generation, and of all TPUs and GPUs: of the fitted rows, of the others, and of all."""
    groups = {kind: [h for h in rows if h.row.kind == kind] for kind in (h.row.kind for h in rows)}
    for device, name in _DEVICES.items():
        groups[f"all {name}s"] = [h for h in rows if h.row.device == device]
    clear = {name: [h for h in group if not h.row.doubt] for name, group in groups.items()}
    return Table(
        words("machines")
        + numbers("rows", "fitted rows", "median error", "of fitted", "of others", "in doubt"),
        [
            [
                name,
                str(len(group)),
                str(sum(h.row.fitted for h in group)),
                _median(group),
                _median([h for h in group if h.row.fitted]),
                _median([h for h in group if not h.row.fitted]),
                _median([h for h in groups[name] if h.row.doubt]),
            ]
            for name, group in clear.items()
        ],
    )


def median(rows: Sequence[Validated]) -> float:
    """The median error; not a number for no rows."""
    return statistics.median([h.error for h in rows]) if rows else math.nan


def _median(rows: Sequence[Validated]) -> str:
    return f"{median(rows):.1%}" if rows else units.DASH


def ratios(rows: Sequence[Validated]) -> Table:
    """Two rows of one model each, which need no fit: how much longer the step of the second is."""
    by = {h.row.number: h for h in rows}
    cells = []
    for one, other, what in published.RATIOS:
        if one in by and other in by:
            measured = by[other].row.seconds / by[one].row.seconds
            estimated = by[other].time["step_seconds"] / by[one].time["step_seconds"]
            cells.append(
                [
                    f"{one} to {other}",
                    what,
                    f"{measured:.3f}",
                    f"{estimated:.3f}",
                    f"{estimated / measured - 1:+.1%}",
                ]
            )
    return Table(words("rows", "what changes") + numbers("measured", "estimated", "error"), cells)


def paces() -> Table:
    """The fitted numbers by machine."""
    rows = [
        [kind, f"{fitted.efficiency:.2f}", f"{fitted.overlap:.1f}", fitted.source]
        for kind, fitted in pace.PACES.items()
    ]
    columns = [*words("machine"), *numbers("efficiency", "overlap"), *words("fitted to steps of")]
    return Table(columns, rows)


def sources(rows: Sequence[Validated]) -> list[tuple[str, str]]:
    """Each source and the numbers of its rows."""
    numbers_of: dict[str, list[str]] = {}
    for validated in rows:
        numbers_of.setdefault(validated.row.source, []).append(validated.row.number)
    return [(source, ", ".join(numbers)) for source, numbers in numbers_of.items()]


def page(plans: Path) -> str:
    """docs/validation.md."""
    rows = held(plans)
    return text.fill(
        rendering.markdown(
            __package__,
            "validation.md",
            rows=rows,
            clear=[h for h in rows if not h.row.doubt],
            worst=sorted((h for h in rows if h.row.why), key=lambda h: -h.error),
            outside=[h for h in rows if not h.bounded],
            paces_table=markdown(paces()),
            sources=sources(rows),
            margin=pace.MARGIN,
            published=published,
            text=text,
            markdown=markdown,
            table=table,
            errors=errors,
            ratios=ratios,
            median=median,
        )
    )
