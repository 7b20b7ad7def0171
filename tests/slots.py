"""The state of optimizers in tests."""

import tensorflow as tf

from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.optimizers.base_optimizer import BaseOptimizer


def init_slots(
    optimizer: BaseOptimizer, specs: NestedMap, seed: tf.Tensor, theta: NestedMap
) -> NestedMap:
    """The slots of an optimizer before the first step, of weights theta; `seed` is int32 [2]."""
    slots = optimizer.SlotSpecs(specs).Transform(lambda spec: spec.Init(seed))
    return optimizer.WithMasters(slots, theta, specs)
