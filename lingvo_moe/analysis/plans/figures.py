"""Derives the figures that reports show from a plan: for the terminal, the HTML page and comparisons.

A plan is a plain dict (docs/plan_json.md). If the compiler refused the program, its plan has no times and no work:
missing figures are None here and a dash in reports.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
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
PHASES = ("forward", "recompute", "backward", "optimizer")
# Seconds on the chip: for arithmetic alone, for memory traffic alone, for the longer of both in each instruction, and
# by the compiler's own estimate.
ESTIMATES = ("compute", "memory", "roofline", "compiler")
# What a step's time is stacked of, by its name in the style of pages.
STACKED = {name: name for name in (*PHASES, "network")}


@dataclass
class PartTime:
    """The time that one part of the model takes in a step, in seconds."""

    part: str  # the part's name, e.g. 'experts'
    flops: int = 0  # FLOPs of its matrix products
    num_bytes: int = 0  # its memory traffic
    # Seconds on the chip by phase, without collectives.
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    estimates: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ESTIMATES, 0.0))
    network: float = 0.0  # seconds of its collectives

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
        for name in ESTIMATES:
            entry.estimates[name] += item[f"{name}_seconds"]
    for item in plan.get("collectives") or ():
        entry = parts.setdefault(item["part"], PartTime(item["part"]))
        entry.network += item.get("seconds") or 0.0
    return sorted((p for p in parts.values() if p.total > 0), key=lambda p: -p.total)


def kinds(plan: Plan) -> list[tuple[str, int]]:
    """Returns (kind, bytes on a device) for the kinds of memory in use, in the order of KINDS."""
    by_kind = (plan.get("memory") or {}).get("kinds") or {}
    return [(kind, by_kind[kind]) for kind in KINDS if by_kind.get(kind)]


def name(plan: Plan) -> str:
    """The model's name, followed by its layout and its overrides in parentheses."""
    layout = f"--layout={plan['layout']}" if plan.get("layout") else ""
    more = "; ".join(filter(None, (layout, plan.get("override"))))
    return f"{plan['model']}{f' ({more})' * bool(more)}"


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
    uses = f"{units.size(need)} of {units.size(hbm)} on each device"
    if memory.get("fits"):
        return f"Fits: {uses}, {units.size(max(hbm - need, 0))} to spare."
    return f"Does not fit: {uses}, {units.size(memory.get('misses_by'))} too much."


def compiler_figures(plan: Plan) -> str:
    """Sentences with the compiler's own memory figures, and the peak found by tracing its schedule."""
    memory = plan["memory"]
    names = ("arguments", "outputs", "aliased", "temporaries", "code", "peak")
    reported = [f"{name} {units.size(memory[name])}" for name in names if memory.get(name)]
    out = f"The compiler's own figures: {', '.join(reported)}."
    if memory.get("traced_peak"):
        out += f" Peak traced through its schedule: {units.size(memory['traced_peak'])}."
    if memory.get("kept_for_backward"):
        activations = units.size(memory["kept_for_backward"])
        out += f" Activations held where the backward pass begins: {activations}."
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


def for_budgets(plans: Sequence[Plan]) -> str:
    """Says for how many tokens or images the days and costs of several plans are; '' where no plan has a budget."""
    budgets = sorted({(size, unit(plan)) for plan in plans if (size := budget(plan))})
    if not budgets:
        return ""
    costs = "Cost in all, days" if any(get(plan, "time.price") for plan in plans) else "Days"
    wholes = " or ".join(f"{units.quantity(size)} {counted}" for size, counted in budgets)
    return f"{costs}, chip-days and device-years are for {wholes}."


def headline(plan: Plan) -> list[tuple[str, str, str]]:
    """Returns (name, value, 'estimated' or '') for the figures that open a report."""
    out = [
        ("parameters", units.quantity(get(plan, "parameters.count")), False),
        ("peak memory a device", units.size(get(plan, "memory.peak")), False),
        ("step", units.duration(get(plan, "time.step_seconds")), True),
        ("at least, at most", _interval(plan), True),
        (f"{unit(plan)} a second", units.number(speed(plan)), True),
        ("utilisation (MFU)", units.share(get(plan, "time.utilization")), True),
        ("hardware utilisation", units.share(get(plan, "time.hardware_utilization")), True),
    ]
    if budget(plan):
        whole = f"{units.quantity(budget(plan))} {unit(plan)}"
        out += [
            (f"days for {whole}", units.number(get(plan, "time.days")), True),
            (
                "GPU-days" if get(plan, "topology.card") else "chip-days",
                units.number(get(plan, "time.chip_days")),
                True,
            ),
            (_years(plan), units.number(get(plan, "time.device_years")), True),
        ]
    if get(plan, "time.price"):
        step_cost, cost = costs(plan)
        out.append(("cost of a step", step_cost, True))
        out += [(f"cost of {whole}", cost, True)] if budget(plan) else []
    return [
        (name, value, "estimated" if estimated and value != units.DASH else "")
        for name, value, estimated in out
    ]


def _interval(plan: Plan) -> str:
    """The bounds of a step; a dash for a plan that has none."""
    bounds = [get(plan, f"time.{bound}_seconds") for bound in ("lower", "upper")]
    return units.DASH if None in bounds else ", ".join(map(units.duration, bounds))


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


def bubble(plan: Plan) -> float | None:
    """The share of a stage's time in pipelines in which it is idle; None without pipelines or their schedule.

    Several pipelines count by the seconds of their loops.
    """
    timed = [p for p in plan.get("pipelines") or () if p.get("bubble") is not None]
    whole = sum(p["seconds"] for p in timed)
    if not whole:
        return max((p["bubble"] for p in timed), default=None)
    return sum(p["seconds"] * p["bubble"] for p in timed) / whole


def costs(plan: Plan) -> list[str]:
    """The costs of a step and of the budget, in the unit of the plan's price."""
    amounts = [get(plan, f"time.{figure}") for figure in ("step_cost", "budget_cost")]
    return [f"{c:.2g}" if c is not None and c < 0.1 else units.number(c) for c in amounts]


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


_FORMATS = {"fp8": "FP8", "bfloat16": "bfloat16", "tf32": "TF32", "float32": "float32"}
