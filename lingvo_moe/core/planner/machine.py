"""The machine that a plan is for: a TPU slice or a GPU cluster, by name."""

import re

from lingvo_moe.core.planner.errors import PlanError
from lingvo_moe.core.planner.gpu_cluster import CARDS, Cluster
from lingvo_moe.core.planner.topology import CHIPS, Topology
from lingvo_moe.core.suggest import did_you_mean

# Both kinds have the same names for what a plan asks of them: `name`, `num_devices`, `num_chips`; of a device
# `hbm_bytes` (that a program may use), `hbm_bandwidth`, `peaks` (FLOP/s of matrix products by number format, of which
# 'bfloat16' is one) and `clock_hz` (of the cycles that the compiler counts; 0 if it counts none); and `Describe()`.
Machine = Topology | Cluster


def parse_machine(name: str) -> Machine:
    """Makes a machine from a name: 'v3:32x32' is a TPU slice, 'h100:32x8' a GPU cluster.

    Raises:
        PlanError: no such generation or card, unreadable sizes, or a machine that does not exist.
    """
    kind = name.strip().lower().partition(":")[0]
    if kind in CARDS:
        return Cluster.parse(name)
    if kind in CHIPS or re.fullmatch(r"(v\d{1,2}[a-z]?)?", kind):
        return Topology.parse(name)
    known = [*CHIPS, *CARDS]
    raise PlanError(
        f"topology {name!r}: no TPU generation and no GPU {kind!r}{did_you_mean(kind, known)}; a topology is e.g."
        " v3:32x32 or h100:32x8"
    )
