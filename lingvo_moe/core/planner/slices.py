"""Lists the slices of a TPU generation, smallest first, so that a model can be tried on each."""

from collections.abc import Iterator

from lingvo_moe.core.planner.errors import PlanError
from lingvo_moe.core.planner.topology import CHIPS
from lingvo_moe.core.suggest import did_you_mean


def slices(generation: str) -> Iterator[str]:
    """Yields topology names from 2x2 chips up; each has twice the chips of the one before.

    Shapes are as close to square (or to a cube) as the generation allows.

    Args:
        generation: a key of `CHIPS`, e.g. 'v3'.

    Raises:
        PlanError: no such generation.
    """
    if generation not in CHIPS:
        raise PlanError(
            f"--topology={generation}: no TPU generation{did_you_mean(generation, CHIPS)}; name a slice, "
            "e.g. v3:32x32, or a generation alone for the smallest slice that fits"
        )
    most = CHIPS[generation].max_dims
    dims = [2, 2, *[1] * (len(most) - 2)]
    while True:
        yield f"{generation}:{'x'.join(map(str, dims))}"
        free = [i for i, size in enumerate(dims) if 2 * size <= most[i]]
        if not free:
            return
        # Doubles the smallest dimension, the last one of equals: 2x2x2, 2x2x4, 2x4x4, 4x4x4.
        grown = min(free, key=lambda i: (dims[i], -i))
        dims[grown] *= 2
