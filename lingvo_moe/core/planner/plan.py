"""Plan: what a compiled program needs and how long it should take, as plain data.

A plan is a dict that JSON can hold; docs/plan_json.md describes it field by field. Sizes and
operations are one device's, times are seconds of one run of the program. What a compiler counted is
exact; times are estimates: an instruction takes its roofline (the longer of its arithmetic at peak
and its traffic at full memory bandwidth) or the cycles that the compiler counts for it, whichever is
longer, and a collective what the interconnect model of network.py says. Nothing overlaps.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from lingvo_moe.core.base_layer import VariableSpec
from lingvo_moe.core.inspect import bytes_per_device, count_parameters
from lingvo_moe.core.planner import network
from lingvo_moe.core.planner.costs import Cost
from lingvo_moe.core.planner.topology import Topology
from lingvo_moe.core.sharding import DimsMapping, Mesh

VERSION = 1
_YEAR_DAYS = 365.25
_DAY_SECONDS = 86400.0


@dataclass(frozen=True)
class Job:
    """What is planned.

    Attributes:
        model, override: as the trainer's flags.
        what: 'train' or 'decode'.
        batch: what one run of the program takes in and puts out, as BaseTask.BatchCounts names it; the last number
            counts units.
        unit: what is counted, e.g. 'tokens'.
        budget: units of the whole job; 0: none.
    """

    model: str
    override: str
    what: str
    batch: dict[str, int]
    unit: str
    budget: float


def parameters(state_specs: Any, mesh: Mesh) -> dict[str, int]:
    """Counts and bytes of a state, or of weights alone, given as a NestedMap of VariableSpecs."""
    theta = state_specs.theta.Flatten() if "theta" in state_specs else state_specs.Flatten()
    slots = state_specs.slots.Flatten() if "slots" in state_specs else []
    return {
        "count": count_parameters(theta),
        "bytes_total": sum(bytes_per_device(replace(s, split=_uncut(s)), mesh) for s in theta),
        "bytes": sum(bytes_per_device(spec, mesh) for spec in theta),
        "slot_bytes": sum(bytes_per_device(spec, mesh) for spec in slots),
    }


def work(costs: Iterable[Cost], topology: Topology) -> list[dict[str, Any]]:
    """Matmul FLOPs, memory traffic and seconds by part and phase, collectives left out; the slowest first."""
    chip = topology.chip
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for cost in costs:
        if cost.collective is not None:
            continue
        key = (cost.place.part, cost.place.phase)
        row = rows.setdefault(key, dict.fromkeys(_WORK, 0.0) | {"flops": 0, "bytes": 0})
        compute = cost.flops / chip.peak_flops
        memory = cost.bytes / chip.hbm_bandwidth
        row["flops"] += cost.times * cost.flops
        row["bytes"] += cost.times * cost.bytes
        row["compute_seconds"] += cost.times * compute
        row["memory_seconds"] += cost.times * memory
        compiler = cost.estimated_cycles / chip.clock_hz
        row["roofline_seconds"] += cost.times * max(compute, memory)
        row["compiler_seconds"] += cost.times * compiler
        row["seconds"] += cost.times * max(compute, memory, compiler)
    table = [{"part": part, "phase": phase, **row} for (part, phase), row in rows.items()]
    return sorted(table, key=lambda row: -row["seconds"])


_WORK = (
    "compute_seconds",
    "memory_seconds",
    "roofline_seconds",
    "compiler_seconds",
    "seconds",
)


def collectives(costs: Iterable[Cost], topology: Topology) -> list[dict[str, Any]]:
    """Every kind of communication by layer and phase, the slowest first. `bytes` are those of one run of one."""
    counts: dict[tuple, int] = defaultdict(int)
    for cost in costs:
        if cost.collective is not None:
            use = cost.collective
            place = cost.place
            key = (use.kind, place.layer, place.part, place.phase, use.bytes, use.participants)
            counts[key] += cost.times
    table = []
    for (kind, layer, part, phase, num_bytes, participants), count in counts.items():
        one = network.seconds(kind, num_bytes, participants, topology)
        table.append(
            {
                "kind": kind,
                "layer": layer,
                "part": part,
                "phase": phase,
                "count": count,
                "bytes": num_bytes,
                "participants": participants,
                "seconds": count * one,
            }
        )
    return sorted(table, key=lambda row: -row["seconds"])


def time(
    job: Job,
    topology: Topology,
    work_rows: list[dict[str, Any]],
    collective_rows: list[dict[str, Any]],
) -> dict[str, Any]:
    """Seconds of one run, and what the budget costs; see the file's top for what is estimated how."""
    roofline = sum(row["roofline_seconds"] for row in work_rows)
    busy = sum(row["seconds"] for row in work_rows)
    talking = sum(row["seconds"] for row in collective_rows)
    flops = sum(row["flops"] for row in work_rows)
    again = sum(row["flops"] for row in work_rows if row["phase"] == "recompute")
    step = busy + talking
    peak = step * topology.chip.peak_flops
    speed = list(job.batch.values())[-1] / step
    out: dict[str, Any] = {
        "step_seconds": step,
        "roofline_seconds": roofline,
        "work_seconds": busy,
        "collective_seconds": talking,
        "steps_per_second": 1 / step,
        f"{job.unit}_per_second": speed,
        "utilization": (flops - again) / peak,
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


def describe_topology(topology: Topology) -> dict[str, Any]:
    """The machine's figures that a plan's estimates rest on."""
    chip = topology.chip
    return {
        "name": topology.name,
        "generation": topology.generation,
        "devices": topology.num_devices,
        "chips": topology.num_chips,
        "torus": list(topology.dims),
        "hbm_bytes": chip.hbm_bytes,
        "peak_flops": chip.peak_flops,
        "hbm_bandwidth": chip.hbm_bandwidth,
        "link_bandwidth": chip.link_bandwidth,
        "clock_hz": chip.clock_hz,
        "model": network.describe(topology),
    }


def check(plan: dict[str, Any]) -> None:
    """Raises ValueError where numbers of a finished plan contradict each other or are not finite."""
    for path, value in _numbers(plan, "plan"):
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"{path}={value}: not a quantity")
    # The compiler tells its limit rounded.
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


def _uncut(spec: VariableSpec) -> DimsMapping:
    return (None,) * len(spec.shape)
