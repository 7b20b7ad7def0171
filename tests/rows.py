"""Bounds of rounding that depend on the processor, and rows that are computed in batches of different sizes."""

import functools
from typing import Any

import numpy as np
import tensorflow as tf


@functools.cache
def products_ignore_the_batch() -> bool:
    """Whether TensorFlow's products give a row the same bits in every batch of two or more on this processor.

    Not on every processor: on an AMD EPYC with AVX2 and no AVX-512 they do not, and XLA's results and those in bfloat16
    round differently there too.
    """
    rng = np.random.RandomState(0)
    x, w = (tf.constant(rng.randn(*shape).astype("float32")) for shape in ((40, 64), (64, 300)))
    whole = tf.matmul(x, w).numpy()
    return all(np.array_equal(tf.matmul(x[:n], w), whole[:n]) for n in (2, 3, 4, 8, 33))


def assert_rows_equal(got: Any, want: Any, tol: float = 1e-5) -> None:
    """Asserts that numbers are equal bit for bit, or within `tol` where products depend on the batch."""
    if products_ignore_the_batch():
        np.testing.assert_array_equal(got, want)
    else:
        np.testing.assert_allclose(got, want, rtol=tol, atol=tol)


def bound(usual: float, elsewhere: float) -> float:
    """The bound of an error: `usual`, or `elsewhere` on processors whose products depend on the batch."""
    return usual if products_ignore_the_batch() else elsewhere
