"""GPU clusters by name: their cards, nodes and links, with figures from NVIDIA's data sheets.

A name is a card, the number of nodes and the GPUs of a node, e.g. 'h100:32x8'. Rates of data sheets are halved where
they count both directions of a link or structured sparsity. Not from a data sheet, and marked so in `source`:

* The memory; see `core/gpu_memory.py`.
* The network interface of a GPU. A card does not fix it; NVIDIA's own systems do where there is one.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lingvo_moe.analysis.plans.machines.base_machine import Machine, PlanError
from lingvo_moe.analysis.plans.machines.pace import pace_of
from lingvo_moe.core.config.checks import either
from lingvo_moe.core.gpu_memory import MEMORY_BYTES, usable_bytes
from lingvo_moe.core.topology_names import TopologyName

# NVIDIA's baseboards and most servers take at most so many GPUs, in powers of two.
NODE_SIZES = (1, 2, 4, 8)
# A loop whose length depends on data asks the host before each turn, which then starts the turn's kernels. Measured
# with the experts of lm.OLMoE1B7B on one H200 (docs/validation.md).
_TURN_SECONDS = 30e-6
_TILE = 64  # the rows that a warp group of tensor cores multiplies at a time, at least


@dataclass(frozen=True)
class Card:
    """The figures of one GPU model. Rates are per GPU; those of links are in one direction."""

    name: str  # e.g. 'h100'
    label: str  # NVIDIA's name
    hbm_bandwidth: float  # bytes/s between the GPU and its memory
    # Dense FLOP/s of products by dtype: 'fp8', 'bfloat16' and 'tf32' on tensor cores, 'float32' without them. A
    # multiply-add counts as two.
    peak_flops: Mapping[str, float] = field(hash=False)
    pcie_bandwidth: float  # bytes/s over PCI Express
    nic_bandwidth: float  # bytes/s of the network interface that the GPU has for itself
    source: str  # where the figures come from, with what is assumed
    # Bytes/s over NVLink; 0 for a card without it, which uses PCI Express inside a node.
    nvlink_bandwidth: float = 0.0
    # How many GPUs its links may join.
    node_sizes: Sequence[int] = field(default=NODE_SIZES, hash=False)

    @property
    def memory_bytes(self) -> int:
        """Memory that the driver leaves to programs."""
        return MEMORY_BYTES[self.name]

    @property
    def node_bandwidth(self) -> float:
        """Bytes/s, one way, between a GPU and the others of its node: NVLink's, or else PCI Express's."""
        return self.nvlink_bandwidth or self.pcie_bandwidth


# NVLink's data sheets count both directions together: 600, 900 and 1800 GB/s (third, fourth and fifth generation). PCI
# Express is 16 lanes in one direction, before the packets' headers. A card without units for 8-bit floating point
# multiplies it as bfloat16.
_GPUS: Mapping[str, Any] = json.loads(Path(__file__).with_name("gpus.json").read_text("utf-8"))
CARDS = {name: Card(**figures, name=name) for name, figures in _GPUS.items()}


@dataclass(frozen=True, kw_only=True)
class Cluster(Machine):
    """Nodes of equal GPUs. The GPUs of a node have consecutive device ids: device i is in node i // gpus_per_node."""

    card: Card  # what each GPU is
    nodes: int  # the number of nodes
    gpus_per_node: int  # one of NODE_SIZES

    @classmethod
    def parse(cls, name: str) -> "Cluster":
        """Makes a cluster from a card of CARDS with its sizes, e.g. 'h100:32x8' (32 nodes of 8 GPUs).

        Raises:
            PlanError: unreadable numbers, or a node that does not exist.
        """
        parsed = TopologyName.parse(name.lower())
        model = parsed.kind
        if len(parsed.sizes) != 2:
            raise PlanError(
                f"topology {name!r}: expected nodes x GPUs of a node after the card, e.g. {model}:32x8"
            )
        nodes, gpus = parsed.sizes
        if parsed.slices != 1:
            raise PlanError(
                f"topology {name!r}: only TPUs have slices; a larger GPU cluster has more nodes, e.g."
                f" {model}:{2 * nodes}x{gpus}"
            )
        card = CARDS[model]
        if gpus not in card.node_sizes:
            swapped = (
                f"; the nodes come first: {model}:{gpus}x{nodes}"
                if nodes in card.node_sizes
                else ""
            )
            raise PlanError(
                f"topology {name!r}: a node of {gpus} GPUs; a node has {either(card.node_sizes)}{swapped}"
            )
        return cls(
            name=str(parsed),
            card=card,
            nodes=nodes,
            gpus_per_node=gpus,
            num_devices=nodes * gpus,
            num_chips=nodes * gpus,
            hbm_bytes=usable_bytes(card.memory_bytes),  # what XLA's allocator has for programs
            hbm_bandwidth=card.hbm_bandwidth,
            peaks=card.peak_flops,
            tile=_TILE,
            turn_seconds=_TURN_SECONDS,
            pace=pace_of(card.name),
            node_devices=gpus,
            host_devices=gpus,
            host_bandwidth=card.pcie_bandwidth,
            host_source="PCI Express's raw rate of 16 lanes, as the card's data sheet states",
        )

    def Describe(self) -> dict[str, Any]:
        """The figures of the cluster that go into a plan's `topology`."""
        card = self.card
        return {
            **super().Describe(),
            "card": card.label,
            "nodes": self.nodes,
            "gpus_per_node": self.gpus_per_node,
            "memory_bytes": card.memory_bytes,
            "peaks": dict(card.peak_flops),
            "node_bandwidth": card.node_bandwidth,
            "nic_bandwidth": card.nic_bandwidth,
            "source": card.source,
        }
