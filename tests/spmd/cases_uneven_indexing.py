"""Uneven partitions (section 3.3.3) of operators with indices: one-hot, gather, scatter, segments, slices.

15 elements over 8 devices. The operand's rows, the indices or the updates are sharded; see cases_uneven for
how the numbers are chosen.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from spmd_case import Case, floats, ints

from lingvo_moe.core.sharding import replicate, split

A = floats(15, 6)
POSITIVE = np.abs(A) + 0.5
NEGATIVE = -POSITIVE
ROWS = ints(10, below=15)  # with repetitions
SEGMENTS = ints(15, below=4)
ONE_REDUCE, ONE_GATHER = {"all-reduce": 1}, {"all-gather": 1}
BOTH = {"all-gather": 1, "all-reduce": 1}


def rows(name: str, fn: Callable[..., Any], *args: np.ndarray, **options: Any) -> Case:
    """The first argument is sharded unevenly by rows."""
    options.setdefault("whole", True)
    return Case(name, lambda a, *rest: fn(split(a, 0, 8), *rest), args, **options)


def both(name: str, fn: Callable[..., Any], *args: np.ndarray, **options: Any) -> Case:
    """The first argument and the second, its indices, are sharded unevenly by rows."""
    return rows(name, lambda a, i, *rest: fn(a, split(i, 0, 8), *rest), *args, **options)


# Along the sharded dimension each device takes the rows that it has, zeros for others, and all are summed.
GATHERS = [
    rows("gather", tf.gather, A, ROWS, forward=ONE_REDUCE),
    Case("gather_by_cut_indices", lambda a, i: tf.gather(a, split(i, 0, 8)), (A, ints(15, below=15)), forward={},
        whole=True),
    rows("gather_in_batches", lambda a, i: tf.gather(a, i, batch_dims=1), A, ints(15, 3, below=6), forward={}),
]  # fmt: skip

# Into a sharded operand: each device applies the updates to the rows that it has.
SCATTERS = [
    rows("scatter_add", lambda a, i, u: tf.tensor_scatter_nd_add(a + 5.0, i, u), A, ROWS[:, None], floats(10, 6),
        forward={}),
    rows("scatter_max", lambda a, i, u: tf.tensor_scatter_nd_max(a, i, u), NEGATIVE, ROWS[:, None],
        -np.abs(floats(10, 6)), forward={}),
]  # fmt: skip

# Kind -> the segment reduction, updates, and what to add once they are sharded.
KINDS = {
    "sum": (tf.math.unsorted_segment_sum, A, 5.0),
    "max": (tf.math.unsorted_segment_max, NEGATIVE, 0.0),
    "prod": (tf.math.unsorted_segment_prod, POSITIVE, 0.0),
}


def embedding(table: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """Looks up rows of a replicated table at unevenly sharded positions; a loss per column."""
    return tf.reduce_sum(tf.math.softplus(split(tf.gather(table, ids), 0, 8)), 0)


# Updates are sharded and so are their indices: XLA pads the indices with -1, which no scatter writes, and
# reduces the partial results.
CUT_UPDATES = [
    *[
        both(
            f"segment_{kind}",
            lambda a, i, fn=fn, add=add: fn(a + add, i, 4),
            numbers,
            SEGMENTS,
            forward=BOTH,
            gradients=None if kind == "sum" else (),
        )
        for kind, (fn, numbers, add) in KINDS.items()
    ],
    Case("embedding_by_cut_ids", lambda table, ids: embedding(table, split(ids, 0, 8)), (floats(4, 6), SEGMENTS),
        forward=ONE_REDUCE, backward=BOTH, whole=True),
    # Or pad explicitly, with segment -1, which no result has.
    Case(
        "segment_sum_padded_by_hand",
        lambda a, i: tf.math.unsorted_segment_sum(
            split(tf.pad(a, [[0, 1], [0, 0]]), 0, 8) + 5.0,
            tf.pad(i, [[0, 1]], constant_values=-1),
            4,
        ),
        (A, SEGMENTS),
        forward=ONE_REDUCE,
    ),
]  # fmt: skip

# WRONG in XLA (jaxlib 0.10.2): where the updates are sharded unevenly and the indices are whole, the indices
# of the padding are 0 and the padding is not masked, so it lands in row 0. Whole means that the indices
# are an argument that nothing shards, or annotated `replicate`. Annotate the indices as the updates are
# sharded, as in CUT_UPDATES, and the result is right.
WRONG = [
    *[
        rows(
            f"segment_{kind}_by_whole_ids",
            lambda a, i, fn=fn, add=add: fn(a + add, i, 4),
            numbers,
            SEGMENTS,
        )
        for kind, (fn, numbers, add) in KINDS.items()
    ],
    rows("segment_sum_by_replicated_ids", lambda a, i: tf.math.unsorted_segment_sum(a + 5.0, replicate(2 * i), 7), A,
        SEGMENTS),
    rows("scatter_nd_by_whole_indices", lambda u, i: tf.scatter_nd(i, u + 5.0, [7, 6]), A, SEGMENTS[:, None]),
    rows("scatter_max_by_whole_indices", lambda u, i, a: tf.tensor_scatter_nd_max(a, i, u), NEGATIVE, SEGMENTS[:, None],
        NEGATIVE[:4] - 1.0),
    # The value is right, the gradient is wrong.
    Case("embedding_by_whole_ids", embedding, (floats(4, 6), SEGMENTS), whole=True),
]  # fmt: skip

# Where a slice begins is known only when the program runs. Differs: the sharded operand is gathered.
RUNTIME_SLICES = [
    rows("slice_from_runtime_start", lambda a, i: tf.slice(a + 5.0, tf.stack([i, 0]), [7, 6]), A, np.int32(8),
        forward=ONE_GATHER),
]  # fmt: skip

CASES = [*GATHERS, *SCATTERS, *CUT_UPDATES, *RUNTIME_SLICES]
