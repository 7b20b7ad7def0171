"""The page's section on GPU clusters: the paper's models on the smallest ones, beside the TPU slices."""

from collections.abc import Mapping

from lingvo_moe.core.planner import figures as plan_figures
from lingvo_moe.core.planner.machines.gpu_cluster import CARDS

from . import measures, paper, requests, text
from .measures import Plan
from .text import DASH, Finding, Section

Plans = Mapping[str, Plan]

LABELS = {requests.moe(*key): row.label for key, row in paper.MOE.items()} | {
    requests.DENSE: paper.DENSE.label
}
_TYPES = {False: "float32", True: "bfloat16"}
# What a step's time goes to, with the words of the sentence below the table.
_BOUNDS = {
    "arithmetic": "arithmetic",
    "traffic": "memory traffic",
    "exchange": "all-to-alls between nodes",
    "rest": "other collectives",
}
_OVERVIEW = (
    "**Compiled for GPUs, not run**: XLA's GPU compiler compiled the training step of each model, with the "
    "paper's batch, for the smallest cluster of nodes of 8 GPUs that holds it. Sizes are powers of two: on half as "
    "many GPUs each would need nearly twice the memory, which does not fit. "
    "Memory is the compiler's figure, of the nine tenths that [plans count with](planning.md#gpu-clusters). Times are "
    "estimated, with [the network model](gpus.md#the-network-model), which assumes a network interface for each "
    "GPU: kernels run at the peaks of data sheets, which real ones rarely reach, and nothing overlaps. Weights are "
    "float32; products of float32 activations run in TF32. Days and GPU-days are for a trillion target tokens."
)


def section(plans: Plans, cards: list[str]) -> Section:
    """Sizes and costs of the smallest clusters of some cards, what bounds their steps, and TPUs beside them."""
    out = Section("GPU clusters", [_OVERVIEW, "", *_cards(cards)])
    for card in cards:
        shown = [name for name in requests.GROUPS[card] if name in plans]
        out.lines += [f"### {CARDS[card].label}", "", *_smallest(plans, shown)]
        out.lines += _not_made(card, plans) + _bounds({name: plans[name] for name in shown})
        out.findings += _findings(plans, card)
    out.lines += ["### Beside the TPU slices", "", *_beside(plans, cards)]
    if requests.ON_CLUSTER in plans:
        out.lines += _on_cluster(plans[requests.ON_CLUSTER])
        out.findings.append(_compiled(plans[requests.ON_CLUSTER]))
    return out


def _cards(cards: list[str]) -> list[str]:
    """The figures of data sheets that the estimates take."""
    shown = [CARDS[card] for card in cards]
    rows = {
        "peak, bfloat16": [f"{card.peak_flops['bfloat16'] / 1e12:.4g} TFLOP/s" for card in shown],
        "peak, TF32": [f"{card.peak_flops['tf32'] / 1e12:.4g} TFLOP/s" for card in shown],
        "memory bandwidth": [f"{card.hbm_bandwidth / 1e9:,.0f} GB/s" for card in shown],
        "NVLink, each direction": [f"{card.nvlink_bandwidth / 1e9:.4g} GB/s" for card in shown],
        "network interface, assumed": [f"{card.nic_bandwidth / 1e9:.4g} GB/s" for card in shown],
    }
    return text.table(
        ["", *(card.label for card in shown)], [[what, *row] for what, row in rows.items()]
    )


def _model(plan: Plan) -> tuple[str, str]:
    """The paper's name of the model, and the type of its activations."""
    return LABELS[plan["model"].removeprefix("mt.")], _TYPES[bool(plan["override"])]


def _smallest(plans: Plans, names: list[str]) -> list[str]:
    head = ["model", "activations", "cluster", "GPUs", "memory of a GPU", "step", "tokens/s"]
    rows = [_row(plans[name]) for name in names]
    return text.table([*head, "days", "GPU-days"], rows)


def _row(plan: Plan) -> list[str]:
    if "fits_none" in plan:
        return [*_model(plan), "none", *[DASH] * 6]
    time, top = plan["time"], plan["topology"]
    return [
        *_model(plan),
        f"`{top['name']}`",
        f"{top['devices']:,}",
        f"{text.gib(plan_figures.needed(plan))} of {text.gib(plan['memory']['hbm'])}",
        f"{time['step_seconds']:.2f} s",
        f"{time['tokens_per_second']:,.0f}",
        text.figure(time["days"]),
        f"{time['chip_days']:,.0f}",
    ]


def _not_made(card: str, plans: Plans) -> list[str]:
    """A sentence that names the plans of a card that are not recorded."""
    absent = {name: requests.REQUESTS[name] for name in requests.GROUPS[card] if name not in plans}
    if not absent:
        return []
    models = [
        f"{LABELS[wanted.model.removeprefix('mt.')]} with {_TYPES[bool(wanted.override)]}"
        for wanted in absent.values()
    ]
    return [f"Not compiled yet: {text.listed(models)}.", ""]


def bounds(plan: Plan) -> dict[str, float]:
    """The shares of a step by the keys of _BOUNDS; memory traffic is what takes longer than arithmetic."""
    work, step = plan["work"], plan["time"]["step_seconds"]
    arithmetic = sum(row["compute_seconds"] for row in work)
    talking = sum(row["seconds"] for row in plan["collectives"])
    exchange = sum(
        row["seconds"]
        for row in plan["collectives"]
        if row["kind"] == "all-to-all" and row["nodes"] > 1
    )
    seconds = {
        "arithmetic": arithmetic,
        "traffic": sum(row["seconds"] for row in work) - arithmetic,
        "exchange": exchange,
        "rest": talking - exchange,
    }
    return {key: value / step for key, value in seconds.items()}


def _bounds(plans: Plans) -> list[str]:
    """A table of the shares of a step (`bounds`) for each plan of a card, and a sentence on the largest ones."""
    timed = {name: plan for name, plan in plans.items() if measures.has_time(plan)}
    shares = {name: bounds(plan) for name, plan in timed.items()}
    head = ["share of a step", "activations", "arithmetic", "memory traffic beyond it"]
    head += ["all-to-alls between nodes", "other collectives"]
    rows = [
        [*_model(timed[name]), *(text.percent(share[key]) for key in _BOUNDS)]
        for name, share in shares.items()
    ]
    largest: dict[str, list[str]] = {}
    for name, share in shares.items():
        label, kind = _model(timed[name])
        largest.setdefault(max(share, key=lambda key: share[key]), []).append(f"{label} in {kind}")
    most = "; ".join(f"{_BOUNDS[key]} for {text.listed(of)}" for key, of in largest.items())
    return [*text.table(head, rows), f"What takes most of a step is {most}.", ""]


def _beside(plans: Plans, cards: list[str]) -> list[str]:
    """Device-days of the models on the paper's slices, on today's and on clusters."""
    models = requests.GPU_MODELS
    names = {"TPU v3, float32": [_papers(model) for model in models]}
    for generation in requests.GENERATIONS:
        head = f"TPU {generation}, bfloat16"
        names[head] = [requests.today(model, generation) for model in models]
    for card in cards:
        for bf16, kind in _TYPES.items():
            head = f"{card.upper()}, {kind}"
            names[head] = [requests.on_gpus(model, card, bf16) for model in models]
    columns = {head: [_days(plans.get(name)) for name in of] for head, of in names.items()}
    shown = {head: cells for head, cells in columns.items() if set(cells) != {DASH}}
    rows = [
        [LABELS[model], *(cells[i] for cells in shown.values())] for i, model in enumerate(models)
    ]
    return [
        "Chip-days or GPU-days for a trillion target tokens, estimated, and in parentheses how many chips or GPUs. "
        "TPU v3 is the paper's slice, all others are the smallest machine that holds the model; a dash: no plan.",
        "",
        *text.table(["model", *shown], rows),
    ]


def _papers(model: str) -> str:
    """The name of the plan for the paper's own slice."""
    names = {requests.moe(*key): name for key, name in requests.TABLE3.items()}
    return names.get(model, requests.DENSE_NAME)


def _days(plan: Plan | None) -> str:
    if plan is None or not measures.has_time(plan):
        return DASH
    return f"{plan['time']['chip_days']:,.0f} ({plan['topology']['chips']:,})"


def _on_cluster(plan: Plan) -> list[str]:
    """The section on the program for 256 H100s: how it was compiled, and the share attributed to layers."""
    took, top = plan["compile"], plan["topology"]
    outside = measures.without_layer(plan)
    parts = text.listed(
        [f"{sum(r['count'] for r in rows)} of the {part}" for part, rows in outside.items()]
    )
    return [
        f"### The program for {top['devices']} H100s",
        "",
        f"{_model(plan)[0]} on `{top['name']}`, float32: lowered in {took['lower_seconds']:.0f} s and compiled in "
        f"{took['compile_seconds']:.0f} s with {text.gib(took['host_peak_bytes'])} of the host's memory, timed on a "
        f"busy machine; it needs {text.gib(plan_figures.needed(plan))} of "
        f"{text.gib(plan['memory']['hbm'])} on each GPU. "
        f"{100 * measures.attributed(plan, 'flops'):.1f}% of the FLOPs and "
        f"{100 * measures.attributed(plan, 'bytes'):.1f}% of the bytes belong to named parts of the model. Every "
        f"collective belongs to a layer, except sums of a few scalars: {parts}.",
        "",
    ]


def _findings(plans: Plans, card: str) -> list[Finding]:
    model, out = requests.moe(2048, 36), []
    for bf16, kind in _TYPES.items():
        plan = plans.get(requests.on_gpus(model, card, bf16))
        if plan is not None and measures.has_time(plan):
            what = f"smallest {card.upper()} cluster for {LABELS[model]} in {kind}, and GPU-days for 1T tokens"
            ours = f"`{plan['topology']['name']}`, {plan['time']['chip_days']:,.0f}"
            out.append(Finding(what, DASH, ours, "estimated"))
    return out


def _compiled(plan: Plan) -> Finding:
    took = plan["compile"]
    seconds = took["lower_seconds"] + took["compile_seconds"]
    label, gpus = _model(plan)[0], plan["topology"]["devices"]
    return Finding(
        f"lowering and compiling {label} for {gpus} H100s, and the host's memory",
        DASH,
        f"{seconds:.0f} s, {text.gib(took['host_peak_bytes'])}",
        "timed",
    )
