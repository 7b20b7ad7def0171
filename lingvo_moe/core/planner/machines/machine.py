"""The machine that a plan is for: a TPU slice or a GPU cluster, by name."""

from lingvo_moe.core.config.suggest import did_you_mean
from lingvo_moe.core.planner.errors import PlanError
from lingvo_moe.core.planner.machines.gpu_cluster import CARDS, Cluster
from lingvo_moe.core.planner.machines.ring import Ring
from lingvo_moe.core.planner.machines.topology import CHIPS, Topology
from lingvo_moe.core.topology_names import TopologyName

# Both kinds have the same names for what a plan asks of them: `name`, `num_devices`, `num_chips`; of a device
# `hbm_bytes` (that a program may use), `hbm_bandwidth`, `peaks` (FLOP/s of matrix products by number format, of which
# 'bfloat16' is one) and `clock_hz` (of the cycles that the compiler counts; 0 if it counts none); of the network
# `has_nodes`, whether it is faster inside of nodes (or slices), which have `node_devices`; of a host `host_devices`,
# `host_memory_bytes`, and its `host_bandwidth` to each device, with `host_source`; and `Describe()`.
Machine = Topology | Cluster
# A ring has no name or host that could be described, but all that estimates need.
AnyMachine = Machine | Ring


def parse_machine(name: str) -> Machine:
    """Makes a machine from a name: 'v3:32x32' is a TPU slice, 'v5p:4x4x4*2' are two, 'h100:32x8' is a GPU cluster.

    Raises:
        PlanError: no such generation or card, unreadable sizes, or a machine that does not exist.
    """
    parsed = TopologyName.parse(name.lower())
    kind = parsed.kind
    if parsed.is_tpu:
        return Topology.parse(name)
    if kind in CARDS:
        return Cluster.parse(name)
    known = [*CHIPS, *CARDS]
    raise PlanError(
        f"topology {name!r}: no TPU generation and no GPU {kind!r}{did_you_mean(kind, known)}; a topology is e.g."
        " v3:32x32 or h100:32x8"
    )
