"""The interconnect model of several TPU slices: how long a collective takes that crosses the data-centre network.

Inside a slice a collective runs over the torus (torus.py). Between slices a chip hands its data to its host, and the
hosts exchange it over the data-centre network (DCN). What a device sends between slices is in two_levels.py.
All-reduce, all-gather and reduce-scatter are hierarchical, one level after the other, as the compiled program does
them: it reduces inside the slice first, so that between slices each device sends only its share.

Nothing is fitted. Each chip has its share of its host's network interfaces; the network itself is no bottleneck.
Slices exchange in a ring, since measured steps on 1 to 32 slices grow with their number and not with its logarithm
(docs/validation.md).
"""

from lingvo_moe.analysis.plans.machines.topology import Topology
from lingvo_moe.analysis.plans.network import torus, two_levels
from lingvo_moe.analysis.plans.network.two_levels import PASSES, Spread

# An assumption: from the memory of one chip through both hosts into the memory of another. No data sheet has it.
SECONDS_PER_STEP = 50e-6


def seconds(kind: str, num_bytes: float, lies: Spread, topology: Topology) -> float:
    """Estimates how long one collective takes; see network.seconds.

    Args:
        lies: how each group lies in the slices.
        topology: has several slices.
    """
    inside = 0.0
    if lies.inside > 1 and (lies.nodes == 1 or kind in PASSES or kind == "collective-broadcast"):
        inside = torus.seconds(kind, num_bytes, lies.inside, topology)
    if lies.nodes == 1:
        return inside
    moved = two_levels.sent(kind, num_bytes, lies).between
    steps = 1 if kind in two_levels.DIRECT else PASSES.get(kind, 1) * (lies.nodes - 1)
    return inside + moved / topology.dcn_bandwidth + steps * SECONDS_PER_STEP


def describe(topology: Topology) -> str:
    """Explains the model between slices and its figures, in sentences for the reader of a plan."""
    chip = topology.chip
    return (
        f"{topology.name} has {topology.slices} slices, joined by the data-centre network: a chip's share of its host's"
        f" interfaces carries {chip.dcn_bandwidth / 1e9:g} GB/s each way (data sheet, not measured). All-reduce,"
        " all-gather and reduce-scatter are hierarchical: between slices a device sends only its share of its slice's"
        " data, after or before the part inside the slice, in a ring. Each step between slices adds"
        f" {SECONDS_PER_STEP * 1e6:g} us, which is an assumption. Inside a slice: "
    )
