"""What a compiled program costs on the machine of a search, to check the search's own costs."""

from lingvo_moe.core.auto_shard.machine import MeshMachine
from lingvo_moe.core.hlo.module import parse_module
from lingvo_moe.core.planner.costs import costs


def compiled_seconds(text: str, on: MeshMachine) -> float:
    """Seconds of one device: its products and memory traffic, and its collectives.

    Args:
        text: of the compiled module.
        on: the machine.
    """
    total = 0.0
    for cost in costs(parse_module(text)):
        total += cost.times * on.Computing(cost.flops, cost.bytes if not cost.collective else 0)
        if cost.collective is not None:
            use = cost.collective
            total += cost.times * on.SecondsAmong(use.kind, use.bytes, use.participants)
    return total
