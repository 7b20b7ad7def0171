"""Says what would make a planned step fit, or its machine be used better."""

from collections.abc import Iterator

from lingvo_moe.analysis.plans import figures
from lingvo_moe.analysis.plans.figures import Plan
from lingvo_moe.analysis.plans.prices import kind_of
from lingvo_moe.core.config import registry
from lingvo_moe.core.console import units
from lingvo_moe.core.console.command import flags_line

_TIGHT = 0.8  # of the memory; below, what would save memory helps nobody
_FAR_TOO_LARGE = 4  # times the devices that memory asks for
_LOW_UTILISATION = 0.2
_MUCH = 0.25  # of a step or of a stage's time


def suggestions(plan: Plan) -> list[str]:
    """Sentences for a report, the most useful first.

    A program that does not fit, or only just fits, gets the plan's `memory.advice`. One with memory to spare may learn
    that a smaller machine would do. A training step may learn why it is slow.
    """
    memory = plan["memory"]
    if not memory.get("fits"):
        return list(memory.get("advice") or ())
    sentences = [*_too_large(plan)]
    if plan["what"] == "train" and plan.get("time"):
        slow = list(_slow(plan))
        sentences += [*_low_utilisation(plan), *slow, *(_search(plan) if slow else [])]
    if figures.needed(plan) >= _TIGHT * memory["hbm"]:
        sentences += memory.get("advice") or ()
    return sentences


def _too_large(plan: Plan) -> list[str]:
    needed, hbm = figures.needed(plan), plan["memory"]["hbm"]
    times = min(hbm // max(needed, 1), figures.get(plan, "topology.devices") or 1)
    if times < _FAR_TOO_LARGE:
        return []
    layout, override = plan.get("layout", ""), plan.get("override") or ""
    which = {"what": plan["what"] * (plan["what"] != "train"), "layout": layout}
    flags = {"model": plan["model"], "model_params_override": override, **which}
    command = f"python -m tools.plan {flags_line(**flags, topology=kind_of(plan))}"
    # What a device holds of the same batch grows at most as the devices become fewer.
    return [
        f"The machine is large for this model: by memory alone, one device in {times:,} would do (a device needs "
        f"{units.size(needed)} of {units.size(hbm)}). `{command}` looks for the smallest that fits."
    ]


def _low_utilisation(plan: Plan) -> list[str]:
    utilisation = plan["time"]["utilization"]
    if utilisation is None or utilisation >= _LOW_UTILISATION:
        return []
    share = list(plan["batch"].values())[-1] / plan["topology"]["devices"]
    arithmetic = sum(row["compute_seconds"] for row in plan["work"])
    return [
        f"Utilisation is {units.share(utilisation)}: a device gets {units.number(share)} {figures.unit(plan)} a step, "
        f"and its arithmetic would take {units.duration(arithmetic)} of {units.duration(plan['time']['step_seconds'])}"
        f". More {figures.unit(plan)} a device (input.batch_size), or fewer devices, raise it."
    ]


def _slow(plan: Plan) -> Iterator[str]:
    """Names each cause that takes much of a step: the network, idle stages, loops, the hosts."""
    network = figures.collective_share(plan) or 0.0
    if network >= _MUCH:
        kind, count, moved, seconds = figures.collective_totals(plan)[0]
        yield (
            f"The network takes {units.share(network)} of a step, most of it {count:,} {kind} of {units.size(moved)} "
            f"({units.duration(seconds)})."
        )
    idle = figures.bubble(plan) or 0.0
    if idle >= _MUCH:
        yield (
            f"The stages of pipelines are idle for {units.share(idle)} of their time: more micro-batches "
            "(task.pipeline.micro_batches) or another task.pipeline.schedule shorten that."
        )
    turning = plan["time"].get("turning_seconds", 0.0) / plan["time"]["step_seconds"]
    if turning >= _MUCH:
        turns = sum(row.get("turns", 0) for row in plan["work"])
        yield (
            f"The GPU waits for its host at each turn of the loops over experts' rows, about {turns:,} a step, which "
            f"takes {units.share(turning)} of it: task.moe.dispatcher=index has no such loops."
        )
    hosts = (plan["time"].get("host_seconds") or 0.0) / plan["time"]["step_seconds"]
    if hosts >= _MUCH:
        yield f"Devices wait for their hosts' memory for {units.share(hosts)} of a step."


def _search(plan: Plan) -> list[str]:
    """The command of the search; none for a model of images, which has no stacks of equal blocks."""
    if figures.unit(plan) != "tokens":
        return []
    override = registry.without_strategy(plan.get("override") or "")
    topology = plan["topology"]["name"]
    flags = flags_line(model=plan["model"], model_params_override=override, topology=topology)
    return [f"`python -m tools.parallelize {flags}` searches for a faster layout."]
