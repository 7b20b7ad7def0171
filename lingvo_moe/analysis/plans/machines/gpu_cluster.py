"""GPU clusters by name: their cards, nodes and links, with figures from NVIDIA's data sheets.

A name is a card, the number of nodes and the GPUs of a node, e.g. 'h100:32x8'. Rates of data sheets are halved where
they count both directions of a link or structured sparsity. Not from a data sheet, and marked so in `source`:

* The memory; see `core/gpu_memory.py`.
* The network interface of a GPU. A card does not fix it; NVIDIA's own systems do where there is one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lingvo_moe.analysis.plans.machines.base_machine import Machine, PlanError
from lingvo_moe.analysis.plans.machines.pace import pace_of
from lingvo_moe.core.config.checks import either
from lingvo_moe.core.gpu_memory import MEMORY_BYTES, usable_bytes
from lingvo_moe.core.topology_names import TopologyName

# What one GPU's lanes of PCI Express carry in one direction, 16 lanes, before the packets' headers.
_PCIE4 = 32e9
_PCIE5 = 64e9
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
    # Dense FLOP/s of products by dtype: 'bfloat16' and 'tf32' on tensor cores, 'float32' without them. A multiply-add
    # counts as two.
    peak_flops: Mapping[str, float] = field(hash=False)
    pcie_bandwidth: float  # bytes/s over PCI Express
    nic_bandwidth: float  # bytes/s of the network interface that the GPU has for itself
    source: str  # where the figures come from, with what is assumed
    # Bytes/s over NVLink; 0 for a card without it, which uses PCI Express inside a node.
    nvlink_bandwidth: float = 0.0
    node_sizes: tuple[int, ...] = NODE_SIZES  # how many GPUs its links may join

    @property
    def memory_bytes(self) -> int:
        """Memory that the driver leaves to programs."""
        return MEMORY_BYTES[self.name]

    @property
    def node_bandwidth(self) -> float:
        """Bytes/s, one way, between a GPU and the others of its node: NVLink's, or else PCI Express's."""
        return self.nvlink_bandwidth or self.pcie_bandwidth


def _peaks(bfloat16: float, tf32: float, float32: float, fp8: float = 0.0) -> Mapping[str, float]:
    """Peaks by number format; a card without units for 8-bit floating point multiplies it as bfloat16."""
    return {"fp8": fp8 or bfloat16, "bfloat16": bfloat16, "tf32": tf32, "float32": float32}


# NVLink: 600, 900 and 1800 GB/s in both directions together (third, fourth and fifth generation).
_A100 = Card(
    name="a100",
    label="NVIDIA A100 SXM 80 GB",
    hbm_bandwidth=2039e9,
    peak_flops=_peaks(312e12, 156e12, 19.5e12),
    nvlink_bandwidth=300e9,
    pcie_bandwidth=_PCIE4,
    nic_bandwidth=25e9,
    source=(
        "NVIDIA A100 Tensor Core GPU data sheet; memory: XLA's a100_sxm_80.txtpb; network: assumed, one HDR "
        "200 Gb/s interface a GPU as in the DGX A100"
    ),
)
_H100 = Card(
    name="h100",
    label="NVIDIA H100 SXM 80 GB",
    hbm_bandwidth=3350e9,
    peak_flops=_peaks(989.4e12, 494.7e12, 66.9e12, 1978.9e12),
    nvlink_bandwidth=450e9,
    pcie_bandwidth=_PCIE5,
    nic_bandwidth=50e9,
    source=(
        "NVIDIA H100 Tensor Core GPU data sheet, its peaks as in the architecture white paper; memory: XLA's "
        "h100_sxm.txtpb; network: assumed, one NDR 400 Gb/s interface a GPU as in the DGX H100"
    ),
)
_B200 = Card(
    name="b200",
    label="NVIDIA B200 SXM 180 GB",
    hbm_bandwidth=7700e9,
    peak_flops=_peaks(2250e12, 1100e12, 75e12, 4500e12),
    nvlink_bandwidth=900e9,
    pcie_bandwidth=_PCIE5,
    nic_bandwidth=50e9,
    source=(
        "NVIDIA HGX B200 data sheet, an eighth of the board's; memory: XLA's b200.txtpb; network: assumed, one "
        "NDR 400 Gb/s interface a GPU as in the DGX B200"
    ),
)
_L40S = Card(
    name="l40s",
    label="NVIDIA L40S 48 GB",
    hbm_bandwidth=864e9,
    peak_flops=_peaks(362.05e12, 183e12, 91.6e12, 733e12),
    pcie_bandwidth=_PCIE4,
    nic_bandwidth=25e9,
    source=(
        "NVIDIA L40S data sheet; memory: as PyTorch reports it; network: assumed, one 200 Gb/s interface a GPU"
    ),
)
_L4 = Card(
    name="l4",
    label="NVIDIA L4 24 GB",
    hbm_bandwidth=300e9,
    peak_flops=_peaks(121e12, 60e12, 30.3e12, 242.5e12),
    pcie_bandwidth=_PCIE4,
    nic_bandwidth=12.5e9,
    source=(
        "NVIDIA L4 data sheet; memory: as PyTorch reports it; network: assumed, one 100 Gb/s interface a GPU"
    ),
)
CARDS = {
    card.name: card
    for card in (
        replace(
            _A100,
            name="a100-40",
            label="NVIDIA A100 SXM 40 GB",
            hbm_bandwidth=1555e9,
            source=_A100.source.replace("a100_sxm_80", "a100_sxm_40"),
        ),
        _A100,
        _H100,
        replace(
            _H100,
            name="h200",
            label="NVIDIA H200 SXM 141 GB",
            hbm_bandwidth=4800e9,
            source=(
                "NVIDIA H200 Tensor Core GPU data sheet, its peaks as the H100's; memory: XLA's h200.txtpb; network: "
                "assumed, one NDR 400 Gb/s interface a GPU as in the DGX H200"
            ),
        ),
        replace(
            _H100,
            name="h800",
            label="NVIDIA H800 SXM 80 GB",
            nvlink_bandwidth=200e9,
            source=(
                "NVIDIA H100 data sheet, with NVLink of 400 GB/s in both directions together (DeepSeek-V3's report, "
                "arXiv 2412.19437); network: assumed, one NDR 400 Gb/s interface a GPU, as there"
            ),
        ),
        _B200,
        replace(
            _B200,
            name="gb200",
            label="NVIDIA GB200 (a GPU of it) 186 GB",
            hbm_bandwidth=8000e9,
            peak_flops=_peaks(2500e12, 1250e12, 75e12, 5000e12),
            node_sizes=(*NODE_SIZES, 16, 32, 64),
            source=(
                "NVIDIA GB200 NVL72 data sheet, a 72nd of the rack's; memory: the B200's; a node is what NVLink joins, "
                "of a rack's 72 the powers of two; network: assumed, one NDR 400 Gb/s interface a GPU"
            ),
        ),
        _L40S,
        _L4,
    )
}


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
