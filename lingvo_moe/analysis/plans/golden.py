"""Compares a new plan with a recorded one and names the differences by layer.

A golden (recorded) plan fixes facts about a compiled program: which collectives each layer has, how
many bytes they carry, how much arithmetic each part does, and how much memory a device needs. Times
and compile figures are not compared: they follow from those facts, or vary with the host.
"""

from typing import Any

# A new compiler version may move an operation or a buffer; a lost sharding changes far more.
FLOPS_TOLERANCE = 0.02
MEMORY_TOLERANCE = 0.05


def differences(golden: dict[str, Any], plan: dict[str, Any]) -> list[str]:
    """Returns one sentence for each difference, the most informative first; empty if there is none."""
    out = _identity(golden, plan)
    if golden["memory"]["fits"] != plan["memory"]["fits"]:
        fits = "the program fits; the recorded one does not"
        misfits = "the program does not fit; the recorded one does"
        out.append(fits if plan["memory"]["fits"] else misfits)
    out += _collectives(golden["collectives"], plan["collectives"])
    out += _work(golden["work"], plan["work"])
    return out + _memory(golden["memory"], plan["memory"])


def _identity(golden: dict[str, Any], plan: dict[str, Any]) -> list[str]:
    out = []
    for key in ("model", "override", "what", "mesh"):
        if golden[key] != plan[key]:
            out.append(f"{key} is {plan[key]!r}, was {golden[key]!r}")
    for key in ("count", "bytes_total", "bytes", "slot_bytes"):
        was, new = golden["parameters"][key], plan["parameters"][key]
        if was != new:
            out.append(f"parameters.{key} is {new:,}, was {was:,}")
    return out


def _collectives(golden: list[dict[str, Any]], plan: list[dict[str, Any]]) -> list[str]:
    """Compares counts and total bytes a step by layer, part, phase and kind of collective."""
    was, new = _communication(golden), _communication(plan)
    out = []
    for key in sorted(was.keys() | new.keys()):
        (old_count, old_bytes), (count, num_bytes) = was.get(key, (0, 0)), new.get(key, (0, 0))
        layer, part, phase, kind = key
        where = f"{layer or 'outside of layers'}, {part}, {phase}"
        if count != old_count:
            out.append(f"{where}: {count} {kind} a step, were {old_count}")
        elif abs(num_bytes - old_bytes) > FLOPS_TOLERANCE * old_bytes:
            out.append(f"{where}: {kind} carries {num_bytes:,} bytes a step, were {old_bytes:,}")
    return out


def _communication(rows: list[dict[str, Any]]) -> dict[tuple[str, ...], tuple[int, int]]:
    table: dict[tuple[str, ...], tuple[int, int]] = {}
    for row in rows:
        key = (row["layer"], row["part"], row["phase"], row["kind"])
        count, num_bytes = table.get(key, (0, 0))
        table[key] = (count + row["count"], num_bytes + row["count"] * row["bytes"])
    return table


def _work(golden: list[dict[str, Any]], plan: list[dict[str, Any]]) -> list[str]:
    """Compares FLOPs by part and phase; where the partitioner replicates a part, its FLOPs multiply."""
    was = {(row["part"], row["phase"]): row["flops"] for row in golden}
    new = {(row["part"], row["phase"]): row["flops"] for row in plan}
    floor = FLOPS_TOLERANCE * max([*was.values(), 1])  # below it, a part is too small to judge
    return [
        f"{part}, {phase}: {new.get((part, phase), 0):.4g} FLOPs a device, were {old:.4g}"
        for (part, phase), old in sorted({**dict.fromkeys(new, 0), **was}.items())
        if abs(new.get((part, phase), 0) - old) > max(FLOPS_TOLERANCE * old, 0.01 * floor)
    ]


def _memory(golden: dict[str, Any], plan: dict[str, Any]) -> list[str]:
    out = []
    for key in ("arguments", "peak"):
        was, new = golden.get(key), plan.get(key)
        if was is None or new is None:
            continue
        if abs(new - was) > MEMORY_TOLERANCE * was:
            out.append(
                f"memory.{key} is {new:,} bytes a device, was {was:,}{_holder(golden, plan)}"
            )
    return out


def _holder(golden: dict[str, Any], plan: dict[str, Any]) -> str:
    """Names the layer whose memory at the peak changed most."""

    def held(memory: dict[str, Any]) -> dict[tuple[str, str], int]:
        table: dict[tuple[str, str], int] = {}
        for row in memory.get("holders", []):
            key = (row["layer"], row["part"])
            table[key] = table.get(key, 0) + row["bytes"]
        return table

    was, new = held(golden), held(plan)
    if not was or not new:
        return ""
    change = {key: new.get(key, 0) - was.get(key, 0) for key in was.keys() | new.keys()}
    layer, part = max(change, key=lambda key: abs(change[key]))
    return f"; most of it in {layer or 'no layer'}, {part}: {change[layer, part]:+,} bytes"
