"""Operators that only move data (section 3.3.3, figure 5): what has to cross from device to device.

The operand is a computed tensor, 2a + 1, sharded by rows, and the result is annotated as sharded too. Rows that come to
lie on another device go there by collective-permute, as a halo; where XLA does otherwise than the paper
leads one to expect, a comment says so.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from spmd_case import Case, floats, moves

from lingvo_moe.core.sharding import split

ODD, EVEN = floats(15, 4), floats(16, 4)
LOCAL: dict[str, int] = {}
ONE_GATHER = {"all-gather": 1}


def permutes(count: int) -> dict[str, int]:
    return {"collective-permute": count}


def formatted(
    name: str,
    fn: Callable[..., Any],
    *args: np.ndarray,
    to: int | None = 0,
    n: int = 8,
    gradient: Any = None,
    **options: Any,
) -> Case:
    """The first argument is sharded by rows, the result along dimension `to`, or as the partitioner chooses.

    `gradient`: as backward.
    """

    def cut(a: tf.Tensor, *rest: tf.Tensor) -> tf.Tensor:
        y = fn(split(2.0 * a + 1.0, 0, n), *rest)
        return y if to is None else split(y, to, n) * 3.0

    options.setdefault("whole", True)
    return Case(name, cut, args, mesh=f"d:{n}", backward=gradient, **options)


RESHAPES = [
    # Figure 5c: rows [2, 2] of which one is padding become parts of 3; one number moves, and back.
    formatted("reshape_figure_5c", lambda a: tf.reshape(a, [6]), floats(3, 2), n=2,
        inspect=moves(("collective-permute", 4)), gradient=permutes(1)),
    formatted("reshape_figure_5c_back", lambda a: tf.reshape(a, [3, 2]), floats(6), n=2,
        inspect=moves(("collective-permute", 4)), gradient=permutes(1)),
    formatted("reshape_merge", lambda a: tf.reshape(a, [64]), EVEN, forward=LOCAL, gradient=LOCAL, whole=False),
    # Differs: 15 over 8 becomes 3 x 5, of which neither can be sharded in 8: gathered.
    formatted("reshape_divide_into_less", lambda a: tf.reshape(a, [3, 5, 4]), ODD, to=None, forward=ONE_GATHER),
    # Differs: parts of 8 numbers become parts of 10, which is a halo too, but XLA gathers.
    formatted("reshape_across_rows", lambda a: tf.reshape(a, [12, 5]), ODD, forward=ONE_GATHER),
]  # fmt: skip

REVERSALS = [
    # Reversed, the padding would lie at the front: all move by one row more.
    formatted(
        "reverse_uneven",
        lambda a: tf.reverse(a, [0]),
        ODD,
        inspect=moves(("collective-permute", 32), ("collective-permute", 16)),
        gradient=permutes(2),
        several_processes=True,
    ),
    formatted("reverse_9_over_8", lambda a: tf.reverse(a, [0]), floats(9, 4), forward=permutes(3)),
]

SLICES = [
    # Figure 5b: 8 of 16 rows, parts of 2 become parts of 1.
    formatted("slice_figure_5b", lambda a: a[3:11], EVEN, forward=permutes(2), gradient=permutes(2), whole=False),
    formatted("strided_slice", lambda a: a[::2], EVEN, forward=LOCAL, gradient=LOCAL),
]  # fmt: skip

PADS = [
    formatted("pad_low", lambda a: tf.pad(a, [[3, 0], [0, 0]]), ODD, forward=permutes(3), gradient=permutes(3)),
    formatted("pad_both_with_7", lambda a: tf.pad(a, [[1, 8], [0, 0]], constant_values=7.0), ODD, forward=permutes(2)),
    # Differs: mirrored rows are put before and after the others by concatenation, which gathers.
    formatted("pad_reflect", lambda a: tf.pad(a, [[2, 3], [0, 0]], mode="REFLECT"), ODD,
        forward={"all-gather": 1, "collective-permute": 4, "all-reduce": 1}),
]  # fmt: skip

CASES = [*RESHAPES, *REVERSALS, *SLICES, *PADS]
