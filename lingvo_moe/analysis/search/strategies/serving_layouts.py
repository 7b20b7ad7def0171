"""Layouts for serving, by name: each device holds its part of the weights, and none is gathered from others.

* ep: experts over all devices, and rows, whose caches lie with them; other weights on each. dp: so without experts.
* tp: heads, hidden units and, if it divides, the vocabulary over at most 8 neighbouring devices; rows over the others.
* ep+tp: as tp, but experts over all devices, to which tokens go from where their rows are.
"""

from dataclasses import replace

from lingvo_moe.analysis.search.strategies.candidate import Candidate
from lingvo_moe.analysis.search.strategies.mesh_layout import (
    EXPERT,
    MODEL,
    divides,
    divisors,
    layout_of,
)
from lingvo_moe.analysis.search.strategies.named_layouts import NODE, Sizes
from lingvo_moe.core.pipeline.schedule import DATA


def serving_layouts(sizes: Sizes, count: int) -> dict[str, Candidate]:
    """The layouts over `count` devices over which a model divides, by name.

    Args:
        sizes: those that the dimensions of each letter have.
    """
    experts, numbers = "E" in sizes, divisors(count)
    owners = max(n for n in numbers if divides(n, sizes, "E")) if experts else 1
    rows = {DATA: count // owners, EXPERT: owners, MODEL: 1}
    layouts = {"ep" if experts else "dp": layout_of(rows, "", experts)}
    inside = max(n for n in numbers if n <= NODE and divides(n, sizes, "NH"))
    if inside > 1:
        letters = "".join(n for n in "NHAV" if n in sizes and divides(inside, sizes, n))
        rows = {DATA: count // inside, EXPERT: 1, MODEL: inside}
        tp = layouts["tp"] = layout_of(rows, letters, experts)
        if experts and owners == count:
            both = dict.fromkeys("GE", tp.mesh.axis_names)
            layouts["ep+tp"] = replace(
                tp,
                activations=tuple({**dict(tp.activations), **both}.items()),
                weights=tuple({**dict(tp.weights), "E": tp.mesh.axis_names}.items()),
            )
    return {name: Candidate(layout) for name, layout in layouts.items()}
