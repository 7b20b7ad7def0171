"""Cases: random numbers that are the same however they are sharded (section 3.3: a partitioned program
computes what the program of one device does)."""

from collections.abc import Callable

import numpy as np
import tensorflow as tf
from spmd_case import Case, floats, largest_array

from lingvo_moe.core import kernels, randomness
from lingvo_moe.core.sharding.annotate import split

SEED = np.array([3, 5], np.int32)
SHAPE = (16, 24)
PARTS = 8


def within_a_part(hlo: str) -> None:
    """Checks, as a `Case.inspect`, that no device holds more than its part of any tensor."""
    assert largest_array(hlo) == np.prod(SHAPE) // PARTS


def whole_everywhere(hlo: str) -> None:
    """Checks, as a `Case.inspect`, that every device computes the complete tensor."""
    assert largest_array(hlo) == np.prod(SHAPE)


def draws(seed: tf.Tensor, cut: Callable[[tf.Tensor], tf.Tensor], shape: tuple[int, ...] = SHAPE):
    """One tensor from each of our generators, and one of a seed for each row."""
    seeds = randomness.fold_in(seed, tf.range(shape[0]))
    return (
        cut(randomness.bits(seed, shape)),
        cut(randomness.uniform(seed, shape)),
        cut(randomness.normal(seed, shape)),
        cut(randomness.truncated_normal(seed, shape)),
        cut(randomness.uniform(seeds, shape)),
    )


def dropout(x, seed):
    return kernels.dropout(split(x, 0, PARTS), 0.3, seed)


def dropout_in_loop(x, seed):
    def body(i, x):
        return i + 1, kernels.dropout(tf.tanh(x), 0.3, randomness.fold_in(seed, i))

    start = (tf.constant(0), split(x, 0, PARTS))
    return tf.while_loop(lambda i, x: i < 3, body, start, maximum_iterations=3)[1]


CASES = [
    Case("rows_normal", lambda seed: split(randomness.normal(seed, SHAPE), 0, PARTS), (SEED,), forward={},
        inspect=within_a_part),
    # The gradient draws the mask again: the same one, and as locally.
    Case("dropout", dropout, (floats(*SHAPE), SEED), splits=[("d", None), None], forward={}, backward={},
        inspect=within_a_part, several_processes=True),
    Case("dropout_in_loop", dropout_in_loop, (floats(*SHAPE), SEED), splits=[("d", None), None], forward={},
        backward={}, inspect=within_a_part),
    # TensorFlow's own are the same on any number of devices too, without communication, but differ from
    # ours in this: every device makes the whole tensor and keeps its part.
    Case("tensorflow_philox", lambda seed: split(tf.random.stateless_uniform(SHAPE, seed, alg="philox"), 0, PARTS),
        (SEED,), forward={}, jit_reference=True, inspect=whole_everywhere),
]  # fmt: skip
