"""The page's figures of scaling with the number of devices: figures 2, 7, 8 and 9."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lingvo_moe.analysis.plans.figures import needed
from lingvo_moe.analysis.plans.machines.topology import Topology
from lingvo_moe.analysis.plans.network import interconnect as network
from lingvo_moe.core.console import units

from . import measures, paper, requests, text
from .measures import Plan, Plans

FEW, MANY = min(requests.CORES), max(requests.CORES)  # experts, and cores
# Tori of two-core chips, as nearly square as the compiler has them.
_TORI = ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16", "16x32", "32x32")


def collectives(plans: Plans, compiling: Mapping[str, Any]) -> list[str]:
    """Counts the collectives of each program of figure 2, in words."""
    compiled = (plans[requests.COMPILED[entry["devices"]]] for entry in compiling["entries"])
    return [text.listed(measures.counts(plan)) or units.DASH for plan in compiled]


def memory_rows(plans: Plans) -> dict[str, list[Plan]]:
    """Figure 7's plans, by experts, of each number of layers."""
    rows = {}
    for layers in requests.LAYERS:
        for bf16 in (False, True) if layers == 60 else (False,):
            label = f"{layers} layers" + (", bfloat16 activations" if bf16 else "")
            rows[label] = [plans[requests.weak(e, layers, bf16)] for e in requests.CORES]
    return rows


def memory_spreads(rows: Mapping[str, Sequence[Plan]]) -> dict[str, float]:
    """The largest memory by the smallest of each row of figure 7, the largest ratio first."""
    sizes = {label: [needed(plan) for plan in row] for label, row in rows.items()}
    spreads = {label: max(row) / min(row) for label, row in sizes.items()}
    return dict(sorted(spreads.items(), key=lambda item: -item[1]))


def kept(plans: Plans) -> list[int | None]:
    """Bytes of the activations of 36 and of 60 layers."""
    return [measures.kept_for_backward(plans[requests.weak(2048, n)]) for n in (36, 60)]


@dataclass(frozen=True)
class ForwardPasses:
    """Figure 8's forward passes, by experts."""

    plans: dict[int, Plan]
    parts: dict[int, dict[str, float]]  # seconds by part
    totals: dict[int, float]  # seconds
    # Shares: of the all-to-all of dispatch and combine, of it with their arithmetic, and of the roofline.
    network: dict[int, float]
    dispatch: dict[int, float]
    roofline: dict[int, float]

    @property
    def ratio(self) -> float:
        """The forward pass of the most experts in that of the fewest."""
        return self.totals[MANY] / self.totals[FEW]

    @property
    def step_ratio(self) -> float:
        """The step of the most experts in that of the fewest."""
        return self.plans[MANY]["time"]["step_seconds"] / self.plans[FEW]["time"]["step_seconds"]


def forward(plans: Plans) -> ForwardPasses:
    """Figure 8: the forward pass by part."""
    by_experts = {experts: plans[requests.weak(experts, 36)] for experts in requests.CORES}
    parts = {e: measures.forward_seconds(plan) for e, plan in by_experts.items()}
    totals = {e: sum(seconds.values()) for e, seconds in parts.items()}
    network = {e: parts[e]["dispatch_network"] / totals[e] for e in by_experts}
    dispatch = {e: network[e] + parts[e]["dispatch_combine"] / totals[e] for e in by_experts}
    roofline = {e: measures.forward_roofline(plan) for e, plan in by_experts.items()}
    return ForwardPasses(by_experts, parts, totals, network, dispatch, roofline)


def dispatch_off(passes: ForwardPasses) -> list[str]:
    """The shares of dispatch and combine that differ from the paper's."""
    return _off(passes.dispatch, paper.DISPATCH, paper.DISPATCH)


def roofline_off(passes: ForwardPasses) -> list[str]:
    """The shares of the roofline that differ from the paper's, whose 'more than 70%' has no upper end."""
    return _off(passes.roofline, paper.ROOFLINE, set(paper.ROOFLINE) - {FEW})


def _off(
    shares: Mapping[int, float], claims: Mapping[int, paper.Claim], bounded: Collection[int]
) -> list[str]:
    """The shares that differ from claims; those that are not `bounded` may be larger."""
    apart = {e: shares[e] - claim.value for e, claim in claims.items()}
    return [
        f"{shares[e]:.0%} here, and in the paper {claims[e].says}"
        for e, more in apart.items()
        if (abs(more) if e in bounded else -more) > measures.SHARE
    ]


def interconnect() -> str:
    """The interconnect model of the largest slice."""
    return network.describe(Topology.parse(f"v3:{_TORI[-1]}"))


@dataclass(frozen=True)
class CollectiveLine:
    """A line of figure 9: a collective of one size on slices of 8 to 2048 devices."""

    kind: str
    size: int  # bytes on each device
    seconds: Mapping[int, float]  # by devices, from the interconnect model alone

    @property
    def exponent(self) -> str:
        """The fitted exponent of the number of devices: two digits, and no minus before a zero."""
        return f"{round(self._exponent, 2) + 0.0:.2f}"

    @property
    def _exponent(self) -> float:
        return measures.exponent(list(self.seconds), list(self.seconds.values()))

    @property
    def is_off(self) -> bool:
        """Whether the exponent differs from the paper's."""
        return abs(self._exponent - paper.EXPONENTS[self.kind].value) > measures.EXPONENT


def collective_lines() -> list[CollectiveLine]:
    """Figure 9: all-reduce and all-to-all of both sizes."""
    slices = [Topology.parse(f"v3:{torus}") for torus in _TORI]
    return [
        CollectiveLine(
            kind,
            size,
            {s.num_devices: network.seconds(kind, size, s.num_devices, s) for s in slices},
        )
        for kind in paper.EXPONENTS
        for size in paper.FIGURE9_BYTES
    ]
