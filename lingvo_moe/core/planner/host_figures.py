"""Derives what reports show of the hosts' memory from a plan's `host`."""

from lingvo_moe.core.console import units
from lingvo_moe.core.planner.figures import Plan

# The columns of the table of moves.
MOVES = ("move", "layer", "part", "phase", "a step", "bytes of one", "seconds", "waiting")
# Those that are estimated.
ESTIMATED = ("seconds", "waiting")


def move_rows(plan: Plan) -> list[list[str]]:
    """Returns rows of cells in the columns of MOVES, the longest first."""
    return [
        [
            row["direction"],
            *(row[key] or units.DASH for key in ("layer", "part", "phase")),
            f"{row['count']:,}",
            units.size(row["bytes"]),
            units.duration(row["seconds"]),
            units.duration(row["waiting_seconds"]),
        ]
        for row in plan["host"]["moves"]
    ]


def sentences(plan: Plan) -> list[str]:
    """Says how much memory a host needs, and how many seconds its link costs."""
    host = plan["host"]
    has = f" of {units.size(host['host_memory'])}" if host["host_memory"] else ""
    found = [
        f"Each device needs {units.size(host['needed'])} in its host's memory; a host of {host['host_devices']}"
        f" devices {units.size(host['needed_by_host'])}{has}."
    ]
    if host["host_memory"] and host["needed_by_host"] > host["host_memory"]:
        missing = units.size(host["needed_by_host"] - host["host_memory"])
        found.append(f"A host does not have that much: {missing} are missing.")
    if host["seconds"]:
        found.append(
            f"The link to the host ({units.rate(host['link_bandwidth'], 'B')} each way; {host['link_source']}) is busy "
            f"for {units.duration(host['seconds'])}, both directions added. The device waits for "
            f"{units.duration(host['waiting_seconds'])} of it, which counts in the step; "
            f"{units.share(host['hidden_seconds'] / host['seconds'])} is hidden behind other work or by the other "
            "direction."
        )
    return found
