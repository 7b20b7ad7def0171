"""Suggests how to make a program need less memory; each suggestion states its computed saving."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from lingvo_moe.core.console import units

# Savings below this share of the memory are not worth a sentence.
_WORTH = 0.01


@dataclass(frozen=True)
class Peak:
    """Bytes that one device holds at the peak, grouped by what could reduce them."""

    # Bytes by kind of buffer: weights, slots and, where known, gradients, weight_copies and others.
    by_kind: Mapping[str, int]
    replicated: int  # bytes of weights and slots that are replicated on every device
    divisible: int  # bytes of weights and slots that are sharded and could be sharded twice as far
    # Bytes that grow with the number of tokens a device: inputs (batch, caches), activations and temporaries.
    scaling: int
    # Bytes by kind of activations and temporaries that are float32.
    float32: Mapping[str, int] = field(default_factory=dict)


def advise(peak: Peak, needed: int, hbm: int) -> list[str]:
    """Returns suggestions as sentences, the largest saving first.

    If the program does not fit, each sentence says whether it would fit after that change alone. Of a training step,
    whose gradients shrink with the type of activations too, remedies.py says what parameters could do then.

    Args:
        peak: what the device holds at the peak.
        needed: bytes that the program needs on a device.
        hbm: HBM capacity of a device in bytes.
    """
    missing = needed - hbm
    types = [] if missing > 0 and peak.by_kind.get("gradients") else [_bfloat16(peak)]
    savings = [s for s in (*types, *_sharding(peak)) if s[0] >= _WORTH * hbm]
    tokens = _tokens(peak, missing)
    if tokens:
        savings.append(tokens)
    savings.sort(key=lambda item: -item[0])
    if missing <= 0:
        return [text for _, text in savings]
    return [
        text if (saving, text) == tokens else f"{text} {_verdict(saving, missing)}"
        for saving, text in savings
    ]


def _verdict(saving: int, missing: int) -> str:
    if saving >= missing:
        return f"That is enough: {units.size(missing)} are missing."
    return f"That alone is not enough: {units.size(missing - saving)} would still be missing."


def _bfloat16(peak: Peak) -> tuple[int, str]:
    float32 = sum(peak.float32.values())
    return float32 // 2, (
        f"Activations in bfloat16 throughout would take up to {units.size(float32 // 2)} less: at the peak "
        f"{units.size(float32)} of them are float32."
    )


def _tokens(peak: Peak, missing: int) -> tuple[int, str] | None:
    """The saving from fewer tokens a device."""
    if peak.scaling <= 0:
        return None
    if missing <= 0:
        saving = peak.scaling // 2
        text = f"Half the tokens a device would take about {units.size(saving)} less."
        return saving, text
    if missing >= peak.scaling:
        return peak.scaling, (
            f"Fewer tokens a device cannot make it fit: all that grows with them is "
            f"{units.size(peak.scaling)}, and {units.size(missing)} are missing."
        )
    share = 1 - missing / peak.scaling
    return missing, (
        f"{math.floor(100 * share)}% of the tokens a device would fit, if what grows with them "
        f"({units.size(peak.scaling)}) shrinks in proportion."
    )


def _sharding(peak: Peak) -> list[tuple[int, str]]:
    """The savings from more devices for the sharded weights, and from sharding the replicated ones."""
    stored = peak.by_kind["weights"] + peak.by_kind["slots"]
    if not stored:
        return []
    # Gradients and copies of weights are sharded like the weights.
    derived = peak.by_kind.get("gradients", 0) + peak.by_kind.get("weight_copies", 0)
    factor = 1 + derived / stored
    with_all = " with their slots, gradients and copies" if derived else " with their slots"
    half_of_sharded = round(peak.divisible * factor / 2)
    half_of_replicated = round(peak.replicated * factor / 2)
    return [
        (
            half_of_sharded,
            f"Twice the devices for the same weights would take {units.size(half_of_sharded)} less: the "
            f"sharded weights{with_all} halve.",
        ),
        (
            half_of_replicated,
            f"Sharding the replicated weights ({units.size(peak.replicated)} with their slots) in two "
            f"would take about {units.size(half_of_replicated)} less.",
        ),
    ]
