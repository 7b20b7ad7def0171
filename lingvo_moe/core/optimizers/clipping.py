"""Gradient clipping by the global norm."""

import tensorflow as tf


def clip_scale(norm: tf.Tensor, max_norm: float) -> tf.Tensor:
    """The factor by which gradients are scaled so that their global norm is at most `max_norm`.

    `norm` is the square root of the sum of all squares, a float32 scalar.

    Returns:
        A float32 scalar.

    Raises:
        ValueError: a limit that is not positive.
    """
    if max_norm <= 0:
        raise ValueError(f"the gradient norm's limit must be positive, got {max_norm}")
    return max_norm / tf.maximum(norm, max_norm)
