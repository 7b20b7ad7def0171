"""Lists the machines of a TPU generation or a GPU card, smallest first, so that a model can be tried on each."""

from collections.abc import Iterator

from lingvo_moe.analysis.plans.machines.base_machine import PlanError
from lingvo_moe.analysis.plans.machines.gpu_cluster import CARDS
from lingvo_moe.analysis.plans.machines.topology import CHIPS
from lingvo_moe.core.config.checks import did_you_mean

_MOST_NODES = 512


def machines(kind: str) -> Iterator[str]:
    """Yields topology names of a generation or a card, smallest first.

    Raises:
        PlanError: no such generation or card.
    """
    kind = kind.strip().lower()
    if kind in CARDS:
        return clusters(kind)
    if kind in CHIPS:
        return slices(kind)
    raise PlanError(
        f"--topology={kind}: no TPU generation and no GPU{did_you_mean(kind, [*CHIPS, *CARDS])}; name a machine, "
        "e.g. v3:32x32 or h100:32x8, or a generation or a GPU alone for the smallest one that fits"
    )


def clusters(card: str) -> Iterator[str]:
    """Yields topology names from one GPU up; each has twice the GPUs of the one before, in full nodes from two on."""
    sizes = CARDS[card].node_sizes
    for gpus in sizes:
        yield f"{card}:1x{gpus}"
    nodes = 2
    while nodes <= _MOST_NODES:
        yield f"{card}:{nodes}x{sizes[-1]}"
        nodes *= 2


def slices(generation: str) -> Iterator[str]:
    """Yields topology names from 2x2 chips up; each has twice the chips of the one before.

    Shapes are as close to square (or to a cube) as the generation allows.
    """
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
