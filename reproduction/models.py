"""The page's figures of single models: parameters, speed and cost, making plans, TPU slices and GPU clusters."""

from collections.abc import Iterator, Mapping
from typing import Any

from lingvo_moe.core.console import units

from . import measures, paper, requests, text
from .measures import Plan, Plans

LABELS = {requests.moe(*key): row.label for key, row in paper.MOE.items()} | {
    requests.DENSE: paper.DENSE.label
}
_TYPES = {False: "float32", True: "bfloat16"}


def tpus(plans: Plans) -> dict[str, Mapping[str, Any]]:
    """The topology of a plan for each TPU generation."""
    shown: dict[str, Mapping[str, Any]] = {}
    for plan in plans.values():
        if "clock_hz" in plan["topology"]:  # no cluster, and not a record that no slice fits
            shown.setdefault(plan["topology"]["generation"], plan["topology"])
    return dict(sorted(shown.items()))


def compilers(plans: Plans) -> list[str]:
    built = [plan["compiler"] for plan in plans.values() if "compiler" in plan]
    return sorted({text.listed([f"{k} {version}" for k, version in one.items()]) for one in built})


def paper_rows() -> dict[str, paper.PaperRow]:
    """The paper's rows by the name of our plan, the largest first."""
    rows = {requests.TABLE3[key]: row for key, row in paper.MOE.items()}
    return rows | {requests.DENSE_NAME: paper.DENSE}


def apart(plan: Plan, row: paper.PaperRow) -> float:
    """The relative difference of a plan's number of parameters from the paper's."""
    return float(plan["parameters"]["count"] / row.parameters - 1)


def furthest(plans: Plans) -> float:
    """The largest relative difference of a number of parameters from the paper's."""
    return max((apart(plans[name], row) for name, row in paper_rows().items()), key=abs)


def speed_rows(plans: Plans) -> list[tuple[paper.PaperRow, Plan, str]]:
    """The rows of table 3: the paper's, our plan, and what to note about it."""
    rows = [(row, plans[name], "") for name, row in paper_rows().items()]
    bf16 = plans[requests.weak(2048, 60, bf16=True)]
    rows.insert(1, (paper.MOE[2048, 60], bf16, ", bfloat16 activations"))
    return [*rows, (paper.DENSE, plans[requests.PIPELINED_NAME], ", in a pipeline")]


def own_tokens() -> list[float]:
    """The trillions of tokens that follow from the paper's own columns, a number for each row that has all of them."""
    return [
        row.steps_per_second * row.batch_tokens * 2**20 * row.days * 86400 / 1e12
        for row in paper.MOE.values()
        if row.steps_per_second and row.days
    ]


def ratios(plans: Plans) -> dict[str, list[str]]:
    """The models that are 'faster' here than in the paper, 'slower', and about the 'same'."""
    by_model = {
        row.label: plans[name]["time"]["steps_per_second"] / row.steps_per_second
        for name, row in paper_rows().items()
        if row.steps_per_second and plans[name].get("time")
    }
    out = {
        key: [f"{m} {r**sign:.2f} times" for m, r in by_model.items() if r**sign > measures.RATIO]
        for key, sign in (("faster", 1), ("slower", -1))
    }
    same = [m for m, r in by_model.items() if measures.times_apart(r) <= measures.RATIO]
    return out | {"same": same}


def verdict(plans: Plans, bf16: bool) -> str:
    """Whether the trillion fits, and how."""
    plan = plans[requests.weak(2048, 60, bf16)]
    if measures.fits(plan):
        return f"fits, with {measures.held(plan)}"
    return f"does not fit: it misses by {units.size(plan['memory']['misses_by'], 1)}"


def compiled(plans: Plans) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the names of the largest plans, and the figures of compiling them."""
    yield paper.MOE[2048, 36].label, plans[requests.real(2048, 36)]["compile"]
    yield paper.MOE[2048, 60].label, plans[requests.weak(2048, 60)]["compile"]
    bf16 = plans[requests.weak(2048, 60, bf16=True)]["compile"]
    yield f"{paper.MOE[2048, 60].label}, bfloat16", bf16


def named(plan: Plan) -> tuple[str, str]:
    """The paper's name of the model of a plan for GPUs, and the type of its activations."""
    return LABELS[plan["model"].removeprefix("mt.")], _TYPES[bool(plan["override"])]


def bounds(plan: Plan) -> dict[str, float]:
    """The shares of a step on GPUs without overlap, at the machine's rates, by what takes them.

    Memory traffic is what takes longer than arithmetic.
    """
    work, collectives = plan["work"], plan["collectives"]
    arithmetic = sum(row["compute_seconds"] for row in work)
    talking = sum(row["seconds"] for row in collectives)
    exchange = sum(
        row["seconds"] for row in collectives if row["kind"] == "all-to-all" and row["nodes"] > 1
    )
    seconds = {
        "arithmetic": arithmetic,
        "memory traffic": sum(row["seconds"] for row in work) - arithmetic,
        "all-to-alls between nodes": exchange,
        "other collectives": talking - exchange,
    }
    in_all = sum(seconds.values())
    return {key: value / in_all for key, value in seconds.items()}


def largest_bounds(plans: Plans, card: str) -> list[str]:
    """Returns the largest share of a step, in words, with the models whose largest it is."""
    largest: dict[str, list[str]] = {}
    for plan in (plans[name] for name in requests.GROUPS[card]):
        share = bounds(plan)
        most = max(share, key=lambda key: share[key])
        largest.setdefault(most, []).append(" in ".join(named(plan)))
    return [f"{most} for {text.listed(models)}" for most, models in largest.items()]


def on_machines() -> dict[str, dict[str, str]]:
    """The plans of each model by machine and type of activations: on the paper's slices, on today's and on clusters."""
    models = requests.GPU_MODELS
    papers = {requests.moe(*key): name for key, name in requests.TABLE3.items()}
    names = {"TPU v3, float32": {one: papers.get(one, requests.DENSE_NAME) for one in models}}
    for generation in requests.GENERATIONS:
        names[f"TPU {generation}, bfloat16"] = {requests.BIG: requests.today(generation)}
    for card in requests.CARDS:
        for bf16, kind in _TYPES.items():
            head = f"{card.upper()}, {kind}"
            names[head] = {one: requests.on_gpus(one, card, bf16) for one in models}
    return names


def outside_layers(plan: Plan) -> list[str]:
    """The collectives that belong to no layer, counted by part."""
    outside = measures.without_layer(plan)
    return [f"{sum(row['count'] for row in rows)} of the {part}" for part, rows in outside.items()]
