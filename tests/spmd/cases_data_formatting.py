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
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

from lingvo_moe.core.sharding import current_mesh, mesh_split, split

ODD, EVEN = floats(15, 4), floats(16, 4)
XY = "x:2,y:4"
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


def recut(
    name: str, fn: Callable[..., Any], first: tuple, second: tuple, *args, **options: Any
) -> Case:
    """Over two axes: the operand lies as `first` says, the result as `second` says."""

    def cut(a: tf.Tensor) -> tf.Tensor:
        y = fn(mesh_split(2.0 * a + 1.0, current_mesh(), first))
        return mesh_split(y, current_mesh(), second) * 3.0

    return Case(name, cut, args, mesh=XY, splits=(first,), **options)


RESHAPES = [
    # Figure 5c: rows [2, 2] of which one is padding become parts of 3; one number moves, and back.
    formatted(
        "reshape_figure_5c",
        lambda a: tf.reshape(a, [6]),
        floats(3, 2),
        n=2,
        inspect=moves(("collective-permute", 4)),
        gradient=permutes(1),
    ),
    formatted(
        "reshape_figure_5c_back",
        lambda a: tf.reshape(a, [3, 2]),
        floats(6),
        n=2,
        inspect=moves(("collective-permute", 4)),
        gradient=permutes(1),
    ),
    formatted(
        "reshape_merge",
        lambda a: tf.reshape(a, [64]),
        EVEN,
        forward=LOCAL,
        gradient=LOCAL,
        whole=False,
    ),
    # Parts of 2 rows are parts of 8 numbers, and so is the padding.
    formatted(
        "reshape_merge_uneven", lambda a: tf.reshape(a, [60]), ODD, forward=LOCAL, gradient=LOCAL
    ),
    formatted(
        "reshape_merge_others", lambda a: tf.reshape(a, [8, 6]), floats(8, 2, 3), forward=LOCAL
    ),
    formatted(
        "reshape_divide", lambda a: tf.reshape(a, [8, 2, 4]), EVEN, forward=LOCAL, whole=False
    ),
    formatted(
        "reshape_divide_uneven",
        lambda a: tf.reshape(a, [3, 5, 4]),
        ODD,
        n=2,
        forward=permutes(1),
        gradient=permutes(1),
    ),
    # Differs: 15 over 8 becomes 3 x 5, of which neither can be sharded in 8: gathered.
    formatted(
        "reshape_divide_into_less",
        lambda a: tf.reshape(a, [3, 5, 4]),
        ODD,
        to=None,
        forward=ONE_GATHER,
    ),
    # Differs: parts of 8 numbers become parts of 10, which is a halo too, but XLA gathers.
    formatted("reshape_across_rows", lambda a: tf.reshape(a, [12, 5]), ODD, forward=ONE_GATHER),
    # The sharded dimension becomes the minor one of the merged, so numbers of a part lie far apart.
    formatted(
        "reshape_merge_as_minor",
        lambda a: tf.reshape(tf.transpose(a), [64]),
        EVEN,
        forward={"all-to-all": 1, "collective-permute": 1},
    ),
    # Over two axes: numbers of one row lie on four devices. Whole axes that merge or part stay put.
    recut(
        "reshape_merge_2d",
        lambda a: tf.reshape(a, [64]),
        ("x", "y"),
        (("x", "y"),),
        floats(8, 8),
        forward={"all-to-all": 1},
    ),
    recut(
        "reshape_divide_2d",
        lambda a: tf.reshape(a, [8, 8]),
        (("x", "y"),),
        ("x", "y"),
        floats(64),
        forward={"all-to-all": 1},
    ),
    recut(
        "reshape_divide_2d_by_axes",
        lambda a: tf.reshape(a, [2, 4, 8]),
        (("x", "y"), None),
        ("x", "y", None),
        floats(8, 8),
        forward=LOCAL,
    ),
    recut(
        "reshape_merge_2d_by_axes",
        lambda a: tf.reshape(a, [8, 8]),
        ("x", "y", None),
        (("x", "y"), None),
        floats(2, 4, 8),
        forward=LOCAL,
    ),
    formatted(
        "squeeze_and_expand",
        lambda a: tf.squeeze(2 * a[:, None], 1)[None],
        EVEN,
        to=1,
        forward=LOCAL,
    ),
    formatted("transpose", lambda a: tf.transpose(a), ODD, to=1, forward=LOCAL, gradient=LOCAL),
    formatted(
        "transpose_and_cut_the_other",
        lambda a: tf.transpose(a),
        floats(15, 9),
        forward={"all-to-all": 1},
        gradient={"all-to-all": 1},
    ),
]

REVERSALS = [
    formatted(
        "reverse",
        lambda a: tf.reverse(a, [0]),
        EVEN,
        inspect=moves(("collective-permute", 32)),
        gradient=permutes(1),
    ),
    # Reversed, the padding would lie at the front: all move by one row more.
    formatted(
        "reverse_uneven",
        lambda a: tf.reverse(a, [0]),
        ODD,
        inspect=moves(("collective-permute", 32), ("collective-permute", 16)),
        gradient=permutes(2),
        several_processes=True,
    ),
    formatted(
        "reverse_uneven_over_2",
        lambda a: tf.reverse(a, [0]),
        ODD,
        n=2,
        inspect=moves(("collective-permute", 128), ("collective-permute", 16)),
    ),
    formatted("reverse_9_over_8", lambda a: tf.reverse(a, [0]), floats(9, 4), forward=permutes(3)),
    formatted("reverse_the_other", lambda a: tf.reverse(a, [1]), ODD, forward=LOCAL, gradient=None),
    formatted(
        "negative_stride_2",
        lambda a: a[::-2],
        floats(31, 4),
        forward=permutes(2),
        gradient=permutes(1),
    ),
]

SLICES = [
    # Figure 5b: 8 of 16 rows, parts of 2 become parts of 1.
    formatted(
        "slice_figure_5b",
        lambda a: a[3:11],
        EVEN,
        forward=permutes(2),
        gradient=permutes(2),
        whole=False,
    ),
    formatted("slice_first", lambda a: a[:9], EVEN, forward=LOCAL, gradient=LOCAL),
    formatted(
        "slice_last",
        lambda a: a[1:],
        EVEN,
        inspect=moves(("collective-permute", 16)),
        gradient=permutes(1),
    ),
    formatted("slice_the_other", lambda a: a[:, 1:3], ODD, forward=LOCAL, gradient=LOCAL),
    formatted("slice_of_one_device", lambda a: a[2:4], EVEN, to=None, forward=permutes(1)),
    formatted(
        "slice_one_row",
        lambda a: a[13],
        ODD,
        to=None,
        forward={"collective-permute": 1, "all-reduce": 1},
    ),
    formatted("strided_slice", lambda a: a[::2], EVEN, forward=LOCAL, gradient=LOCAL),
    formatted(
        "strided_slice_uneven", lambda a: a[1::2], floats(31, 4), forward=LOCAL, gradient=None
    ),
    formatted(
        "strided_slice_by_3",
        lambda a: a[::3],
        floats(31, 4),
        forward=permutes(2),
        gradient=permutes(4),
    ),
]

PADS = [
    formatted(
        "pad_low",
        lambda a: tf.pad(a, [[3, 0], [0, 0]]),
        ODD,
        forward=permutes(3),
        gradient=permutes(3),
    ),
    formatted("pad_high", lambda a: tf.pad(a, [[0, 3], [0, 0]]), ODD, forward=permutes(2)),
    formatted(
        "pad_both_with_7",
        lambda a: tf.pad(a, [[1, 8], [0, 0]], constant_values=7.0),
        ODD,
        forward=permutes(2),
    ),
    # What was padding becomes the pad.
    formatted(
        "pad_into_the_padding",
        lambda a: tf.pad(a, [[0, 1], [0, 0]], constant_values=7.0),
        ODD,
        forward=LOCAL,
    ),
    formatted(
        "pad_the_other", lambda a: tf.pad(a, [[0, 0], [1, 2]]), ODD, forward=LOCAL, gradient=LOCAL
    ),
    # Interior padding doubles every part.
    formatted(
        "pad_between",
        lambda a: gen_xla_ops.xla_pad(a, 7.0, [1, 0], [2, 0], [1, 0]),
        ODD,
        gradients=(),  # TensorFlow has none for this operator
        reference=lambda a: (
            3
            * tf.pad(
                tf.reshape(tf.stack([2 * a + 1, tf.fill(a.shape, 7.0)], 1), [30, 4])[:29],
                [[1, 2], [0, 0]],
                constant_values=7.0,
            )
        ),
        forward=LOCAL,
    ),
    # Differs: mirrored rows are put before and after the others by concatenation, which gathers.
    formatted(
        "pad_reflect",
        lambda a: tf.pad(a, [[2, 3], [0, 0]], mode="REFLECT"),
        ODD,
        forward={"all-gather": 1, "collective-permute": 4, "all-reduce": 1},
    ),
    formatted(
        "pad_symmetric",
        lambda a: tf.pad(a, [[2, 3], [0, 0]], mode="SYMMETRIC"),
        ODD,
        forward={"all-gather": 1, "collective-permute": 4, "all-reduce": 1},
    ),
]

CASES = [*RESHAPES, *REVERSALS, *SLICES, *PADS]
