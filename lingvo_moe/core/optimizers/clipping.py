"""Gradient clipping by the global norm."""

import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.nested_map import NestedMap


def global_norm(grads: NestedMap) -> tf.Tensor:
    """The square root of the sum of all squares, a float32 scalar; NaN or Inf if any gradient holds one."""
    there = [g for g in grads.Flatten() if g is not None]
    dense = [tf.cast(tf.convert_to_tensor(g), tf.float32) for g in there]
    return tf.sqrt(tf.add_n([kernels.current().sum_of_squares(g) for g in dense]))


def clip_by_global_norm(grads: NestedMap, max_norm: float) -> tuple[NestedMap, tf.Tensor]:
    """Scales all gradients by one factor so that their global norm is at most `max_norm`.

    Args:
        grads: tensors; tf.IndexedSlices come out dense. None stays None.
        max_norm: 0 leaves the gradients alone.

    Returns:
        The gradients, each in its own type, and the norm before clipping (float32 scalar).

    Raises:
        ValueError: a negative norm.
    """
    if max_norm < 0:
        raise ValueError(f"the gradient norm's limit must be 0 (none) or positive, got {max_norm}")
    grads = grads.Transform(lambda g: None if g is None else tf.convert_to_tensor(g))
    norm = global_norm(grads)
    if max_norm == 0:
        return grads, norm
    scale = max_norm / tf.maximum(norm, max_norm)
    return grads.Transform(lambda g: None if g is None else g * tf.cast(scale, g.dtype)), norm
