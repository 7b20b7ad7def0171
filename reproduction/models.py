"""The page's tables and figures of single models: parameters, speed and cost, decoding, today's machines."""

from collections.abc import Iterator, Mapping
from typing import Any

from lingvo_moe.core.console import units

from . import measures, paper, requests, text, thresholds
from .measures import Plan, Plans
from .text import DASH, Finding


def machines(plans: Plans) -> str:
    """A table of the TPUs of the estimates."""
    tops: dict[str, Mapping[str, Any]] = {}
    for plan in plans.values():
        if "clock_hz" in plan["topology"]:  # no cluster, and not a record that no slice fits
            tops.setdefault(plan["topology"]["generation"], plan["topology"])
    shown = dict(sorted(tops.items()))
    per_device = {
        "devices a chip": lambda t: f"{t['devices'] // t['chips']}",
        "memory": lambda t: text.gib(t["hbm_bytes"]),
        "peak, bfloat16": lambda t: f"{t['peak_flops'] / 1e12:.4g} TFLOP/s",
        "memory bandwidth": lambda t: f"{t['hbm_bandwidth'] / 1e9:,.0f} GB/s",
        "link, each direction": lambda t: f"{t['link_bandwidth'] / 1e9:.4g} GB/s",
    }
    rows = [[what, *(tell(top) for top in shown.values())] for what, tell in per_device.items()]
    return text.table(["", *(f"TPU {generation}" for generation in shown)], rows)


def compilers(plans: Plans) -> list[str]:
    built = [plan["compiler"] for plan in plans.values() if "compiler" in plan]
    return sorted({text.listed([f"{k} {version}" for k, version in one.items()]) for one in built})


def _paper_rows() -> dict[str, paper.PaperRow]:
    """The paper's rows by the name of our plan, the largest first."""
    rows = {requests.TABLE3[key]: row for key, row in paper.MOE.items()}
    return rows | {requests.DENSE_NAME: paper.DENSE}


def _apart(plan: Plan, row: paper.PaperRow) -> float:
    return plan["parameters"]["count"] / row.parameters - 1


def furthest(plans: Plans) -> float:
    """The largest relative difference of a number of parameters from the paper's."""
    return max((_apart(plans[name], row) for name, row in _paper_rows().items()), key=abs)


def parameters(plans: Plans) -> str:
    """Table 1."""
    rows = []
    for name, row in _paper_rows().items():
        apart = _apart(plans[name], row)
        words = "as rounded" if abs(apart) < 0.01 else f"{apart:+.1%}"
        ours = f"{plans[name]['parameters']['count']:,}"
        rows.append([row.label, text.count(row.parameters), ours, words])
    return text.table(["model", "paper", "here", "difference"], rows)


def speed_table(plans: Plans) -> str:
    """Table 3: steps a second, core-years and days."""
    entries = [(row, plans[name], "") for name, row in _paper_rows().items()]
    bf16 = plans[requests.weak(2048, 60, bf16=True)]
    entries.insert(1, (paper.MOE[2048, 60], bf16, ", bfloat16 activations"))
    entries.append((paper.DENSE, plans[requests.PIPELINED_NAME], ", in a pipeline"))
    head = ["model", "cores", "batch", "steps/s, paper", "here", "core-years, paper", "here"]
    head += ["days, paper", "here", "memory of a core"]
    return text.table(head, [_speed_row(row, plan, note) for row, plan, note in entries])


def _speed_row(row: paper.PaperRow, plan: Plan, note: str) -> list[str]:
    def given(value: float | None, form: str = ".1f") -> str:
        return DASH if value is None else f"{value:{form}}"

    ours = [DASH] * 3
    if measures.has_time(plan):
        time = plan["time"]
        ours = [units.number(time[key]) for key in ("steps_per_second", "device_years", "days")]
    return [
        row.label + note,
        f"{row.cores}",
        f"{row.batch_tokens}M",
        given(row.steps_per_second, ".2f"),
        ours[0],
        given(row.core_years),
        ours[1],
        given(row.days),
        ours[2],
        text.gib(measures.needed(plan)) + ("" if measures.fits(plan) else ": does not fit"),
    ]


def own_tokens() -> tuple[float, float]:
    """The fewest and the most trillions of tokens that follow from the paper's own columns."""
    totals = [
        row.steps_per_second * row.batch_tokens * 2**20 * row.days * 86400 / 1e12
        for row in paper.MOE.values()
        if row.steps_per_second and row.days
    ]
    return min(totals), max(totals)


def speeds(plans: Plans) -> tuple[list[str], list[float], list[float]]:
    """Labels, the paper's steps/s and ours, of the models that have both."""
    speeds_of = [
        (row.label, row.steps_per_second, plans[name]["time"]["steps_per_second"])
        for name, row in _paper_rows().items()
        if row.steps_per_second and measures.has_time(plans[name])
    ]
    return [f[0] for f in speeds_of], [f[1] for f in speeds_of], [f[2] for f in speeds_of]


def ratios(plans: Plans) -> dict[str, list[str]]:
    """The models that are 'faster' here than in the paper, 'slower', and about the 'same'."""
    by_model = {label: ours / measured for label, measured, ours in zip(*speeds(plans))}
    out = {
        key: [f"{m} {r**sign:.2f} times" for m, r in by_model.items() if r**sign > thresholds.RATIO]
        for key, sign in (("faster", 1), ("slower", -1))
    }
    same = [m for m, r in by_model.items() if thresholds.times_apart(r) <= thresholds.RATIO]
    return out | {"same": same}


def verdict(plans: Plans, bf16: bool) -> str:
    """Whether the trillion fits, and how."""
    plan = plans[requests.weak(2048, 60, bf16)]
    if measures.fits(plan):
        return f"fits, with {measures.held(plan)}"
    return f"does not fit: it misses by {text.gib(plan['memory']['misses_by'])}"


def _compiled(plans: Plans) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the names of the largest plans, and the figures of compiling them."""
    yield paper.MOE[2048, 36].label, plans[requests.real(2048, 36)]["compile"]
    yield paper.MOE[2048, 60].label, plans[requests.weak(2048, 60)]["compile"]
    bf16 = plans[requests.weak(2048, 60, bf16=True)]["compile"]
    yield f"{paper.MOE[2048, 60].label}, bfloat16", bf16


def compiling(plans: Plans) -> str:
    """A table of the time and the memory for making the largest plans."""
    rows = []
    for label, took in _compiled(plans):
        seconds = [took.get(key) for key in ("lower_seconds", "compile_seconds")]
        host = took.get("host_peak_bytes")
        cells = [DASH if s is None else f"{s:.0f} s" for s in seconds]
        cells += [DASH if host is None else text.gib(host)]
        rows.append([label, *cells, f"{took['program_bytes'] / 2**20:.1f} MiB"])
    return text.table(["model", "lowering", "compiling", "host's memory", "program"], rows)


def findings(plans: Plans) -> list[Finding]:
    """The rows of the summary of tables 1 and 3, and of making plans."""
    row, ours = paper.MOE[2048, 36], plans[requests.real(2048, 36)]
    count = f"{ours['parameters']['count']:,}"
    claim = f"parameters of {row.label}, table 1"
    out = [Finding(claim, text.count(row.parameters), count, "exact")]
    for what, papers, key in (
        ("steps/s", row.steps_per_second, "steps_per_second"),
        ("core-years", row.core_years, "device_years"),
    ):
        figure = units.number(ours["time"][key])
        out.append(Finding(f"{what} of {row.label}, table 3", f"{papers:g}", figure, "estimated"))
    for label, took in _compiled(plans):
        if took.get("lower_seconds") is not None and took.get("compile_seconds") is not None:
            claim = f"lowering and compiling {label}, and the host's memory"
            out.append(Finding(claim, DASH, measures.made_in(took), "timed"))
    return out


def decoding(plan: Plan) -> str:
    """A table of the step of beam search."""
    time = plan["time"]
    talking = sum(r["seconds"] for r in plan["collectives"]) / time["step_seconds"]
    rows = [
        ["a step, estimated", f"{1e3 * time['step_seconds']:.1f} ms"],
        ["of it communication, estimated", text.percent(talking)],
        ["tokens a second, estimated", f"{time['tokens_per_second']:,.0f}"],
        ["memory of a core", text.gib(measures.needed(plan))],
        ["weights of a core", text.gib(plan["parameters"]["bytes"])],
    ]
    return text.table(["", ""], rows)


def today(plans: Plans) -> str:
    """A table of the smallest slices of today's generations."""
    head = ["TPU", "slice", "chips", "memory of a device", "step", "tokens/s", "days", "chip-days"]
    shown = {g: plans[requests.today(g)] for g in requests.GENERATIONS}
    return text.table(head, [[g, *measures.machine_cells(plan)] for g, plan in shown.items()])


def findings_of_today(plans: Plans) -> list[Finding]:
    """The rows of the summary of the smallest slices."""
    claim = "smallest {} slice for MoE(2048E, 36L), and chip-days for 1T tokens"
    costs = {g: measures.machine_and_days(plans[requests.today(g)]) for g in requests.GENERATIONS}
    return [Finding(claim.format(g), DASH, ours, "estimated") for g, ours in costs.items()]
