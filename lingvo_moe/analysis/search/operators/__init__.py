"""The operators of TensorFlow in letters, for the searches for strategies: products, look-ups, shapes, elementwise."""

from lingvo_moe.analysis.search.operators import elementwise, products, shapes

RULES = {**elementwise.RULES, **products.RULES, **shapes.RULES}
