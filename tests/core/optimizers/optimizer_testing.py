"""Helpers for the tests of optimizers: specs of variables, and updates in a row."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from slots import init_slots

from lingvo_moe.core.base_layer import VariableSpec
from lingvo_moe.core.initializers import WeightInit
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.optimizers.base_optimizer import BaseOptimizer
from lingvo_moe.core.randomness import make_seed
from lingvo_moe.core.sharding import dims_mapping


def spec(
    shape: Sequence[int], letters: str = "", name: str = "w", dtype: str = "float32"
) -> VariableSpec:
    """A variable; letter E is sharded along the axis `expert`."""
    letters = letters or "ABCDEFGH"[: len(shape)]
    split = dims_mapping(letters, {"E": "expert"})
    return VariableSpec(name, tuple(shape), dtype, letters, WeightInit.Gaussian(), split)


def run(
    optimizer: BaseOptimizer,
    specs: NestedMap,
    theta: NestedMap,
    grads: Sequence[Any],
    **clip: float,
) -> tuple[NestedMap, NestedMap, NestedMap]:
    """Weights, slots and metrics after an update by each of some gradients in turn."""
    slots = init_slots(optimizer, specs, make_seed(0, 0), theta)
    metrics = NestedMap()
    for step, grad in enumerate(grads):
        state = NestedMap(theta=theta, slots=slots, step=tf.constant(step))
        theta, slots, metrics = optimizer.Update(state, grad, specs, **clip)
    return theta, slots, metrics
