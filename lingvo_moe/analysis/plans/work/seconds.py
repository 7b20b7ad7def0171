"""Estimates how long an instruction takes on a machine."""

from lingvo_moe.analysis.plans.machines.base_machine import Machine
from lingvo_moe.analysis.plans.network import interconnect
from lingvo_moe.analysis.plans.work.costs import Cost


def compute_seconds(cost: Cost, topology: Machine) -> float:
    """Seconds of an instruction's matrix products, each at the peak of its number format, in whole tiles."""
    peaks = topology.peaks
    return sum(
        flops / peaks.get(kind, peaks["bfloat16"])
        for kind, flops in (cost.tiled or cost.formats).items()
    )


def compiler_seconds(cost: Cost, topology: Machine) -> float:
    """Seconds of the cycles that the compiler counts for an instruction; 0 where it counts none."""
    return cost.estimated_cycles / topology.clock_hz if topology.clock_hz else 0.0


def execution_seconds(cost: Cost, topology: Machine) -> float:
    """Estimates the seconds of one execution of an instruction: of its work or, for a collective, on the network."""
    if use := cost.collective:
        lies = interconnect.spread(use.devices, topology)
        return interconnect.seconds(use.kind, use.bytes, use.participants, topology, lies)
    return max(
        compute_seconds(cost, topology),
        cost.bytes / topology.hbm_bandwidth,
        compiler_seconds(cost, topology),
    )
