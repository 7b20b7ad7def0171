"""Says what would make a planned step fit, or its machine be used better."""

from lingvo_moe.core import units
from lingvo_moe.core.planner import figures
from lingvo_moe.core.planner.figures import Plan
from lingvo_moe.core.planner.prices import kind_of

_TIGHT = 0.8  # of the memory; below, what would save memory helps nobody
_FAR_TOO_LARGE = 4  # times the devices that memory asks for
_LOW_UTILISATION = 0.2
_MUCH = 0.25  # of a step or of a stage's time


def suggestions(plan: Plan) -> list[str]:
    """Sentences for a report, the most useful first.

    A program that does not fit, or hardly, gets the plan's `memory.advice`. With memory to spare the machine may be
    that is far too large, and a training step of which figures make it slow.
    """
    memory = plan["memory"]
    if not memory.get("fits"):
        return list(memory.get("advice") or ())
    found = [*_too_large(plan)]
    if plan["what"] == "train" and plan.get("time"):
        slow = [*_network(plan), *_idle_stages(plan), *_hosts(plan)]
        found += [*_low_utilisation(plan), *slow, *([_search(plan)] if slow else [])]
    if figures.needed(plan) >= _TIGHT * memory["hbm"]:
        found += memory.get("advice") or ()
    return found


def _too_large(plan: Plan) -> list[str]:
    needed, hbm = figures.needed(plan), plan["memory"]["hbm"]
    times = min(hbm // max(needed, 1), figures.get(plan, "topology.devices") or 1)
    if times < _FAR_TOO_LARGE:
        return []
    # What a device holds of the same batch grows at most as the devices become fewer.
    return [
        f"The machine is large for this model: by memory alone, one device in {times:,} would do (a device needs "
        f"{units.size(needed)} of {units.size(hbm)}). --topology={kind_of(plan)} looks for the smallest that fits."
    ]


def _low_utilisation(plan: Plan) -> list[str]:
    utilisation = plan["time"]["utilization"]
    if utilisation >= _LOW_UTILISATION:
        return []
    each = list(plan["batch"].values())[-1] / plan["topology"]["devices"]
    arithmetic = sum(row["compute_seconds"] for row in plan["work"])
    return [
        f"Utilisation is {units.share(utilisation)}: a device gets {units.number(each)} {figures.unit(plan)} a step, "
        f"and its arithmetic would take {units.duration(arithmetic)} of {units.duration(plan['time']['step_seconds'])}"
        f". More {figures.unit(plan)} a device (input.batch_size), or fewer devices, raise it."
    ]


def _network(plan: Plan) -> list[str]:
    share = figures.collective_share(plan) or 0.0
    if share < _MUCH:
        return []
    kind, count, held, seconds = figures.collective_totals(plan)[0]
    return [
        f"The network takes {units.share(share)} of a step, most of it {count:,} {kind} of {units.size(held)} "
        f"({units.duration(seconds)})."
    ]


def _idle_stages(plan: Plan) -> list[str]:
    idle = figures.bubble(plan) or 0.0
    if idle < _MUCH:
        return []
    return [
        f"The stages of pipelines are idle for {units.share(idle)} of their time: more micro-batches "
        "(task.pipeline.micro_batches) or another task.pipeline.schedule shorten that."
    ]


def _hosts(plan: Plan) -> list[str]:
    share = (plan["time"].get("host_seconds") or 0.0) / plan["time"]["step_seconds"]
    if share < _MUCH:
        return []
    return [f"Devices wait for their hosts' memory for {units.share(share)} of a step."]


def _search(plan: Plan) -> str:
    override = f" --model_params_override='{plan['override']}'" if plan.get("override") else ""
    return (
        f"tools.parallelize --model={plan['model']}{override} --topology={figures.get(plan, 'topology.name')} searches "
        "for a faster layout."
    )
