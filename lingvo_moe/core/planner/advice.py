"""What would make a program smaller, in sentences with numbers that are computed from what it holds."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lingvo_moe.core import units

# Savings below this share of the memory are not worth a sentence.
_WORTH = 0.01


@dataclass(frozen=True)
class Held:
    """What one device holds at the peak, in bytes.

    Attributes:
        argument: by kind: weights, slots and maybe gradients, weight_copies and others.
        whole: weights and slots that every device holds whole.
        divisible: weights and slots that are cut over devices and can be cut in two once more.
        scaling: what grows with the tokens of a device: inputs (batch, caches), activations and
            temporaries.
        float32: the part of `scaling` that is in float32.
    """

    argument: Mapping[str, int]
    whole: int
    divisible: int
    scaling: int
    float32: int = 0


def advise(held: Held, needed: int, hbm: int) -> list[str]:
    """Sentences, the largest saving first; of a program that does not fit each says whether it would.

    Args:
        held: what there is to save from.
        needed: bytes of the whole program on a device.
        hbm: bytes that there are.
    """
    found = [s for s in (_bfloat16(held), *_sharding(held)) if s[0] >= _WORTH * hbm]
    missing = needed - hbm
    tokens = _tokens(held, missing)
    if tokens:
        found.append(tokens)
    found.sort(key=lambda item: -item[0])
    if missing <= 0:
        return [text for _, text in found]
    return [
        text if item == tokens else f"{text} {_verdict(saving, missing)}"
        for item in found
        for saving, text in (item,)
    ]


def _verdict(saving: int, missing: int) -> str:
    if saving >= missing:
        return f"That is enough: {units.size(missing)} are missing."
    return f"That alone is not enough: {units.size(missing - saving)} would still be missing."


def _bfloat16(held: Held) -> tuple[int, str]:
    saving = held.float32 // 2
    return saving, (
        f"Activations in bfloat16 throughout would take up to {units.size(saving)} less: at the peak "
        f"{units.size(held.float32)} of them are float32."
    )


def _tokens(held: Held, missing: int) -> tuple[int, str] | None:
    """Fewer tokens on a device."""
    if held.scaling <= 0:
        return None
    if missing <= 0:
        saving = held.scaling // 2
        text = f"Half the tokens a device would take about {units.size(saving)} less."
        return saving, text
    if missing >= held.scaling:
        return held.scaling, (
            f"Fewer tokens a device cannot make it fit: all that grows with them is "
            f"{units.size(held.scaling)}, and {units.size(missing)} are missing."
        )
    share = 1 - missing / held.scaling
    return missing, (
        f"{math.floor(100 * share)}% of the tokens a device would fit, if what grows with them "
        f"({units.size(held.scaling)}) shrinks in proportion."
    )


def _sharding(held: Held) -> list[tuple[int, str]]:
    """Weights over more devices, or cut where they are whole."""
    stored = held.argument["weights"] + held.argument["slots"]
    if not stored:
        return []
    # Gradients and copies of weights are cut as the weights are.
    derived = held.argument.get("gradients", 0) + held.argument.get("weight_copies", 0)
    cut, whole = held.divisible, held.whole
    factor = 1 + derived / stored
    with_all = " with their slots, gradients and copies" if derived else " with their slots"
    return [
        (
            round(cut * factor / 2),
            f"Twice the devices for the same weights would take {units.size(round(cut * factor / 2))} "
            f"less: the weights that are cut over devices{with_all} halve.",
        ),
        (
            round(whole * factor / 2),
            f"Cutting in two the weights that every device holds whole ({units.size(whole)} with their "
            f"slots) would take about {units.size(round(whole * factor / 2))} less.",
        ),
    ]
