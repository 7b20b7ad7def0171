"""What a new plan does differently from a recorded one, said by layer.

A golden plan is a promise about a compiled program: which collectives each layer has, how many bytes
they carry, how much arithmetic each part does, what a device must hold. Times and compile figures
are not compared: they follow from these, or are a machine's noise.
"""

from typing import Any

# A compiler's new version may move an operation or a buffer; a sharding that does nothing moves far more.
FLOPS_TOLERANCE = 0.02
MEMORY_TOLERANCE = 0.05


def differences(golden: dict[str, Any], plan: dict[str, Any]) -> list[str]:
    """A sentence for each difference, the most telling first; empty where the promise is kept."""
    out = _identity(golden, plan)
    if golden["memory"]["fits"] != plan["memory"]["fits"]:
        now = "fits" if plan["memory"]["fits"] else "does not fit"
        out.append(f"the program {now}, unlike before")
    out += _collectives(golden["collectives"], plan["collectives"])
    out += _work(golden["work"], plan["work"])
    return out + _memory(golden["memory"], plan["memory"])


def _identity(golden: dict[str, Any], plan: dict[str, Any]) -> list[str]:
    out = []
    for key in ("model", "override", "what", "mesh"):
        if golden[key] != plan[key]:
            out.append(f"{key} is {plan[key]!r}, was {golden[key]!r}")
    for key in ("count", "bytes_total", "bytes", "slot_bytes"):
        was, now = golden["parameters"][key], plan["parameters"][key]
        if was != now:
            out.append(f"parameters.{key} is {now:,}, was {was:,}")
    return out


def _collectives(golden: list[dict[str, Any]], plan: list[dict[str, Any]]) -> list[str]:
    """By layer, part, phase and kind: how many a step, and the bytes of all."""
    was, now = _communication(golden), _communication(plan)
    out = []
    for key in sorted(was.keys() | now.keys()):
        (old_count, old_bytes), (count, num_bytes) = was.get(key, (0, 0)), now.get(key, (0, 0))
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
    """Arithmetic by part and phase: a part that the partitioner replicates multiplies its own."""
    was = {(row["part"], row["phase"]): row["flops"] for row in golden}
    now = {(row["part"], row["phase"]): row["flops"] for row in plan}
    floor = FLOPS_TOLERANCE * max([*was.values(), 1])  # below it, a part is too small to judge
    return [
        f"{part}, {phase}: {now.get((part, phase), 0):.4g} FLOPs a device, were {old:.4g}"
        for (part, phase), old in sorted({**dict.fromkeys(now, 0), **was}.items())
        if abs(now.get((part, phase), 0) - old) > max(FLOPS_TOLERANCE * old, 0.01 * floor)
    ]


def _memory(golden: dict[str, Any], plan: dict[str, Any]) -> list[str]:
    out = []
    for key in ("arguments", "peak"):
        was, now = golden.get(key), plan.get(key)
        if was is None or now is None:
            continue
        if abs(now - was) > MEMORY_TOLERANCE * was:
            out.append(
                f"memory.{key} is {now:,} bytes a device, was {was:,}{_holder(golden, plan)}"
            )
    return out


def _holder(golden: dict[str, Any], plan: dict[str, Any]) -> str:
    """The layer whose share of the peak changed most."""

    def held(memory: dict[str, Any]) -> dict[tuple[str, str], int]:
        table: dict[tuple[str, str], int] = {}
        for row in memory.get("holders", []):
            key = (row["layer"], row["part"])
            table[key] = table.get(key, 0) + row["bytes"]
        return table

    was, now = held(golden), held(plan)
    if not was or not now:
        return ""
    change = {key: now.get(key, 0) - was.get(key, 0) for key in was.keys() | now.keys()}
    layer, part = max(change, key=lambda key: abs(change[key]))
    return f"; most of it in {layer or 'no layer'}, {part}: {change[layer, part]:+,} bytes"
