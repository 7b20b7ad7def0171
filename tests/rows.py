"""Compares the results of rows that are computed in batches of different sizes."""

import functools
from typing import Any

import numpy as np
import tensorflow as tf


@functools.cache
def products_ignore_the_batch() -> bool:
    """Whether TensorFlow's products give a row the same bits in every batch of two or more on this processor.

    They do with AVX-512 (oneDNN's kernels), and do not with AVX2 alone, where Eigen's blocks depend on the batch.
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
