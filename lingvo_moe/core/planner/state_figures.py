"""Derives what reports show of the training state from a plan's `state`."""

from lingvo_moe.core.console import units
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
    """Says how many bytes a device would hold with each level of train.shard_state, and each train.offload."""
    state = plan["state"]
    held = {row["shard_state"]: row["bytes"] for row in state["levels"]}
    now = state["shard_state"]
    parts = [f"{units.size(n)} with {level}" for level, n in held.items() if level != now]
    found = [f"train.shard_state={now} holds {units.size(held[now])}; {', '.join(parts)}."]
    offloads = [
        f"{units.size(row['bytes'])} with {row['offload']}" for row in state.get("offloads", ())
    ]
    if offloads:
        found.append(f"With train.offload a device holds {', '.join(offloads)}.")
    return found
