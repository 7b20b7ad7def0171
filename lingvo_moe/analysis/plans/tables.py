"""Builds a plan: what a compiled program needs and how long it should take, as plain data.

A plan is a dict that JSON can hold; docs/plan_json.md describes its fields. Bytes and FLOPs are for one
device; times are seconds for one run of the program. Bytes and FLOPs come from the compiled program.
Times are estimates:

* An instruction takes the longest of its arithmetic at peak FLOP/s in whole tiles of the matrix unit, its traffic at
  full memory bandwidth, and the cycles that the compiler counts for it.
* A collective takes what the model of network/interconnect.py gives.
* Moves from and to the hosts' memory overlap as scheduled: see memory/host_link.py.
* Nothing hides transfers between TPU slices.
* A step takes what the machine's pace makes of its roofline, the longer of the first two of each instruction, and of
  its collectives: see machines/pace.py. Held against measured steps, the compiler's cycles made estimates worse.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from lingvo_moe.analysis.plans.machines.base_machine import Machine
from lingvo_moe.analysis.plans.machines.gpu_cluster import Cluster
from lingvo_moe.analysis.plans.network import interconnect
from lingvo_moe.analysis.plans.work.costs import Cost
from lingvo_moe.analysis.plans.work.seconds import (
    compiler_seconds,
    compute_seconds,
    execution_seconds,
)
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.task.inspect import bytes_of, bytes_per_device, count_parameters

VERSION = 1
_YEAR_DAYS = 365.25
_DAY_SECONDS = 86400.0


@dataclass(frozen=True)
class PlannedJob:
    """The job to plan."""

    # `model`, `override`: the trainer's flags --model and --model_params_override.
    model: str
    override: str
    what: str  # 'train', 'decode' or 'prefill'
    # What one run of the program takes in and puts out, as TaskCosts.BatchCounts names it; the last one is of units.
    batch: dict[str, int]
    unit: str  # what is counted, e.g. 'tokens'
    budget: float  # units of the whole job; 0: none
    # TaskCosts.StepFlops, of all devices together; 0 where they are not known, as in decoding.
    model_flops: int = 0


def parameters(state_specs: Any, mesh: Mesh) -> dict[str, int]:
    """Returns the plan's `parameters`: number of weights, bytes of weights and slots.

    Args:
        state_specs: a NestedMap of VariableSpecs: a training state with `theta` and maybe `slots` and `ema`, whose
            bytes count as slots, or weights alone.
    """
    theta = state_specs.theta.Flatten() if "theta" in state_specs else state_specs.Flatten()
    slots = [s for part in ("slots", "ema") for s in state_specs.get(part, NestedMap()).Flatten()]
    return {
        "count": count_parameters(theta),
        "bytes_total": sum(map(bytes_of, theta)),
        "bytes": sum(bytes_per_device(spec, mesh) for spec in theta),
        "slot_bytes": sum(bytes_per_device(spec, mesh) for spec in slots),
    }


def work(costs: Iterable[Cost], topology: Machine) -> list[dict[str, Any]]:
    """Returns the plan's `work`: FLOPs, traffic and seconds by part and phase, without collectives.

    Returns:
        One dict for each part and phase, the slowest first.
    """
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for cost in costs:
        if cost.collective is not None:
            continue
        key = (cost.place.part, cost.place.phase)
        row = rows.setdefault(key, dict.fromkeys(_WORK, 0.0) | {"flops": 0, "bytes": 0})
        compute = compute_seconds(cost, topology)
        memory = cost.bytes / topology.hbm_bandwidth
        row["flops"] += cost.times * cost.flops
        row["bytes"] += cost.times * cost.bytes
        row["compute_seconds"] += cost.times * compute
        row["memory_seconds"] += cost.times * memory
        row["roofline_seconds"] += cost.times * max(compute, memory)
        row["compiler_seconds"] += cost.times * compiler_seconds(cost, topology)
        row["seconds"] += cost.times * execution_seconds(cost, topology)
        if cost.turns and topology.turn_seconds:
            row["turns"] = row.get("turns", 0) + cost.times * cost.turns
    table = [{"part": part, "phase": phase, **row} for (part, phase), row in rows.items()]
    return sorted(table, key=lambda row: -row["seconds"])


def number_formats(costs: Iterable[Cost]) -> dict[str, int]:
    """Returns a GPU plan's `number_formats`: FLOPs of all products by the format in which they are multiplied."""
    sums: dict[str, int] = defaultdict(int)
    for cost in costs:
        for kind, flops in cost.formats.items():
            sums[kind] += cost.times * flops
    return dict(sums)


_WORK = (
    "compute_seconds",
    "memory_seconds",
    "roofline_seconds",
    "compiler_seconds",
    "seconds",
)


def collectives(costs: Iterable[Cost], topology: Machine) -> list[dict[str, Any]]:
    """Returns the plan's `collectives`: one dict for each kind, place, size and group, the slowest first.

    `bytes` is the size of one execution, `seconds` the time of all `count` executions. On a cluster `nodes` and
    `in_node` say how each group lies in the nodes, `sent_inside` and `sent_between` what one GPU sends each time; on
    several TPU slices `slices` and `in_slice` say how it lies in these.
    """
    counts: dict[tuple, int] = defaultdict(int)
    for cost in costs:
        if cost.collective is not None:
            use, place = cost.collective, cost.place
            lies = interconnect.spread(use.devices, topology)
            at = place.layer, place.part, place.phase
            counts[use.kind, *at, use.bytes, use.participants, lies] += cost.times
    unit = "slice" if topology.node_devices else "chip"
    if isinstance(topology, Cluster):
        unit = "node"
    table = []
    for (kind, layer, part, phase, num_bytes, participants, lies), count in counts.items():
        one = interconnect.seconds(kind, num_bytes, participants, topology, lies)
        row = {
            "kind": kind,
            "layer": layer,
            "part": part,
            "phase": phase,
            "count": count,
            "bytes": num_bytes,
            "participants": participants,
            "seconds": count * one,
        }
        if lies is not None:
            sent = interconnect.sent(kind, num_bytes, lies, topology)
            row |= {
                f"{unit}s": lies.nodes,
                f"in_{unit}": lies.inside,
                "sent_inside": round(sent.inside),
                "sent_between": round(sent.between),
            }
        table.append(row)
    return sorted(table, key=lambda row: -row["seconds"])


def time(
    job: PlannedJob,
    topology: Machine,
    work_rows: list[dict[str, Any]],
    collective_rows: list[dict[str, Any]],
    waiting: float = 0.0,
) -> dict[str, Any]:
    """Returns the plan's `time`: seconds of one run, and what the budget costs.

    Args:
        work_rows: what `work` returned.
        collective_rows: what `collectives` returned.
        waiting: seconds in which a device waits for its host's memory.
    """
    roofline = sum(row["roofline_seconds"] for row in work_rows)
    busy = sum(row["seconds"] for row in work_rows)
    network_seconds = sum(row["seconds"] for row in collective_rows)
    flops = sum(row["flops"] for row in work_rows)
    # Work does not hide transfers between slices: docs/validation.md.
    between = sum(row["seconds"] for row in collective_rows if row.get("slices", 1) > 1)
    turning = topology.turn_seconds * sum(row.get("turns", 0) for row in work_rows)
    inside, apart = network_seconds - between, waiting + between + turning
    # In decoding a collective waits for what comes before it, and all else for the collective.
    pace = topology.pace if job.what == "train" else replace(topology.pace, overlap=0.0)
    step = pace.Seconds(roofline, inside, apart)
    arithmetic, memory = (
        sum(row[f"{kind}_seconds"] for row in work_rows) for kind in ("compute", "memory")
    )
    least, most = pace.Bounds(arithmetic, memory, roofline, inside, apart)
    peak = step * topology.peaks["bfloat16"]
    speed = list(job.batch.values())[-1] / step
    out: dict[str, Any] = {
        "step_seconds": step,
        "lower_seconds": least,
        "upper_seconds": most,
        "roofline_seconds": roofline,
        "work_seconds": busy,
        "collective_seconds": network_seconds,
        **({"host_seconds": waiting} if waiting else {}),
        **({"turning_seconds": turning} if turning else {}),
        "steps_per_second": 1 / step,
        f"{job.unit}_per_second": speed,
        "utilization": job.model_flops / topology.num_devices / peak if job.model_flops else None,
        "hardware_utilization": flops / peak,
        f"budget_{job.unit}": job.budget,
    }
    if not job.budget:
        return out | {"days": None, "device_years": None, "chip_days": None}
    days = job.budget / speed / _DAY_SECONDS
    out["days"] = days
    out["device_years"] = days * topology.num_devices / _YEAR_DAYS
    out["chip_days"] = days * topology.num_chips
    return out


def timed_again(plan: dict[str, Any], topology: Machine) -> dict[str, Any]:
    """A recorded plan with the seconds that today's models of the network and of a step give for its facts."""
    rows = []
    for row in plan["collectives"]:
        unit = next((name for name in ("node", "slice", "chip") if f"{name}s" in row), "")
        lies = interconnect.Spread(row[f"{unit}s"], row[f"in_{unit}"]) if unit else None
        one = interconnect.seconds(row["kind"], row["bytes"], row["participants"], topology, lies)
        rows.append(row | {"seconds": row["count"] * one})
    rows.sort(key=lambda row: -row["seconds"])
    was = plan["time"]
    unit = next(key for key in was if key.startswith("budget_")).removeprefix("budget_")
    job = PlannedJob(
        plan["model"],
        plan["override"],
        plan["what"],
        plan["batch"],
        unit,
        was[f"budget_{unit}"],
        plan.get("model_flops", 0),
    )
    again = time(job, topology, plan["work"], rows, was.get("host_seconds", 0.0))
    return plan | {"collectives": rows, "time": again}


def check(plan: dict[str, Any]) -> None:
    """Checks a finished plan.

    Raises:
        ValueError: a number is negative or not finite, or a plan that fits needs more than its HBM.
    """
    for path, value in _numbers(plan, "plan"):
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"{path}={value}: not a quantity")
    # The compiler prints its limit rounded.
    if plan["memory"]["fits"] and plan["memory"]["peak"] > 1.001 * plan["memory"]["hbm"]:
        raise ValueError("a plan that fits has a peak over its memory")


def _numbers(value: Any, path: str) -> Iterable[tuple[str, float]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(item, f"{path}.{key}")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _numbers(item, f"{path}[{i}]")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, value
