"""The page's sections on scaling with the number of devices: figures 2, 7, 8 and 9."""

from collections.abc import Mapping
from typing import Any

from lingvo_moe.core.planner import figures as plan_figures
from lingvo_moe.core.planner.machines.topology import Topology
from lingvo_moe.core.planner.network import interconnect

from . import measures, paper, reasons, requests, text
from .measures import Plan
from .text import DASH, Finding, Section

Plans = Mapping[str, Plan]

COMPILE = "reproduction_compile_time.svg"
MEMORY = "reproduction_memory.svg"
FORWARD = "reproduction_forward.svg"
COLLECTIVES = "reproduction_collectives.svg"

# Tori of two-core chips, as nearly square as the compiler has them.
_TORI = ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16", "16x32", "32x32")


def figure2(plans: Plans, compiling: Mapping[str, Any]) -> Section:
    """Compile time by devices.

    Args:
        plans: those of requests.COMPILED.
        compiling: what benchmarks/compile_time.py wrote.
    """
    entries = compiling["entries"]
    counts = [
        measures.collective_counts(plans[requests.COMPILED[entry["devices"]]]) for entry in entries
    ]
    rows = [
        [
            f"{entry['devices']:,}",
            f"{entry['lower_seconds']:.1f} s",
            f"{entry['compile_seconds']:.1f} s",
            f"{entry['program_bytes'] / 1024:,.0f} KiB",
            text.listed([f"{n} {kind}" for kind, n in count.items()]) or DASH,
        ]
        for entry, count in zip(entries, counts)
    ]
    first, last = entries[0], entries[-1]
    ratio = {k: last[k] / first[k] for k in ("lower_seconds", "compile_seconds", "program_bytes")}
    devices = f"{last['devices']:,} devices by {first['devices']}"
    same = all(count == counts[0] for count in counts)
    lines = [
        f"Timed here, on {compiling['host']}: the training step of MoE(36L) with as many experts and groups as "
        f"devices and {requests.ROWS_A_CORE} rows of 128 tokens on each, lowered and compiled in a fresh "
        f"process, {_times(compiling['rounds'])}, in one run, on a machine that others share. "
        f"Collectives are counted in a step of each compiled program; their "
        f"number {'is the same for all' if same else 'differs a little'}.",
        "",
        *text.table(["devices", "lowering", "compiling", "program", "collectives a step"], rows),
        *text.picture(COMPILE, "seconds to lower and to compile, by devices"),
        f"Of {devices}: compiling takes {ratio['compile_seconds']:.2f} times as long, lowering "
        f"{ratio['lower_seconds']:.2f}, and the program is {ratio['program_bytes']:.2f} times as large.",
        "",
    ]
    if ratio["compile_seconds"] > reasons.COMPILE_RATIO:
        what = (
            f"the compiler takes {ratio['compile_seconds']:.2f} times as long, the paper says O(1)."
        )
        lines += [reasons.line("compile_time", what), ""]
    finding = Finding(
        f"compile time, {devices}, figure 2",
        "O(1)",
        f"{ratio['compile_seconds']:.2f} times",
        "timed",
    )
    return Section("Figure 2: compile time", lines, [finding])


def memory_bars(plans: Plans) -> dict[str, dict[str, Plan]]:
    """Plans by panel and label, for figures.memory. 60 layers are those that fit, if any does."""
    bars = {}
    for layers in requests.LAYERS:
        bf16 = layers == 60 and not _all_fit(plans, layers)
        title = f"{layers} layers" + (", bfloat16" if bf16 else "")
        bars[title] = {f"{e:,}": plans[requests.weak(e, layers, bf16)] for e in requests.CORES}
    return bars


def _all_fit(plans: Plans, layers: int) -> bool:
    return all(measures.fits(plans[requests.weak(e, layers)]) for e in requests.CORES)


def figure7(plans: Plans) -> Section:
    """Memory by experts and layers."""
    rows, flat = [], {}
    for layers in requests.LAYERS:
        for bf16 in (False, True) if layers == 60 else (False,):
            row = [plans[requests.weak(e, layers, bf16)] for e in requests.CORES]
            label = f"{layers} layers" + (", bfloat16 activations" if bf16 else "")
            flat[label] = measures.spread([plan_figures.needed(plan) for plan in row])
            cells = [
                text.gib(plan_figures.needed(p)) + ("" if measures.fits(p) else ", does not fit")
                for p in row
            ]
            rows.append([label, *cells, f"{flat[label]:.2f}"])
    limit = next(iter(plans.values()))["memory"]["hbm"]
    head = ["", *(f"{experts:,} experts" for experts in requests.CORES), "largest by smallest"]
    most = max(flat, key=lambda label: flat[label])
    lines = [
        f"The compiler's own figures for a core of {text.gib(limit)}, an expert and 2048 target tokens on each; of "
        "a program that does not fit, the memory that it needs.",
        "",
        *text.table(head, rows),
        *text.picture(MEMORY, "memory of a core by experts, for 12, 36 and 60 layers"),
        f"From {min(requests.CORES)} to {max(requests.CORES)} experts, and as many cores, memory differs by "
        f"{min(flat.values()):.2f} to {flat[most]:.2f} times; the paper: {paper.MEMORY.says}.",
        "",
    ]
    if flat[most] > reasons.FLAT_RATIO:
        what = f"with {most} it grows {flat[most]:.2f} times."
        lines += [reasons.line("memory", what), ""]
    lines += _rematerialized(plans)
    claim = f"memory of a core, {max(requests.CORES)} by {min(requests.CORES)} experts, 36 layers, figure 7"
    ends = [
        plan_figures.needed(plans[requests.weak(e, 36)])
        for e in (max(requests.CORES), min(requests.CORES))
    ]
    finding = Finding(claim, "O(1)", f"{ends[0] / ends[1]:.2f} times", "exact")
    return Section("Figure 7: memory", lines, [finding])


def _rematerialized(plans: Plans) -> list[str]:
    """The activations of 60 layers beside those of 36."""
    kept = {n: measures.kept_for_backward(plans[requests.weak(2048, n)]) for n in (36, 60)}
    if not kept[36] or not kept[60]:
        return [
            f"In the paper {paper.REMATERIALIZED.says}; with float32 activations one of the two does not fit "
            "here, so that there is nothing to compare. Here every block is recomputed in the backward pass, at "
            "every depth.",
            "",
        ]
    ratio = kept[60] / kept[36]
    lines = [
        f"Activations kept for the backward pass of MoE(2048E): {text.gib(kept[36])} with 36 layers, "
        f"{text.gib(kept[60])} with 60.",
        "",
    ]
    if ratio >= 1:
        what = f"ours grow {ratio:.2f} times; in the paper {paper.REMATERIALIZED.says}."
        lines += [reasons.line("rematerialized", what), ""]
    return lines


def forward_plans(plans: Plans) -> dict[int, Plan]:
    """Figure 8's plans that have times, by experts."""
    found = {experts: plans[requests.weak(experts, 36)] for experts in requests.CORES}
    return {experts: plan for experts, plan in found.items() if measures.has_time(plan)}


def has_ends(plans: Mapping[int, Plan]) -> bool:
    """Whether both the fewest and the most experts are there."""
    return min(requests.CORES) in plans and max(requests.CORES) in plans


def figure8(plans: Plans) -> Section:
    """Time of the forward pass by part."""
    found = forward_plans(plans)
    few, many = min(requests.CORES), max(requests.CORES)
    if not has_ends(found):
        return Section("Figure 8: time by part", ["One of the programs does not fit.", ""])
    parts = {experts: measures.forward_seconds(plan) for experts, plan in found.items()}
    totals = {experts: sum(seconds.values()) for experts, seconds in parts.items()}
    rows = [
        [name, *(f"{1e3 * parts[e][key]:.1f}" for e in found), f"{_ratio(parts, key, few, many)}"]
        for key, name in measures.FORWARD.items()
    ]
    forward = totals[many] / totals[few]
    step = found[many]["time"]["step_seconds"] / found[few]["time"]["step_seconds"]
    rows.append(["all", *(f"{1e3 * total:.1f}" for total in totals.values()), f"{forward:.2f}"])
    both = {
        e: (s["dispatch_combine"] + s["dispatch_network"]) / totals[e] for e, s in parts.items()
    }
    network_share = {e: s["dispatch_network"] / totals[e] for e, s in parts.items()}
    roofline = {e: measures.forward_roofline(plan) for e, plan in found.items()}
    rows += [
        [name, *(text.percent(share) for share in shares.values()), ""]
        for name, shares in (
            ("share of dispatch and combine", both),
            ("share of their all-to-all alone", network_share),
            ("share of the roofline", roofline),
        )
    ]
    lines = [
        "Milliseconds of the forward pass, estimated, with 36 layers and 2048 target tokens a core. The paper "
        "shows the forward pass too, measured.",
        "",
        *text.table(["ms", *(f"{e:,} experts" for e in found), f"{many:,} by {few}"], rows),
        *text.picture(FORWARD, "milliseconds of the forward pass by part, by experts"),
        f"{many // few} times the experts take {forward:.2f} times as long forward, and {step:.2f} times for a "
        f"whole step; the paper says {paper.STEP_RATIO.value:g}. Dispatch and combine go from "
        f"{text.percent(both[few])} to {text.percent(both[many])}, their all-to-all alone from "
        f"{text.percent(network_share[few])} to {text.percent(network_share[many])}; the paper's from "
        f"{text.percent(paper.DISPATCH[few].value)} to {text.percent(paper.DISPATCH[many].value)}. The roofline "
        f"is {text.percent(roofline[few])} and {text.percent(roofline[many])} of the time; the paper's more than "
        f"{text.percent(paper.ROOFLINE[few].value)} and {text.percent(paper.ROOFLINE[many].value)}.",
        "",
        _exchanges(found[many], 36 // 2),
        "",
        *_capacity(parts[many]["experts"] / parts[few]["experts"], few, many),
        *_figure8_differences(forward, both, roofline),
    ]
    return Section("Figure 8: time by part", lines, _figure8_findings(forward, both, roofline))


def _ratio(parts: Mapping[int, Mapping[str, float]], key: str, few: int, many: int) -> str:
    return f"{parts[many][key] / parts[few][key]:.2f}" if parts[few][key] else DASH


def _exchanges(plan: Plan, moe_layers: int) -> str:
    """The collectives of the compiled program for each MoE layer."""
    each = measures.exchanges(plan) / moe_layers
    gathers = measures.gathers_of_experts(plan)
    return (
        f"The compiled program has {each:g} all-to-alls forward for each of the {moe_layers} MoE layers, and "
        f"{gathers or 'no'} all-gathers of experts; counts are exact."
    )


def _capacity(ratio: float, few: int, many: int) -> list[str]:
    """Explains why the experts' time grows with their number; empty if it does not."""
    if ratio <= reasons.RATIO:
        return []
    return [
        f"The experts take {ratio:.2f} times as long with {many:,} as with {few}, {reasons.CAPACITY}",
        "",
    ]


def _figure8_differences(
    forward: float, dispatch: Mapping[int, float], roofline: Mapping[int, float]
) -> list[str]:
    lines = []
    if reasons.times_apart(forward / paper.STEP_RATIO.value) > reasons.RATIO:
        what = f"{forward:.2f} times here, {paper.STEP_RATIO.value:g} in the paper."
        lines += [reasons.line("step_ratio", what), ""]
    for key, ours, claims in (
        ("dispatch", dispatch, paper.DISPATCH),
        ("roofline", roofline, paper.ROOFLINE),
    ):
        off = [
            f"{text.percent(ours[e])} here, and in the paper {claim.says}"
            for e, claim in claims.items()
            if _off(key, e, ours[e], claim.value)
        ]
        if off:
            lines += [reasons.line(key, f"{'; '.join(off)}."), ""]
    return lines


def _off(key: str, experts: int, ours: float, papers: float) -> bool:
    """Whether shares differ; 'more than 70%' of the paper's has no upper end."""
    if key == "roofline" and experts == 128:
        return ours < papers - reasons.SHARE
    return abs(ours - papers) > reasons.SHARE


def _figure8_findings(
    forward: float, dispatch: Mapping[int, float], roofline: Mapping[int, float]
) -> list[Finding]:
    few, many = min(requests.CORES), max(requests.CORES)

    def both(shares: Mapping[int, float]) -> str:
        return f"{text.percent(shares[few])}, {text.percent(shares[many])}"

    experts = f"{few} and {many} experts, figure 8"
    return [
        Finding(
            f"time of {many // few} times the experts, figure 8",
            f"{paper.STEP_RATIO.value:g} times",
            f"{forward:.2f} times",
            "estimated",
        ),
        Finding(
            f"share of dispatch and combine, {experts}",
            both({e: c.value for e, c in paper.DISPATCH.items()}),
            both(dispatch),
            "estimated",
        ),
        Finding(
            f"share of the roofline, {experts}",
            "> " + both({e: c.value for e, c in paper.ROOFLINE.items()}),
            both(roofline),
            "estimated",
        ),
    ]


def figure9_lines() -> tuple[list[int], dict[tuple[str, int], list[float]]]:
    """Devices, and seconds by (kind, bytes on each device), from the interconnect model alone."""
    slices = [Topology.parse(f"v3:{torus}") for torus in _TORI]
    lines = {
        (kind, size): [interconnect.seconds(kind, size, s.num_devices, s) for s in slices]
        for kind in paper.EXPONENTS
        for size in paper.FIGURE9_BYTES
    }
    return [s.num_devices for s in slices], lines


def _exponent(value: float) -> str:
    """Two digits, and no minus before a zero."""
    return f"{round(value, 2) + 0.0:.2f}"


def figure9() -> Section:
    """Collectives by devices."""
    devices, lines = figure9_lines()
    exponents = {key: measures.exponent(devices, seconds) for key, seconds in lines.items()}
    rows = [
        [
            f"{kind}, {size / 1e6:.0f} MB",
            *(f"{1e6 * lines[kind, size][i]:,.0f}" for i in (0, len(devices) // 2, -1)),
            _exponent(exponents[kind, size]),
            f"{paper.EXPONENTS[kind].value:g}",
        ]
        for kind, size in lines
    ]
    shown = [f"{devices[i]:,} devices, µs" for i in (0, len(devices) // 2, -1)]
    top = Topology.parse(f"v3:{_TORI[-1]}")
    out = [
        "**A model, not a measurement**: the paper measured these on its machine; ours are computed by the "
        "interconnect model, from links and hops, which all other sections use.",
        "",
        *(f"> {line}" for line in interconnect.describe(top).splitlines()),
        "",
        "The exponent p is that of the D^p nearest to the line; the paper's are of its O(1) and O(√D).",
        "",
        *text.table(["bytes on each device", *shown, "exponent", "paper"], rows),
        *text.picture(COLLECTIVES, "microseconds of all-reduce and all-to-all by devices"),
    ]
    off = [
        f"{kind} of {size / 1e6:.0f} MB has {_exponent(exponent)} for {paper.EXPONENTS[kind].value:g}"
        for (kind, size), exponent in exponents.items()
        if abs(exponent - paper.EXPONENTS[kind].value) > reasons.EXPONENT
    ]
    if off:
        out += [reasons.line("exponent", f"{text.listed(off)}."), ""]
    size = paper.FIGURE9_BYTES[-1]
    findings = [
        Finding(
            f"exponent of {kind} in the number of devices, {size / 1e6:.0f} MB, figure 9",
            f"{claim.value:g}",
            _exponent(exponents[kind, size]),
            "model",
        )
        for kind, claim in paper.EXPONENTS.items()
    ]
    return Section("Figure 9: collectives", out, findings)


def _times(rounds: int) -> str:
    return "once each" if rounds == 1 else f"{rounds} times each (medians)"
