"""An exponential moving average of weights: part of a task's state, sharded like the weights."""

from dataclasses import replace

import tensorflow as tf

from lingvo_moe.core.base_layer import VariableSpec, name_scope
from lingvo_moe.core.nested_map import NestedMap, map_structure

# The average of n updates keeps at most n / (n + _LAG) of itself: at first it covers the last tenth of the run.
_LAG = 9.0


def average_specs(specs: NestedMap) -> NestedMap:
    """The specs of the average of variables of these specs, in their structure: float32 for those that are trained.

    Others are not averaged: the average holds their newest values.
    """
    return specs.Transform(_average_spec)


def first_average(theta: NestedMap, specs: NestedMap) -> NestedMap:
    """The average before the first step: the weights themselves."""
    return map_structure(lambda spec, w: tf.cast(w, _average_spec(spec).dtype), specs, theta)


def next_average(
    average: NestedMap, theta: NestedMap, specs: NestedMap, decay: float, updates: tf.Tensor
) -> NestedMap:
    """The average after an update: b * average + (1 - b) * theta, where b = min(decay, n / (n + 9)).

    So b is 0 at the first update, and no correction for the start is needed.

    Args:
        decay: the largest share that the average keeps.
        updates: n, the updates before this one; int32 scalar.
    """
    n = tf.cast(updates, tf.float32)
    keep = tf.minimum(n / (n + _LAG), decay)
    new = []
    for spec, old, weight in specs.Zip(average, theta):
        with name_scope(f"optimizer.{spec.path}"):
            if spec.trainable:
                wide = tf.cast(weight, old.dtype)
                weight = wide + tf.cast(keep, old.dtype) * (old - wide)
            new.append(weight)
    return average.Pack(new)


def _average_spec(spec: VariableSpec) -> VariableSpec:
    is_narrow = spec.dtype in ("bfloat16", "float16")
    return replace(spec, dtype="float32") if spec.trainable and is_narrow else spec
