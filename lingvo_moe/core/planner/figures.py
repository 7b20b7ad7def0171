"""Derives the figures that reports show from a plan: for the terminal, the HTML page and comparisons.

A plan is a plain dict (docs/planning.md). If the compiler refused the program, its plan has no times and no work:
missing figures are None here and a dash in reports.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lingvo_moe.core.console import units

Plan = Mapping[str, Any]

# The keys of a plan's `memory.kinds`, in the order of reports, with the labels that reports use.
KINDS = {
    "weights": "weights",
    "slots": "optimizer slots",
    "inputs": "inputs and other state",
    "weight_copies": "weights cast or re-laid out",
    "activations": "activations kept for backward",
    "gradients": "gradients",
    "temporaries": "temporaries",
    "padding": "packing and padding",
    "code": "program",
}
# The fields of a PartTime that tables show, in order, with their headings.
TIMES = {
    "flops": "operations",
    "num_bytes": "traffic",
    "total": "in all",
    "compute": "arithmetic",
    "memory": "memory",
    "roofline": "roofline",
    "compiler": "compiler",
    "network": "network",
}
PHASES = ("forward", "recompute", "backward", "optimizer")


@dataclass
class PartTime:
    """The time that one part of the model takes in a step, in seconds.

    Attributes:
        part: the part's name, e.g. 'experts'.
        flops: FLOPs of its matrix products.
        num_bytes: its memory traffic.
        phases: seconds on the chip by phase, without collectives.
        compute: seconds for its arithmetic alone.
        memory: seconds for its memory traffic alone.
        roofline: the sum over instructions of the longer of compute and memory.
        compiler: the compiler's own estimate of the seconds on the chip.
        network: seconds of its collectives.
    """

    part: str
    flops: int = 0
    num_bytes: int = 0
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    compute: float = 0.0
    memory: float = 0.0
    roofline: float = 0.0
    compiler: float = 0.0
    network: float = 0.0

    @property
    def total(self) -> float:
        """Seconds on the chip and on the network together."""
        return sum(self.phases.values()) + self.network


def time_by_part(plan: Plan) -> list[PartTime]:
    """Returns one entry for each part of the model that takes time, the slowest first."""
    parts: dict[str, PartTime] = {}
    for item in plan.get("work") or ():
        entry = parts.setdefault(item["part"], PartTime(item["part"]))
        entry.phases[item["phase"]] += item["seconds"]
        entry.flops += item["flops"]
        entry.num_bytes += item["bytes"]
        for figure in ("compute", "memory", "roofline", "compiler"):
            setattr(entry, figure, getattr(entry, figure) + item[f"{figure}_seconds"])
    for item in plan.get("collectives") or ():
        entry = parts.setdefault(item["part"], PartTime(item["part"]))
        entry.network += item.get("seconds") or 0.0
    return sorted((p for p in parts.values() if p.total > 0), key=lambda p: -p.total)


def cells(parts: Sequence[PartTime], fields: Iterable[str] = tuple(TIMES)) -> list[str]:
    """Formats the fields of TIMES, summed over `parts`, with units; a dash for zero."""
    show: dict[str, Callable[[float | None], str]] = dict.fromkeys(TIMES, units.duration)
    show |= {"flops": units.work, "num_bytes": units.size}
    sums = {figure: sum(getattr(part, figure) for part in parts) for figure in fields}
    return [show[figure](value or None) for figure, value in sums.items()]


def kinds(plan: Plan) -> list[tuple[str, int]]:
    """Returns (kind, bytes on a device) for the kinds of memory in use, in the order of KINDS."""
    held = (plan.get("memory") or {}).get("kinds") or {}
    return [(kind, held[kind]) for kind in KINDS if held.get(kind)]


def name(plan: Plan) -> str:
    """The model's name, followed by its overrides in parentheses."""
    override = f" ({plan['override']})" if plan.get("override") else ""
    return f"{plan['model']}{override}"


def why_no_time(plan: Plan) -> str:
    """Says why a plan has no times; '' if it has a step time."""
    if get(plan, "time.step_seconds") is not None:
        return ""
    if get(plan, "memory.fits") is False:
        return f"the program does not fit: it misses by {units.size(get(plan, 'memory.misses_by'))}"
    return "the program was not compiled"


def needed(plan: Plan) -> int:
    """Bytes that the program needs on a device; for one that does not fit, what the compiler asked for."""
    memory = plan["memory"]
    return memory.get("needed") or memory.get("peak") or 0


def verdict(plan: Plan) -> str:
    """One sentence that says whether the program fits, and how much memory is left or missing."""
    memory = plan["memory"]
    need, hbm = needed(plan), memory.get("hbm")
    held = f"{units.size(need)} of {units.size(hbm)} on each device"
    if memory.get("fits"):
        return f"Fits: {held}, {units.size(max(hbm - need, 0))} to spare."
    return f"Does not fit: {held}, {units.size(memory.get('misses_by'))} too much."


def compiler_figures(plan: Plan) -> str:
    """Sentences with the compiler's own memory figures, and the peak found by tracing its schedule."""
    memory = plan["memory"]
    names = ("arguments", "outputs", "aliased", "temporaries", "code", "peak")
    reported = [f"{name} {units.size(memory[name])}" for name in names if memory.get(name)]
    out = f"The compiler's own figures: {', '.join(reported)}."
    if memory.get("traced_peak"):
        out += f" Peak traced through its schedule: {units.size(memory['traced_peak'])}."
    if memory.get("kept_for_backward"):
        kept = units.size(memory["kept_for_backward"])
        out += f" Activations held where the backward pass begins: {kept}."
    return out


def get(plan: Plan, path: str) -> Any:
    """Returns the value at a dotted path, or None where any part of the path is missing."""
    value: Any = plan
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def unit(plan: Plan) -> str:
    """The unit in which a plan's speed is counted: 'tokens', 'images'."""
    counted = list(plan.get("batch") or ("tokens",))[-1]
    return counted.removeprefix("target_")


def speed(plan: Plan) -> float | None:
    """The units (tokens, images) a second of a plan; None if it has no times."""
    return get(plan, f"time.{unit(plan)}_per_second")


def budget(plan: Plan) -> float | None:
    """Units of the whole training; 0 or None where a plan has no budget."""
    return get(plan, f"time.budget_{unit(plan)}")


def budgets(plans: Sequence[Plan]) -> list[float]:
    """The different budgets of several plans, in ascending order."""
    return sorted({found for plan in plans if (found := budget(plan)) is not None})


def headline(plan: Plan) -> list[tuple[str, str, bool]]:
    """Returns (name, value, whether it is estimated) for the figures that open a report."""
    out = [
        ("parameters", units.quantity(get(plan, "parameters.count")), False),
        ("peak memory a device", units.size(get(plan, "memory.peak")), False),
        ("step", units.duration(get(plan, "time.step_seconds")), True),
        (f"{unit(plan)} a second", units.number(speed(plan)), True),
        ("utilisation", units.share(get(plan, "time.utilization")), True),
    ]
    if budget(plan):
        whole = f"{units.quantity(budget(plan))} {unit(plan)}"
        out += [
            (f"days for {whole}", units.number(get(plan, "time.days")), True),
            (_days(plan), units.number(get(plan, "time.chip_days")), True),
            (_years(plan), units.number(get(plan, "time.device_years")), True),
        ]
    if get(plan, "time.price"):
        step_cost, cost = costs(plan)
        out.append(("cost of a step", step_cost, True))
        out += [(f"cost of {whole}", cost, True)] if budget(plan) else []
    return out


def _days(plan: Plan) -> str:
    return "GPU-days" if get(plan, "topology.card") else "chip-days"


def _years(plan: Plan) -> str:
    """Device-years are called core-years on chips whose two cores are two devices."""
    several = (get(plan, "topology.devices") or 0) > (get(plan, "topology.chips") or 0)
    return "core-years" if several else "device-years"


def collectives(plan: Plan) -> list[Mapping[str, Any]]:
    """The plan's collectives, the slowest first."""
    return sorted(plan.get("collectives") or (), key=lambda c: -(c.get("seconds") or 0.0))


def spans(item: Mapping[str, Any]) -> str:
    """The number of nodes, or of TPU slices, that each group of a collective spans; '' on a single slice."""
    count = item.get("nodes") or item.get("slices")
    return f"{count:,}" if count else ""


def spanned(plan: Plan) -> str:
    """The unit in which `spans` counts: 'slices' or 'nodes'."""
    return "slices" if get(plan, "topology.slices") else "nodes"


# The columns of the table of what crosses slices.
BETWEEN = ("kind", "layer", "part", "phase", "a step", "sent by one", "sent a step", "seconds")


def between_slices(plan: Plan) -> list[list[str]]:
    """Returns rows of cells for the collectives that cross TPU slices, the slowest first; see BETWEEN.

    Bytes are those that a device sends to other slices, by one execution and by all of a step.
    """
    return [
        [
            *(item[key] or units.DASH for key in ("kind", "layer", "part", "phase")),
            f"{item['count']:,}",
            units.size(item["sent_between"]),
            units.size(item["count"] * item["sent_between"]),
            units.duration(item["seconds"]),
        ]
        for item in _crossing(plan)
    ]


def between_slices_in_all(plan: Plan) -> str:
    """One sentence that sums up what crosses TPU slices; '' for a plan of a single slice."""
    if not get(plan, "topology.slices") or not plan.get("time"):
        return ""
    items = _crossing(plan)
    if not items:
        return "No collective crosses slices."
    count = sum(item["count"] for item in items)
    sent = sum(item["count"] * item["sent_between"] for item in items)
    seconds = sum(item["seconds"] for item in items)
    return (
        f"In all {count:,} a step: each device sends {units.size(sent)} to other slices in {units.duration(seconds)},"
        f" {units.share(seconds / plan['time']['step_seconds'])} of the step. The rate is the data sheet's, not"
        " measured."
    )


def _crossing(plan: Plan) -> list[Mapping[str, Any]]:
    return [item for item in collectives(plan) if item.get("slices", 1) > 1]


# The columns of the tables by mesh axis and by order of the axes, after their first one.
MOVED = ("a step", "sent inside nodes", "sent between nodes", "seconds")


def mesh_rows(plan: Plan, table: str, first: str) -> list[list[str]]:
    """Returns rows of cells from the plan's `mesh_axes`: one of its tables, which a cluster's plan has.

    Args:
        plan: a plan.
        table: 'by_axis' or 'orders'.
        first: the field of the first column, 'axes' or 'mesh'.
    """
    return [
        [
            row[first] or units.DASH,
            f"{row['count']:,}",
            units.size(row["sent_inside"]),
            units.size(row["sent_between"]),
            units.duration(row["seconds"]),
        ]
        for row in get(plan, f"mesh_axes.{table}") or ()
    ]


def collective_totals(plan: Plan) -> list[tuple[str, int, int, float]]:
    """Returns (kind, count a step, bytes a step, seconds) summed over layers, the slowest first."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0])
    for item in plan.get("collectives") or ():
        entry = sums[item["kind"]]
        entry[0] += item["count"]
        entry[1] += item["count"] * item["bytes"]
        entry[2] += item.get("seconds") or 0.0
    rows = [(kind, int(n), int(size), seconds) for kind, (n, size, seconds) in sums.items()]
    return sorted(rows, key=lambda row: -row[3])


def collective_share(plan: Plan) -> float | None:
    """The fraction of the step time that collectives take; None without a step time."""
    step = get(plan, "time.step_seconds")
    return (get(plan, "time.collective_seconds") or 0.0) / step if step else None


# Columns of a comparison: heading, whether the figure is estimated.
COMPARED = (
    ("model", False),
    ("step of", False),
    ("topology", False),
    ("parameters", False),
    ("memory of HBM", False),
    ("fits", False),
    ("step", True),
    ("steps/s", True),
    ("tokens/s", True),
    ("utilisation", True),
    ("network", True),
    ("days", True),
    ("chip-days", True),
    ("device-years", True),
    ("compile", False),
)
_AFTER_NETWORK = 1 + [heading for heading, _ in COMPARED].index("network")


_BUBBLE = ("bubble", False)
_COSTS = (("cost of a step", True), ("cost in all", True))


def compared_columns(plans: Sequence[Plan]) -> list[tuple[str, bool]]:
    """The columns of a comparison: those of COMPARED, with the bubble after the network if any plan has one.

    If any has a price, what a step and the budget cost follow.
    """
    columns = [*COMPARED, *(_COSTS if any(get(plan, "time.price") for plan in plans) else ())]
    if any(bubble(plan) is not None for plan in plans):
        columns.insert(_AFTER_NETWORK, _BUBBLE)
    return columns


def bubble(plan: Plan) -> float | None:
    """The share of a stage's time in pipelines in which it is idle; None without pipelines or their schedule.

    Several pipelines count by the seconds of their loops.
    """
    found = [p for p in plan.get("pipelines") or () if p.get("bubble") is not None]
    whole = sum(p["seconds"] for p in found)
    if not whole:
        return max((p["bubble"] for p in found), default=None)
    return sum(p["seconds"] * p["bubble"] for p in found) / whole


def compared(plans: Sequence[Plan]) -> list[list[str]]:
    """Returns one row of cells for each plan, in the columns of `compared_columns`."""
    columns = compared_columns(plans)
    rows = []
    for plan in plans:
        step = get(plan, "time.step_seconds")
        memory = plan["memory"]
        need = needed(plan)
        days, chip_days, years = (
            units.number(get(plan, f"time.{key}") if budget(plan) else None)
            for key in ("days", "chip_days", "device_years")
        )
        miss = f"no, by {units.size(memory.get('misses_by'))}"
        rows.append(
            [
                name(plan),
                plan.get("what") or units.DASH,
                get(plan, "topology.name") or units.DASH,
                units.quantity(get(plan, "parameters.count")),
                f"{units.gib(need)} / {units.gib(memory.get('hbm'))} GiB",
                "yes" if memory.get("fits") else miss,
                units.duration(step),
                units.number(1 / step if step else None),
                _speed_cell(plan),
                units.share(get(plan, "time.utilization")),
                units.share(collective_share(plan)),
                *([units.share(bubble(plan))] if _BUBBLE in columns else []),
                days,
                chip_days,
                years,
                units.duration(get(plan, "compile.compile_seconds")),
                *(costs(plan) if _COSTS[0] in columns else ()),
            ]
        )
    return rows


def costs(plan: Plan) -> list[str]:
    """The costs of a step and of the budget, in the unit of the plan's price."""
    found = [get(plan, f"time.{figure}") for figure in ("step_cost", "budget_cost")]
    return [f"{c:.2g}" if c is not None and c < 0.1 else units.number(c) for c in found]


def _speed_cell(plan: Plan) -> str:
    """The speed, with its unit where that is not the column's."""
    shown = units.number(speed(plan))
    return shown if unit(plan) == "tokens" else f"{shown} {unit(plan)}"


def compile_figures(plan: Plan) -> list[tuple[str, str]]:
    """Returns (name, value) pairs about compiling: durations, memory of the host, program size and hash."""
    figures = [
        ("tracing and lowering", units.duration(get(plan, "compile.lower_seconds"))),
        ("compiling", units.duration(get(plan, "compile.compile_seconds"))),
        ("peak memory of the host", units.size(get(plan, "compile.host_peak_bytes"))),
        ("program file", units.size(get(plan, "compile.program_bytes"))),
        ("program hash", str(plan.get("program_hash") or units.DASH)[:16]),
        ("compiler", ", ".join(f"{k} {v}" for k, v in (plan.get("compiler") or {}).items())),
    ]
    return [(label, value) for label, value in figures if value and value != units.DASH]


def setting(plan: Plan) -> list[tuple[str, str]]:
    """Returns (name, value) pairs about the planned job: machine, mesh, device, batch, parameters."""
    counts = {key.removesuffix(unit(plan)): n for key, n in plan.get("batch", {}).items() if n}
    parts = [f"{units.number(n)} {key.replace('_', ' ')}".strip() for key, n in counts.items()]
    batch = f"{' and '.join(parts)} {unit(plan)}"
    count = get(plan, "parameters.count")
    return [
        ("machine", _machine(plan)),
        ("mesh", str(plan.get("mesh") or units.DASH)),
        (
            "device",
            f"{units.size(get(plan, 'topology.hbm_bytes'))} of HBM at "
            f"{units.rate(get(plan, 'topology.hbm_bandwidth'), 'B')}, "
            f"{_peaks(plan)}",
        ),
        ("batch", f"{batch} a step"),
        (
            "parameters",
            f"{units.DASH if count is None else f'{count:,}'}; on a device "
            f"{units.size(get(plan, 'parameters.bytes'))} of weights and "
            f"{units.size(get(plan, 'parameters.slot_bytes'))} of slots",
        ),
    ]


def _machine(plan: Plan) -> str:
    devices = get(plan, "topology.devices")
    if card := get(plan, "topology.card"):
        nodes, gpus = get(plan, "topology.nodes"), get(plan, "topology.gpus_per_node")
        several = f"{nodes:,} nodes" if nodes > 1 else "a node"
        return f"{devices:,} GPUs ({card}), {several} of {gpus}; compiled for, not run"
    torus = "×".join(str(n) for n in get(plan, "topology.torus") or ())
    slices = get(plan, "topology.slices")
    grid = f"{slices:,} slices, each a torus {torus}" if slices else f"torus {torus}"
    return f"{devices:,} devices, {get(plan, 'topology.chips'):,} chips, {grid}"


def _peaks(plan: Plan) -> str:
    """A device's FLOP/s; of a GPU in each number format that the program multiplies in."""
    formats = plan.get("number_formats") or {}
    if not formats:
        return units.rate(get(plan, "topology.peak_flops"), "FLOP")
    whole = sum(formats.values())
    return ", ".join(
        f"{units.rate(get(plan, f'topology.peaks.{kind}'), 'FLOP')} in {_FORMATS[kind]}"
        f" ({units.share(flops / whole)} of the operations)"
        for kind, flops in sorted(formats.items(), key=lambda item: -item[1])
    )


_FORMATS = {"bfloat16": "bfloat16", "tf32": "TF32", "float32": "float32"}
