"""Layouts by name: how a model with letters of these sizes lies on a number of devices.

* fsdp: rows over all devices. Each stores a part of every weight, and gathers those of a layer when it needs them.
* tp: heads, hidden units and, if it divides, the vocabulary over at most 8 neighbouring devices; rows over the others,
  of which each stores a part of every weight.
* fsdp+expert: rows over all devices, experts over about the square root of them; all other weights as fsdp.

All compute blocks of layers again in the backward pass. Each is one candidate of a search (space.py).
"""

from collections.abc import Callable, Mapping

from lingvo_moe.analysis.search.strategies.candidate import Candidate
from lingvo_moe.analysis.search.strategies.mesh_layout import (
    EXPERT,
    MODEL,
    divides,
    divisors,
    layout_of,
)
from lingvo_moe.analysis.search.strategies.strategy_file import StrategyError
from lingvo_moe.core.pipeline.schedule import DATA
from lingvo_moe.core.sharding.letters import NONE, WEIGHTS

NODE = 8  # the most devices of axis `model`, as many as share a host
Sizes = Mapping[str, set[int]]
# The sizes of mesh axes, and the letters that axis `model` shards; None where the model does not divide so.
_Found = tuple[dict[str, int], str] | None


def _fsdp(sizes: Sizes, count: int) -> _Found:
    return {DATA: count}, ""


def _tp(sizes: Sizes, count: int) -> _Found:
    fit = [n for n in divisors(count) if 1 < n <= NODE and divides(n, sizes, "NAH")]
    if not fit:
        return None
    letters = "NAHV" if divides(fit[-1], sizes, "V") else "NAH"
    return {DATA: count // fit[-1], MODEL: fit[-1]}, "".join(n for n in letters if n in sizes)


def _fsdp_expert(sizes: Sizes, count: int) -> _Found:
    fit = [n for n in divisors(count) if n > 1 and n * n <= 2 * count and divides(n, sizes, "E")]
    return ({DATA: count // fit[-1], EXPERT: fit[-1]}, "") if fit and "E" in sizes else None


# By name, in the order of strategy_file.LAYOUTS.
FUNCTIONS: Mapping[str, Callable[[Sizes, int], _Found]] = {
    "fsdp": _fsdp,
    "tp": _tp,
    "fsdp+expert": _fsdp_expert,
}


def named_layout(name: str, sizes: Sizes, count: int) -> Candidate:
    """The layout of that name over `count` devices.

    Args:
        sizes: those that the dimensions of each letter have.

    Raises:
        StrategyError: the model does not divide so.
    """
    axes = FUNCTIONS[name](sizes, count)
    if axes is None:
        what = "experts" if name == "fsdp+expert" else "heads and hidden units"
        raise StrategyError(
            f"--layout={name}: {count} devices have no divisor that divides this model's {what}"
        )
    layout = layout_of(
        {name: axes[0].get(name, 1) for name in (DATA, EXPERT, MODEL)}, axes[1], "E" in sizes
    )
    return Candidate(layout, WEIGHTS if count > 1 else NONE)
