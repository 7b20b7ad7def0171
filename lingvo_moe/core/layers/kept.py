"""The names of the activations that a loop over layers can keep for its backward pass (`keep` in core/tensors.py).

A mark helps most on the output of a product, before the nonlinearity: the gradient of relu needs relu's output, which
is cheap to compute from the product.
"""

from collections.abc import Mapping, Sequence

# The names of marked activations.
NAMES: Mapping[str, str] = {
    "query": "the queries of attention",
    "key": "its keys",
    "value": "its values",
    "attention": "its output",
    "hidden": "the first product of a dense feed-forward layer, before the activation; both if it is gated",
    "feed_forward": "its output",
    "router": "the router's logits",
    "dispatched": "the tokens at their experts, after the all-to-all",
    "experts_hidden": "the first product of the experts, before the activation; both if it is gated",
    "returned": "the outputs of the experts back at their tokens, after the all-to-all",
    "combined": "the output of the mixture-of-experts layer",
}
# Those that are products with weights. ("returned" is the experts' second product, after an all-to-all.)
PRODUCTS = tuple(name for name in NAMES if name not in ("dispatched", "combined"))

FULL, DOTS = "full", "dots"


def names_of(remat: str | Sequence[str]) -> tuple[str, ...]:
    """The names of what is kept: none for 'full', those of products for 'dots', else the list itself."""
    if isinstance(remat, str):
        return {FULL: (), DOTS: PRODUCTS}[remat]
    return tuple(remat)
