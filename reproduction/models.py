"""The page's sections on single models: parameters, speed and cost, decoding, today's machines."""

from collections.abc import Mapping, Sequence
from typing import Any

from lingvo_moe.core.planner import figures as plan_figures

from . import measures, paper, reasons, requests, text
from .measures import Plan
from .text import DASH, Finding, Section

Plans = Mapping[str, Plan]


def machine(plans: Plans) -> Section:
    """The TPUs of the estimates, and all compilers."""
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
    compilers = sorted({_compiler(p) for p in plans.values() if "compiler" in p})
    lines = [
        "The TPUs as the estimates take them, from public data sheets, for each device (a core of v3, "
        "else a chip):",
        "",
        *text.table(["", *(f"TPU {generation}" for generation in shown)], rows),
        f"Compiled by {'; '.join(compilers)}.",
    ]
    return Section("The machines", lines)


def _compiler(plan: Plan) -> str:
    return text.listed([f"{name} {version}" for name, version in plan["compiler"].items()])


def _paper_rows() -> dict[str, paper.Row]:
    """The paper's rows by the name of our plan, the largest first."""
    rows = {requests.TABLE3[key]: row for key, row in paper.MOE.items()}
    return rows | {requests.DENSE_NAME: paper.DENSE}


def parameters(plans: Plans) -> Section:
    """Table 1."""
    rows, off = [], []
    for name, row in _paper_rows().items():
        ours = plans[name]["parameters"]["count"]
        apart = ours / row.parameters - 1
        off.append(apart)
        words = "as rounded" if abs(apart) < 0.01 else f"{apart:+.1%}"
        rows.append([row.label, text.count(row.parameters), f"{ours:,}", words])
    most = max(off, key=abs)
    lines = [
        "Ours are counted from the specifications of the variables, and exact.",
        "",
        *text.table(["model", "paper", "here", "difference"], rows),
    ]
    if abs(most) >= 0.01:
        what = f"the furthest is {most:+.1%} from the paper's figure."
        lines += [reasons.line("parameters", what), ""]
    big = plans[requests.real(2048, 36)]["parameters"]["count"]
    finding = Finding(
        "parameters of MoE(2048E, 36L), table 1",
        text.count(paper.MOE[2048, 36].parameters),
        f"{big:,}",
        "exact",
    )
    return Section("Table 1: parameters", lines, [finding])


def table3(plans: Plans) -> Section:
    """Steps a second, core-years and days."""
    papers = _paper_rows()
    entries = [(row, plans[name], "") for name, row in papers.items()]
    bf16 = plans[requests.weak(2048, 60, bf16=True)]
    entries.insert(1, (paper.MOE[2048, 60], bf16, ", bfloat16 activations"))
    pipelined = plans[requests.PIPELINED_NAME]
    entries.append((paper.DENSE, pipelined, ", in a pipeline"))
    rows = [_speed_row(row, plan, note) for row, plan, note in entries]
    measured = [
        (row, plans[name])
        for name, row in papers.items()
        if row.steps_per_second and measures.has_time(plans[name])
    ]
    lines = [
        "The paper's speeds, core-years and days are measured; ours are estimated for the same batch, the same "
        "number of cores and a trillion target tokens. Memory is the compiler's figure. "
        + _own_tokens(),
        "",
        *text.table(
            [
                "model",
                "cores",
                "batch",
                "steps/s, paper",
                "here",
                "core-years, paper",
                "here",
                "days, paper",
                "here",
                "memory of a core",
            ],
            rows,
        ),
        *(
            text.picture(SPEED, "steps a second, measured in the paper and estimated here")
            if measured
            else []
        ),
    ]
    ratios = {
        row.label: plan["time"]["steps_per_second"] / (row.steps_per_second or 1)
        for row, plan in measured
    }
    lines += _speed_differences(ratios) + _dense_difference(plans[requests.DENSE_NAME])
    lines += _pipelined(pipelined)
    lines += _sixty_layers(plans[requests.weak(2048, 60)], bf16)
    return Section("Table 3: speed and cost", lines, _speed_findings(measured))


SPEED = "reproduction_speed.svg"


def speeds(plans: Plans) -> tuple[list[str], list[float], list[float]]:
    """Labels, the paper's steps/s and ours, of the models that have both."""
    found = [
        (row.label, row.steps_per_second, plans[name]["time"]["steps_per_second"])
        for name, row in _paper_rows().items()
        if row.steps_per_second and measures.has_time(plans[name])
    ]
    return [f[0] for f in found], [f[1] for f in found], [f[2] for f in found]


def _own_tokens() -> str:
    """The tokens that follow from the paper's own columns."""
    totals = [
        row.steps_per_second * row.batch_tokens * 2**20 * row.days * 86400
        for row in paper.MOE.values()
        if row.steps_per_second and row.days
    ]
    return (
        f"The paper's steps/s, batch and days multiply to {min(totals) / 1e12:.2f} to "
        f"{max(totals) / 1e12:.2f} trillion tokens, so a batch of 4M is 4 x 2^20 of them."
    )


def _speed_row(row: paper.Row, plan: Plan, note: str) -> list[str]:
    def given(value: float | None, form: str = ".1f") -> str:
        return DASH if value is None else f"{value:{form}}"

    ours = [DASH] * 3
    if measures.has_time(plan):
        time = plan["time"]
        ours = [text.figure(time[key]) for key in ("steps_per_second", "device_years", "days")]
    memory = text.gib(plan_figures.needed(plan))
    if not measures.fits(plan):
        memory = f"{memory}: does not fit"
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
        memory,
    ]


def _speed_differences(ratios: Mapping[str, float]) -> list[str]:
    """One line for the models that are faster here, and one for the slower ones."""
    lines = []
    for key, sign in (("faster", 1), ("slower", -1)):
        off = {m: r**sign for m, r in ratios.items() if r**sign > reasons.RATIO}
        if off:
            each = text.listed([f"{model} {ratio:.2f} times" for model, ratio in off.items()])
            lines += [reasons.line(key, f"{key} here than in the paper: {each}."), ""]
    same = [model for model, r in ratios.items() if reasons.times_apart(r) <= reasons.RATIO]
    if same:
        lines += [f"Within {reasons.RATIO:g} times of the paper: {text.listed(same)}.", ""]
    return lines


def _dense_difference(plan: Plan) -> list[str]:
    """T(96L), of which the paper gives no steps a second."""
    if not measures.has_time(plan) or not paper.DENSE.core_years:
        return []
    ratio = paper.DENSE.core_years / plan["time"]["device_years"]
    if reasons.times_apart(ratio) <= reasons.RATIO:
        return []
    what = f"{paper.DENSE.label} takes {1 / ratio:.2f} times the paper's core-years."
    return [reasons.line("dense", what), ""]


def _pipelined(plan: Plan) -> list[str]:
    """T(96L) in a pipeline, as the paper trained it."""
    found = plan.get("pipelines")
    if not measures.has_time(plan) or not found or not paper.DENSE.core_years:
        return []
    one = found[0]
    return [
        f"In a pipeline, {paper.DENSE.label} has {one['stages']} stages (schedule {one['schedule']}), and each core "
        f"works on {one['micro_batches']} micro-batches; the paper states neither number. The bubble is "
        f"{one['bubble']:.0%} of a stage's time, and the estimate "
        f"{plan['time']['device_years'] / paper.DENSE.core_years:.2f} times the paper's core-years. "
        "See [pipelines](pipelines.md#when-to-pipeline-and-when-not).",
        "",
    ]


def _sixty_layers(fp32: Plan, bf16: Plan) -> list[str]:
    """Whether the trillion fits, and how."""

    def verdict(plan: Plan) -> str:
        memory = plan["memory"]
        if measures.fits(plan):
            return f"fits, with {text.gib(plan_figures.needed(plan))} of {text.gib(memory['hbm'])}"
        return f"does not fit: it misses by {text.gib(memory['misses_by'])}"

    return [
        f"MoE(2048E, 60L), a trillion parameters, with float32 activations {verdict(fp32)}; with bfloat16 "
        f"activations it {verdict(bf16)}. The paper reports no result for it, as training was numerically "
        "unstable.",
        "",
    ]


def _speed_findings(measured: list[tuple[paper.Row, Plan]]) -> list[Finding]:
    findings = []
    for row, plan in measured:
        if row is paper.MOE[2048, 36]:
            time = plan["time"]
            findings = [
                Finding(
                    "steps/s of MoE(2048E, 36L), table 3",
                    f"{row.steps_per_second:g}",
                    text.figure(time["steps_per_second"]),
                    "estimated",
                ),
                Finding(
                    "core-years of MoE(2048E, 36L), table 3",
                    f"{row.core_years:g}",
                    text.figure(time["device_years"]),
                    "estimated",
                ),
            ]
    return findings


def compiling(plans: Plans) -> Section:
    """The time and memory for making the largest plans."""
    rows, findings = [], []
    for label, name in (
        (paper.MOE[2048, 36].label, requests.real(2048, 36)),
        (paper.MOE[2048, 60].label, requests.weak(2048, 60)),
        (f"{paper.MOE[2048, 60].label}, bfloat16", requests.weak(2048, 60, bf16=True)),
    ):
        took = plans[name]["compile"]
        seconds = [took.get(key) for key in ("lower_seconds", "compile_seconds")]
        host = took.get("host_peak_bytes")
        rows.append(
            [
                label,
                *(DASH if s is None else f"{s:.0f} s" for s in seconds),
                DASH if host is None else text.gib(host),
                f"{took['program_bytes'] / 2**20:.1f} MiB",
            ]
        )
        if None not in seconds:
            ours = f"{sum(seconds):.0f} s" + ("" if host is None else f", {text.gib(host)}")
            claim = f"lowering and compiling {label}, and the host's memory"
            findings.append(Finding(claim, DASH, ours, "timed"))
    lines = [
        "Timed when these plans were made, one after the other, on a machine that may have been busy; a "
        "program that does not fit has no time.",
        "",
        *text.table(["model", "lowering", "compiling", "host's memory", "program"], rows),
    ]
    return Section("Making a plan", lines, findings)


def decode(plans: Plans) -> Section:
    """The step of beam search."""
    plan = plans[requests.DECODE]
    if not measures.has_time(plan):
        memory = plan["memory"]
        lines = [f"The step of beam search misses by {text.gib(memory['misses_by'])}.", ""]
        return Section("Decoding", lines)
    time, batch = plan["time"], plan["batch"]
    talking = sum(r["seconds"] for r in plan["collectives"]) / time["step_seconds"]
    lines = [
        "The paper decodes on the training machine, and gives no times. This is one step of beam search "
        f"of MoE(2048E, 36L) on {plan['topology']['name']}, {batch['target_tokens']:,} sentences at a time:",
        "",
        *text.table(
            ["", ""],
            [
                ["a step, estimated", f"{1e3 * time['step_seconds']:.1f} ms"],
                ["of it communication, estimated", text.percent(talking)],
                ["tokens a second, estimated", f"{time['tokens_per_second']:,.0f}"],
                ["memory of a core", text.gib(plan_figures.needed(plan))],
                ["weights of a core", text.gib(plan["parameters"]["bytes"])],
            ],
        ),
    ]
    return Section("Decoding", lines)


def today(plans: Plans, generations: Sequence[str]) -> Section:
    """The smallest slices of some generations."""
    head = [
        "model",
        "slice",
        "chips",
        "memory of a device",
        "step",
        "tokens/s",
        "days",
        "chip-days",
    ]
    lines = [
        "The smallest slices that hold each model, with the paper's batch, bfloat16 activations and "
        "float32 weights; a slice's devices must divide batch, groups and experts. Slice and memory are the "
        "compiler's verdict, the rest is estimated; days and chip-days are for a trillion target tokens.",
        "",
    ]
    findings = []
    for generation in generations:
        names = {model: requests.today(model, generation) for model in requests.TODAY_MODELS}
        rows = [_today_row(model, plans[name]) for model, name in names.items() if name in plans]
        lines += [f"### TPU {generation}", "", *text.table(head, rows)]
        rest = [f"`mt.{model}`" for model, name in names.items() if name not in plans]
        if rest:
            lines += [text.wrapped(f"Not recorded yet: {text.listed(rest)}."), ""]
        if names[requests.moe(2048, 36)] in plans:
            findings.append(_today_finding(plans, generation))
    return Section("Today's machines", lines, findings)


def _today_row(model: str, plan: Plan) -> list[str]:
    if "fits_none" in plan:
        tried = plan["fits_none"]
        sizes = f"none up to `{tried[-1]}`" if tried else "none: each is too small for its state"
        return [f"`mt.{model}`", sizes, *[DASH] * 6]
    time, top = plan["time"], plan["topology"]
    return [
        f"`mt.{model}`",
        f"`{top['name']}`",
        f"{top['chips']:,}",
        f"{text.gib(plan_figures.needed(plan))} of {text.gib(plan['memory']['hbm'])}",
        f"{time['step_seconds']:.2f} s",
        f"{time['tokens_per_second']:,.0f}",
        text.figure(time["days"]),
        f"{time['chip_days']:,.0f}",
    ]


def _today_finding(plans: Plans, generation: str) -> Finding:
    plan = plans[requests.today(requests.moe(2048, 36), generation)]
    what = f"smallest {generation} slice for MoE(2048E, 36L), and chip-days for 1T tokens"
    ours = "none"
    if "fits_none" not in plan:
        ours = f"`{plan['topology']['name']}`, {plan['time']['chip_days']:,.0f}"
    return Finding(what, DASH, ours, "estimated")
