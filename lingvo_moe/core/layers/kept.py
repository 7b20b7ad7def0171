"""The values of `task.remat`: what a loop over layers keeps for its backward pass (`keep` in core/tensors.py).

A mark helps most on the output of a product, before the nonlinearity: the gradient of relu needs relu's output, which
is cheap to compute from the product.
"""

from collections.abc import Mapping, Sequence

from lingvo_moe.core.tensors import Kept

FULL, DOTS = "full", "dots"


def names_of(remat: str | Sequence[str], declared: Mapping[str, Kept]) -> tuple[str, ...]:
    """The names of what is kept: none for 'full', those of declared products for 'dots', else the list itself."""
    if remat == FULL:
        return ()
    if remat == DOTS:
        return tuple(name for name, kind in declared.items() if Kept.PRODUCT in kind)
    return tuple(remat)
