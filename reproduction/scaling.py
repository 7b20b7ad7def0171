"""The page's tables and figures of scaling with the number of devices: figures 2, 7, 8 and 9."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lingvo_moe.analysis.plans.machines.topology import Topology
from lingvo_moe.analysis.plans.network import interconnect as network

from . import measures, paper, requests, text, thresholds
from .measures import Plan, Plans
from .text import DASH, Finding

FEW, MANY = min(requests.CORES), max(requests.CORES)  # experts, and cores
# Tori of two-core chips, as nearly square as the compiler has them.
_TORI = ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16", "16x32", "32x32")


def _collectives(plans: Plans, compiling: Mapping[str, Any]) -> list[dict[str, int]]:
    compiled = (plans[requests.COMPILED[entry["devices"]]] for entry in compiling["entries"])
    return [measures.collective_counts(plan) for plan in compiled]


def same_collectives(plans: Plans, compiling: Mapping[str, Any]) -> bool:
    """Whether the programs of figure 2 have the same number of collectives."""
    counts = _collectives(plans, compiling)
    return all(count == counts[0] for count in counts)


def compile_times(plans: Plans, compiling: Mapping[str, Any]) -> str:
    """Figure 2: compile time by devices, as benchmarks/compile_time.py measured it."""
    rows = [
        [
            f"{entry['devices']:,}",
            f"{entry['lower_seconds']:.1f} s",
            f"{entry['compile_seconds']:.1f} s",
            f"{entry['program_bytes'] / 1024:,.0f} KiB",
            text.listed([f"{n} {kind}" for kind, n in count.items()]) or DASH,
        ]
        for entry, count in zip(compiling["entries"], _collectives(plans, compiling))
    ]
    return text.table(["devices", "lowering", "compiling", "program", "collectives a step"], rows)


def finding_of_compiling(compiling: Mapping[str, Any]) -> Finding:
    """The row of the summary of figure 2."""
    first, last = compiling["entries"][0], compiling["entries"][-1]
    devices = f"{last['devices']:,} devices by {first['devices']}"
    ratio = f"{last['compile_seconds'] / first['compile_seconds']:.2f} times"
    return Finding(f"compile time, {devices}, figure 2", "O(1)", ratio, "timed")


def memory_bars(plans: Plans) -> dict[str, dict[str, Plan]]:
    """Plans by panel and label, for figures.memory. 60 layers are those that fit, if any does."""
    bars = {}
    for layers in requests.LAYERS:
        fit = all(measures.fits(plans[requests.weak(e, layers)]) for e in requests.CORES)
        bf16 = layers == 60 and not fit
        title = f"{layers} layers" + (", bfloat16" if bf16 else "")
        bars[title] = {f"{e:,}": plans[requests.weak(e, layers, bf16)] for e in requests.CORES}
    return bars


def _memory_rows(plans: Plans) -> Iterator[tuple[str, list[Plan]]]:
    """Figure 7's plans, by experts, of each number of layers."""
    for layers in requests.LAYERS:
        for bf16 in (False, True) if layers == 60 else (False,):
            label = f"{layers} layers" + (", bfloat16 activations" if bf16 else "")
            yield label, [plans[requests.weak(e, layers, bf16)] for e in requests.CORES]


def memory_spreads(plans: Plans) -> dict[str, float]:
    """The largest memory by the smallest of each row of figure 7, the largest ratio first."""
    spreads = {
        label: measures.spread([measures.needed(plan) for plan in row])
        for label, row in _memory_rows(plans)
    }
    return dict(sorted(spreads.items(), key=lambda item: -item[1]))


def memory_table(plans: Plans) -> str:
    """Figure 7: memory by experts and layers."""
    spreads, rows = memory_spreads(plans), []
    for label, row in _memory_rows(plans):
        cells = [
            text.gib(measures.needed(p)) + ("" if measures.fits(p) else ", does not fit")
            for p in row
        ]
        rows.append([label, *cells, f"{spreads[label]:.2f}"])
    experts = [f"{experts:,} experts" for experts in requests.CORES]
    return text.table(["", *experts, "largest by smallest"], rows)


def kept(plans: Plans) -> list[int | None]:
    """Bytes of the activations of 36 and of 60 layers."""
    return [measures.kept_for_backward(plans[requests.weak(2048, n)]) for n in (36, 60)]


def finding_of_memory(plans: Plans) -> Finding:
    """The row of the summary of figure 7."""
    many, few = (measures.needed(plans[requests.weak(e, 36)]) for e in (MANY, FEW))
    claim = f"memory of a core, {MANY} by {FEW} experts, 36 layers, figure 7"
    return Finding(claim, "O(1)", f"{many / few:.2f} times", "exact")


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
        f"{text.percent(shares[e])} here, and in the paper {claims[e].says}"
        for e, more in apart.items()
        if (abs(more) if e in bounded else -more) > thresholds.SHARE
    ]


def forward_table(passes: ForwardPasses) -> str:
    """Figure 8: milliseconds of the forward pass by part."""
    parts = passes.parts
    rows = []
    for key, name in measures.FORWARD.items():
        few, many = parts[FEW][key], parts[MANY][key]
        ratio = f"{many / few:.2f}" if few else DASH
        rows.append([name, *(f"{1e3 * seconds[key]:.1f}" for seconds in parts.values()), ratio])
    totals = [f"{1e3 * total:.1f}" for total in passes.totals.values()]
    rows.append(["all", *totals, f"{passes.ratio:.2f}"])
    for name, shares in (
        ("share of dispatch and combine", passes.dispatch),
        ("share of their all-to-all alone", passes.network),
        ("share of the roofline", passes.roofline),
    ):
        rows.append([name, *map(text.percent, shares.values()), ""])
    return text.table(["ms", *(f"{e:,} experts" for e in parts), f"{MANY:,} by {FEW}"], rows)


def findings_of_forward(passes: ForwardPasses) -> list[Finding]:
    """The rows of the summary of figure 8."""

    def both(shares: Mapping[int, float]) -> str:
        return f"{text.percent(shares[FEW])}, {text.percent(shares[MANY])}"

    papers = [{e: c.value for e, c in row.items()} for row in (paper.DISPATCH, paper.ROOFLINE)]
    experts = f"{FEW} and {MANY} experts, figure 8"
    rows = (
        (
            f"time of {MANY // FEW} times the experts, figure 8",
            f"{paper.STEP_RATIO.value:g} times",
            f"{passes.ratio:.2f} times",
        ),
        (f"share of dispatch and combine, {experts}", both(papers[0]), both(passes.dispatch)),
        (f"share of the roofline, {experts}", f"> {both(papers[1])}", both(passes.roofline)),
    )
    return [Finding(*row, "estimated") for row in rows]


def figure9_lines() -> tuple[list[int], dict[tuple[str, int], list[float]]]:
    """Devices, and seconds by (kind, bytes on each device), from the interconnect model alone."""
    slices = [Topology.parse(f"v3:{torus}") for torus in _TORI]
    lines = {
        (kind, size): [network.seconds(kind, size, s.num_devices, s) for s in slices]
        for kind in paper.EXPONENTS
        for size in paper.FIGURE9_BYTES
    }
    return [s.num_devices for s in slices], lines


def interconnect() -> str:
    """The interconnect model of the largest slice."""
    return network.describe(Topology.parse(f"v3:{_TORI[-1]}"))


def _exponents() -> dict[tuple[str, int], float]:
    devices, lines = figure9_lines()
    return {key: measures.exponent(devices, seconds) for key, seconds in lines.items()}


def _exponent(value: float) -> str:
    """Two digits, and no minus before a zero."""
    return f"{round(value, 2) + 0.0:.2f}"


def collectives_table() -> str:
    """Figure 9: collectives by devices."""
    devices, lines = figure9_lines()
    shown, exponents = (0, len(devices) // 2, -1), _exponents()
    rows = [
        [
            f"{kind}, {size / 1e6:.0f} MB",
            *(f"{1e6 * lines[kind, size][i]:,.0f}" for i in shown),
            _exponent(exponents[kind, size]),
            f"{paper.EXPONENTS[kind].value:g}",
        ]
        for kind, size in lines
    ]
    columns = [f"{devices[i]:,} devices, µs" for i in shown]
    return text.table(["bytes on each device", *columns, "exponent", "paper"], rows)


def exponents_off() -> list[str]:
    """The exponents that differ from the paper's."""
    return [
        f"{kind} of {size / 1e6:.0f} MB has {_exponent(exponent)} for {paper.EXPONENTS[kind].value:g}"
        for (kind, size), exponent in _exponents().items()
        if abs(exponent - paper.EXPONENTS[kind].value) > thresholds.EXPONENT
    ]


def findings_of_collectives() -> list[Finding]:
    """The rows of the summary of figure 9."""
    size, exponents = paper.FIGURE9_BYTES[-1], _exponents()
    at = f"in the number of devices, {size / 1e6:.0f} MB, figure 9"
    return [
        Finding(f"exponent of {k} {at}", f"{c.value:g}", _exponent(exponents[k, size]), "model")
        for k, c in paper.EXPONENTS.items()
    ]
