"""Derives what reports show of the training state from a plan's `state`."""

from lingvo_moe.core import units
from lingvo_moe.core.planner.figures import Plan

# The columns of the table of its parts.
PARTS = ("part", "type", "memory", "in all", "of a device", "copies")


def part_rows(plan: Plan) -> list[list[str]]:
    """Returns rows of cells in the columns of PARTS."""
    return [
        [
            row["part"],
            row["dtype"],
            row["memory"],
            units.size(row["bytes_total"]),
            units.size(row["bytes"]),
            f"{row['copies']:,.4g}",
        ]
        for row in plan["state"]["parts"]
    ]


def sentences(plan: Plan) -> list[str]:
    """What each level of train.shard_state would hold on a device; for a plan that does not fit, whether it would."""
    state, memory = plan["state"], plan["memory"]
    held = {row["shard_state"]: row["bytes"] for row in state["levels"]}
    now = state["shard_state"]
    parts = [f"{units.size(n)} with {level}" for level, n in held.items() if level != now]
    found = [f"train.shard_state={now} holds {units.size(held[now])}; {', '.join(parts)}."]
    missing = memory.get("misses_by") or 0
    if memory.get("fits") or not missing:
        return found
    enough = [level for level, n in held.items() if held[now] - n >= missing]
    if enough:
        found.append(
            f"train.shard_state={enough[0]} would make it fit, by these bytes: {units.size(missing)} are missing."
        )
    else:
        found.append(f"No train.shard_state makes it fit: {units.size(missing)} are missing.")
    offloads = {row["offload"]: held[now] - row["bytes"] for row in state.get("offloads") or ()}
    freeing = [name for name, freed in offloads.items() if freed >= missing]
    if freeing:
        freed = units.size(offloads[freeing[0]])
        found.append(
            f"train.offload={freeing[0]} would make it fit, by these bytes: it moves {freed} to the hosts, but for "
            "those of a layer or two."
        )
    return found
