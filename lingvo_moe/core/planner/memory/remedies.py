"""Estimates which other choice of parameters would make a program fit that does not.

The state and what is gathered of it are counted from specs. The rest is scaled from what is live at the peak: see
`saved`. Nothing is compiled, so these are estimates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lingvo_moe.core.config.suggest import either
from lingvo_moe.core.console import units

# Savings below this share of the missing bytes are not worth a word.
_WORTH = 0.01


@dataclass(frozen=True)
class Choice:
    """A choice of parameters, and the bytes that one device holds with it.

    Attributes:
        changes: the parameters that differ from those of the plan, and their values. No entries: the plan's own.
        weights, slots: bytes between two steps; slots are all of the state but weights.
        gradients: bytes of all gradients.
        written: bytes of weights that are gathered after the update, and are then there beside the old ones.
        gathered: bytes of weights that are gathered while they are used.
        weight_size: bytes of a weight's element.
        narrow: whether activations are bfloat16.
        carries: bytes of the inputs of all blocks, which recomputation keeps; None where nothing else is recomputed
            than in the plan.
    """

    changes: Mapping[str, str]
    weights: int
    slots: int
    gradients: int
    written: int
    gathered: int
    weight_size: int
    narrow: bool
    carries: int | None = None


def saved(memory: Mapping[str, Any], now: Choice, other: Choice) -> int:
    """Estimates by how many bytes a device needs less with another choice; negative: more.

    * Weights and slots are those of the specs. So are gradients, as the share that is live at the peak. While weights
      are gathered after an update, the old and the new ones are there.
    * Copies of weights shrink with these. Activations of 16 bits next to weights of 32 need a copy of them.
    * float32 activations and temporaries halve with bfloat16; recomputation leaves of activations the inputs of blocks.

    Args:
        memory: the plan's `memory`.
        now: the plan's own choice.
        other: the other one.
    """
    kinds, float32 = memory["kinds"], memory.get("float32", {})
    halves = other.narrow and not now.narrow

    def left(kind: str) -> float:
        held = kinds.get(kind, 0)
        return held - (float32.get(kind, 0) / 2 if halves else 0)

    gradients = kinds.get("gradients", min(now.gradients, kinds["temporaries"]))
    ratio = max(other.gradients, other.written) / max(now.gradients, now.written, 1)
    copies = kinds.get("weight_copies", 0)
    other_copies = copies * other.weights / max(now.weights, 1)
    if halves and other.weight_size > 2:
        other_copies = max(other_copies, other.weights * 2 / other.weight_size)
    activations = left("activations")
    if other.carries is not None:
        activations = min(activations, other.carries)
    before = now.weights + now.slots + gradients + copies + now.gathered
    after = other.weights + other.slots + gradients * ratio + other_copies + other.gathered
    before += kinds.get("activations", 0) + kinds["temporaries"]
    return round(before - after - activations - left("temporaries"))


def remedies(memory: Mapping[str, Any], now: Choice, others: Sequence[Choice]) -> list[str]:
    """Sentences that say which changes make a program fit, alone or together, and the bytes of each, largest first.

    Args:
        memory: the plan's `memory`, of a program that does not fit.
        now: the plan's own choice.
        others: what the parameters allow; of combinations that are as large, the first is chosen.
    """
    missing = memory["misses_by"]
    by_choice = [(saved(memory, now, other), other) for other in others]
    alone = [item for item in by_choice if len(item[1].changes) == 1]
    less = [(n, each) for n, each in alone if n >= _WORTH * missing]
    less.sort(key=lambda item: -item[0])
    found = []
    if less:
        listed = ", ".join(f"{units.size(n)} with {_named(each)}" for n, each in less)
        found.append(f"By estimate a device would need less: {listed}.")
    enough = [_named(each) for n, each in less if n >= missing]
    if enough:
        one = "That is" if len(enough) == 1 else "Each of these is"
        return [
            *found,
            f"{either(enough)} would make it fit. {one} enough for {units.size(missing)}.",
        ]
    together = [item for item in by_choice if item[0] >= missing]
    if together:
        n, smallest = min(together, key=lambda item: len(item[1].changes))
        found.append(
            f"None of them alone makes it fit. By estimate {_named(smallest)} together do: {units.size(n)} less, and "
            f"{units.size(missing)} are missing."
        )
        return found
    names = sorted({name for _, each in by_choice for name in each.changes})
    if names:
        most = max((n for n, _ in by_choice), default=0)
        found.append(
            f"None of {', '.join(names)} makes it fit, nor do they together: by estimate "
            f"{units.size(max(most, 0))} less at most, and {units.size(missing)} are missing."
        )
    return found


def _named(choice: Choice) -> str:
    *first, last = (f"{name}={value}" for name, value in choice.changes.items())
    return f"{', '.join(first)} and {last}" if first else last
