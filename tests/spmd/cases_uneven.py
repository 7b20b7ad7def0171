"""Uneven partitions (section 3.3.3): 15 elements over 2, 4 and 8 devices, 9 over 8 (three hold nothing).

What lies in the padding is arbitrary, so every operator that mixes elements of the sharded dimension has
to put in its identity. The numbers are such that another identity, or none, would show: the padding of
a tensor that is sharded holds zeros, and here zero is the largest of negative numbers, the smallest of
positive ones, it makes a product nothing and a quotient infinite, and it is five after adding five.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from spmd_case import Case, floats, ints

from lingvo_moe.core.sharding import current_mesh, mesh_split, split

A = floats(15, 6)
POSITIVE = np.abs(A) + 0.5
NEGATIVE = -POSITIVE
FAR_NEGATIVE = -20 * POSITIVE  # exp of the padding would be all that counts
TIES = ints(15, 6, below=4).astype(np.float32) - 9
ONE_REDUCE, ONE_GATHER = {"all-reduce": 1}, {"all-gather": 1}

# Kind -> the reduction, and numbers that zeros in the padding would spoil.
KINDS: dict[str, tuple[Callable[[tf.Tensor, Any], tf.Tensor], np.ndarray]] = {
    "sum": (lambda a, axis: tf.reduce_sum(a + 5.0, axis), A),
    "prod": (tf.reduce_prod, POSITIVE),
    "max": (tf.reduce_max, NEGATIVE),
    "min": (tf.reduce_min, POSITIVE),
    "mean": (lambda a, axis: tf.reduce_mean(a + 5.0, axis), A),
    "logsumexp": (tf.reduce_logsumexp, FAR_NEGATIVE),
    "any": (lambda a, axis: tf.reduce_any(tf.logical_not(a > 0), axis), POSITIVE),
    "all": (lambda a, axis: tf.reduce_all(a > 0, axis), POSITIVE),
}


def rows(name: str, fn: Callable[..., Any], *args: np.ndarray, n: int = 8, **options: Any) -> Case:
    """The first argument is sharded unevenly by rows over n devices."""
    options.setdefault("whole", True)
    return Case(name, lambda a, *rest: fn(split(a, 0, n), *rest), args, mesh=f"d:{n}", **options)


def reduction(kind: str, n: int) -> Case:
    """Reduces over the sharded dimension, over the other one, and over both."""
    fn, numbers = KINDS[kind]
    return rows(
        f"{kind}_15_over_{n}",
        lambda a: tuple(fn(a, axis) for axis in (0, 1, (0, 1))),
        numbers,
        n=n,
        forward={"all-reduce": 2} if kind == "logsumexp" else ONE_REDUCE,  # max, then sum
        gradients=() if kind in ("min", "any", "all") else None,
        several_processes=kind == "max",
    )


REDUCTIONS = [
    *[reduction(kind, n) for kind, n in zip(KINDS, (2, 4, 8, 2, 8, 8, 8, 8), strict=True)],
    # Parts of two, and the last three devices have only padding.
    rows("max_9_over_8", lambda a: tf.reduce_max(a, 0), NEGATIVE[:9], forward=ONE_REDUCE),
    rows(
        "sum_of_reciprocals",  # infinite in the padding
        lambda a: tf.reduce_sum(1.0 / a, 0),
        POSITIVE,
        forward=ONE_REDUCE,
        backward={},
    ),
    rows(
        "sum_of_quotients",  # not a number in the padding
        lambda a: tf.reduce_sum(a / a * a, 0),
        POSITIVE,
        forward=ONE_REDUCE,
    ),
    Case(
        "two_uneven_dimensions",
        lambda a: (
            tf.reduce_sum(mesh_split(a, current_mesh(), ("x", "y")) + 5.0),
            tf.reduce_max(mesh_split(a, current_mesh(), ("x", "y")), 0),
        ),
        (-np.abs(floats(5, 7)) - 1,),
        mesh="x:2,y:4",
        forward={"all-reduce": 3},
        whole=True,
    ),
]  # fmt: skip

# The largest with its place: one (value, index) pair from each device, the first of equals wins.
ARGUMENTS = [
    rows("argmax_15_over_8", lambda a: tf.argmax(a, 0, output_type=tf.int32), NEGATIVE, forward={"all-gather": 2}),
]  # fmt: skip

NORMALIZATIONS = [
    rows("softmax", lambda a: tf.nn.softmax(a, 0), FAR_NEGATIVE, forward={"all-reduce": 2}, several_processes=True),
    rows("log_softmax", lambda a: tf.nn.log_softmax(a, 0), FAR_NEGATIVE, forward={"all-reduce": 2}),
    rows(
        "layer_norm",
        lambda a: (
            (a + 5 - tf.reduce_mean(a + 5, 0)) * tf.math.rsqrt(tf.math.reduce_variance(a, 0) + 1e-3)
        ),
        A,
        forward={"all-reduce": 2},
    ),
    rows("batch_norm_moments", lambda a: tuple(tf.nn.moments(a + 5.0, [0])), A, forward={"all-reduce": 2}),
]  # fmt: skip

# Differs: a prefix sum along the sharded dimension is computed on every device, from a gathered operand.
PREFIXES = [
    rows("cumsum", lambda a: tf.cumsum(a + 5.0, 0), A, forward=ONE_GATHER),
    rows("cumprod", lambda a: tf.math.cumprod(a, 0), POSITIVE, forward=ONE_GATHER),
]

# A dimension that has to be in one piece is exchanged for one that can be sharded, by all-to-all, or else
# gathered: here the other dimension has 6 elements, fewer than devices, but where the name says 8.
ORDERS = [
    rows("sort_15x8", lambda a: tf.sort(2.0 * a, 0), floats(15, 8) - 9, forward={"all-to-all": 2}),
    rows("argsort_of_equals", lambda a: tf.argsort(a, 0, stable=True), TIES, forward=ONE_GATHER),
    Case("top_k", lambda a: tuple(tf.math.top_k(split(a, 1, 8), 4)), (NEGATIVE.T.copy(),), forward=ONE_GATHER,
        whole=True),
]  # fmt: skip

# Contracted over 15 and over padding that holds infinities.
PRODUCTS = [
    Case("matmul_contracting", lambda a, b: split(a + 5.0, 1, 8) @ split(b, 0, 8), (floats(4, 15), floats(15, 6)),
        forward=ONE_REDUCE),
]  # fmt: skip

CASES = [*REDUCTIONS, *ARGUMENTS, *NORMALIZATIONS, *PREFIXES, *ORDERS, *PRODUCTS]
