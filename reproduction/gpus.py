"""The page's tables of GPU clusters: the paper's models on the smallest ones, beside the TPU slices."""

import itertools

from lingvo_moe.analysis.plans.machines.gpu_cluster import CARDS

from . import measures, paper, requests, text
from .measures import Plan, Plans
from .text import DASH, Finding

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


def cards_table() -> str:
    """The figures of data sheets that the estimates take."""
    shown = [CARDS[card] for card in requests.CARDS]
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


def model(plan: Plan) -> tuple[str, str]:
    """The paper's name of the model, and the type of its activations."""
    return LABELS[plan["model"].removeprefix("mt.")], _TYPES[bool(plan["override"])]


def _recorded(plans: Plans, card: str) -> list[Plan]:
    return [plans[name] for name in requests.GROUPS[card]]


def smallest(plans: Plans, card: str) -> str:
    """A table of the smallest clusters of a card."""
    head = ["model", "activations", "cluster", "GPUs", "memory of a GPU", "step", "tokens/s"]
    rows = [[*model(plan), *measures.machine_cells(plan)] for plan in _recorded(plans, card)]
    return text.table([*head, "days", "GPU-days"], rows)


def bounds(plan: Plan) -> dict[str, float]:
    """The shares of a step without overlap, at the machine's rates, by the keys of _BOUNDS.

    Memory traffic is what takes longer than arithmetic.
    """
    work = plan["work"]
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
    in_all = sum(seconds.values())
    return {key: value / in_all for key, value in seconds.items()}


def bounds_table(plans: Plans, card: str) -> str:
    """A table of the shares of a step (`bounds`) for each plan of a card."""
    head = ["share of a step", "activations", "arithmetic", "memory traffic beyond it"]
    head += ["all-to-alls between nodes", "other collectives"]
    rows = [
        [*model(plan), *map(text.percent, bounds(plan).values())] for plan in _recorded(plans, card)
    ]
    return text.table(head, rows)


def largest_bounds(plans: Plans, card: str) -> list[str]:
    """Returns the largest share of a step, in words, with the models whose largest it is."""
    largest: dict[str, list[str]] = {}
    for plan in _recorded(plans, card):
        share = bounds(plan)
        most = max(share, key=lambda key: share[key])
        largest.setdefault(most, []).append(" in ".join(model(plan)))
    return [f"{_BOUNDS[key]} for {text.listed(models)}" for key, models in largest.items()]


def beside(plans: Plans) -> str:
    """Device-days of the models on the paper's slices, on today's and on clusters."""
    models = requests.GPU_MODELS
    papers = {requests.moe(*key): name for key, name in requests.TABLE3.items()}
    names = {"TPU v3, float32": [papers.get(one, requests.DENSE_NAME) for one in models]}
    for generation in requests.GENERATIONS:
        head = f"TPU {generation}, bfloat16"
        names[head] = [requests.today(generation) if one == requests.BIG else "" for one in models]
    for card in requests.CARDS:
        for bf16, kind in _TYPES.items():
            head = f"{card.upper()}, {kind}"
            names[head] = [requests.on_gpus(one, card, bf16) for one in models]
    columns = {head: [_days(plans.get(name)) for name in row] for head, row in names.items()}
    rows = [[LABELS[one], *cells] for one, cells in zip(models, zip(*columns.values()))]
    return text.table(["model", *columns], rows)


def _days(plan: Plan | None) -> str:
    if plan is None or not measures.has_time(plan):
        return DASH
    return f"{plan['time']['chip_days']:,.0f} ({plan['topology']['chips']:,})"


def outside_layers(plan: Plan) -> list[str]:
    """The collectives that belong to no layer, counted by part."""
    outside = measures.without_layer(plan)
    return [f"{sum(row['count'] for row in rows)} of the {part}" for part, rows in outside.items()]


def findings(plans: Plans) -> list[Finding]:
    """The rows of the summary of clusters."""
    out = []
    for card, (bf16, kind) in itertools.product(requests.CARDS, _TYPES.items()):
        plan = plans[requests.on_gpus(requests.BIG, card, bf16)]
        smallest = f"smallest {card.upper()} cluster for {model(plan)[0]} in {kind}"
        what = f"{smallest}, and GPU-days for 1T tokens"
        out.append(Finding(what, DASH, measures.machine_and_days(plan), "estimated"))
    plan = plans[requests.ON_CLUSTER]
    gpus = plan["topology"]["devices"]
    what = f"lowering and compiling {model(plan)[0]} for {gpus} H100s, and the host's memory"
    return [*out, Finding(what, DASH, measures.made_in(plan["compile"]), "timed")]
