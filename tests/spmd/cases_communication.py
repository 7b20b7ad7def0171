"""The communication primitives of section 3.3.1: when each appears, between whom, and how many bytes.

Letters x, y, z are mesh axes: on a mesh of several a collective along one of them runs in groups.
Bytes are those of the float32 tensor that one device holds afterwards. Where a case differs from what
the paper leads one to expect, a comment says so.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from spmd_case import Case, floats, moves

from lingvo_moe.core.sharding import current_mesh, mesh_split, replicate, shard, split

XY, YX = "x:2,y:4", "x:4,y:2"
ALONG_X = [[0, 4], [1, 5], [2, 6], [3, 7]]  # of XY
A = floats(16, 8)  # 512 bytes


def recut(name: str, first: tuple, second: tuple, mesh: str = "d:8", **options: Any) -> Case:
    """A computed tensor that lies as `first` says and is then used as `second` says."""

    def fn(a: tf.Tensor) -> tf.Tensor:
        a = mesh_split(2.0 * a + 1.0, current_mesh(), first)
        return mesh_split(a, current_mesh(), second) * 3.0

    options.setdefault("args", (A,))
    return Case(name, fn, mesh=mesh, splits=(first,), **options)


def contracted(axes: Any) -> Callable[..., tf.Tensor]:
    """A product of [16, 8] and [8, 4] whose contracted dimension is sharded along `axes`."""

    def fn(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
        a = mesh_split(a + 1.0, current_mesh(), (None, axes))
        return a @ mesh_split(b, current_mesh(), (axes, None))

    return fn


_ROWS, _COLUMNS = ("d", None), (None, "d")

GATHERS = [
    # Sharded to replicated: every device gets the complete tensor, for any number of devices.
    *[
        recut(
            f"gather_over_{n}",
            _ROWS,
            (None, None),
            f"d:{n}",
            inspect=moves(("all-gather", 512, [list(range(n))])),
            several_processes=n == 8,
        )
        for n in (2, 4, 8)
    ],
    recut("gather_columns", _COLUMNS, (None, None), inspect=moves(("all-gather", 512))),
    # One collective for each dimension, not one for both.
    recut("gather_x_and_y", ("x", "y"), (None, None), YX, inspect=moves(("all-gather", 128), ("all-gather", 512))),
    # The parts that a device needs are on several devices, so they are collected first.
    recut("gather_major_of_two_axes", (("x", "y"), None), ("y", None), YX,
        inspect=moves(("collective-permute", 64), ("all-gather", 256))),
    # The paper's "in the order given": the group lists devices in the order of their parts.
    Case(
        "gather_in_given_order",
        lambda a: 3.0 * replicate(shard(2 * a, np.array([3, 1, 7, 5, 2, 0, 6, 4]).reshape(8, 1))),
        (A,),
        splits=(None,),
        inspect=moves(("all-gather", 512, [[3, 1, 7, 5, 2, 0, 6, 4]])),
    ),
    # 15 rows are sent as 16; the padding is removed afterwards.
    Case("gather_uneven", lambda a: 3.0 * replicate(split(2 * a + 1, 0, 8)), (floats(15, 4),),
        inspect=moves(("all-gather", 256))),
]  # fmt: skip

REDUCTIONS = [
    # Partial results: the whole result is summed, whatever the number of devices.
    *[
        Case(
            f"reduce_over_{n}",
            contracted("d"),
            (A, floats(8, 4)),
            mesh=f"d:{n}",
            splits=(_COLUMNS, _ROWS),
            inspect=moves(("all-reduce", 256, [list(range(n))])),
            backward={},  # whole cotangent, operands sharded: local
            gradients=(0, 1) if n == 8 else (),
            several_processes=n == 8,
        )
        for n in (2, 4, 8)
    ],
    Case("reduce_x", contracted("x"), (A, floats(8, 4)), mesh=XY, inspect=moves(("all-reduce", 256, ALONG_X))),
    Case("reduce_both_axes_of_one_dimension", contracted(("x", "y")), (A, floats(8, 4)), mesh=YX,
        inspect=moves(("all-reduce", 256, [list(range(8))]))),
    # Sums travel together, a sum and a maximum do not.
    Case(
        "reduce_two_sums_at_once",
        lambda a, b: (tf.reduce_sum(split(a * a, 0, 8), 0), tf.reduce_sum(split(b * b, 0, 8), 0)),
        (A, floats(16, 4)),
        inspect=moves(("all-reduce", 32 + 16)),
    ),
    # The result is annotated as sharded: XLA for CPUs sums all of it and keeps a slice, no reduce-scatter. The
    # gradient's whole cotangent is gathered.
    Case("reduce_then_cut", lambda a, b: split(contracted("d")(a, b), 0, 8) * 3.0, (A, floats(8, 4)),
        splits=(_COLUMNS, _ROWS), inspect=moves(("all-reduce", 256)), backward={"all-gather": 1}),
]  # fmt: skip

ALL_TO_ALLS = [
    # From one dimension to another: a device keeps 1/n, so bytes fall with the number of devices.
    *[
        recut(
            f"all_to_all_over_{n}",
            _ROWS,
            _COLUMNS,
            f"d:{n}",
            inspect=moves(("all-to-all", 512 // n, [list(range(n))])),
            gradients=(0,) if n == 8 else (),
            backward={"all-to-all": 1},
            several_processes=n == 8,
        )
        for n in (2, 4, 8)
    ],
    recut("all_to_all_along_x", ("x", None, "y"), (None, "x", "y"), XY, args=(floats(4, 4, 8),),
        inspect=moves(("all-to-all", 64, ALONG_X))),
    recut("all_to_all_along_both_axes", (("x", "y"), None), (None, ("x", "y")), XY,
        inspect=moves(("all-to-all", 64, [list(range(8))]))),
    # Copies along y are in separate groups.
    recut("all_to_all_of_copies", ("x", None), (None, "x"), XY, inspect=moves(("all-to-all", 256, ALONG_X))),
    # Two axes change places: by permutation alone where they are equal.
    recut("axes_change_places", ("x", "y"), ("y", "x"), XY,
        inspect=moves(("all-to-all", 64), ("collective-permute", 64)), gradients=(0,)),
    recut("equal_axes_change_places", ("x", "y"), ("y", "x"), "x:2,y:2",
        inspect=moves(("collective-permute", 128, [(0, 0), (1, 2), (2, 1), (3, 3)]))),
    # 15 x 13 over 8 both ways: parts of 2 x 2, padded.
    Case("all_to_all_uneven", lambda a: split(split(2 * a + 1, 0, 8), 1, 8), (floats(15, 13),),
        forward={"all-to-all": 1}, backward={"all-to-all": 1}, whole=True),
]  # fmt: skip

PERMUTES = [
    # Another order of devices; the gradient goes the other way.
    Case(
        "permute_reversed",
        lambda a: shard(split(2 * a + 1, 0, 8), np.arange(7, -1, -1).reshape(8, 1)),
        (A,),
        splits=(_ROWS,),
        inspect=moves(("collective-permute", 64, [(i, 7 - i) for i in range(8)])),
        backward={"collective-permute": 1},
        several_processes=True,
    ),
    Case("permute_rotated", lambda a: shard(split(2 * a + 1, 0, 4), np.array([[1], [2], [3], [0]])), (A,), mesh="d:4",
        splits=(_ROWS,), inspect=moves(("collective-permute", 128, [(0, 1), (1, 2), (2, 3), (3, 0)]))),
    # From one device assignment of figure 10 to the other.
    Case("permute_figure_10",
        lambda a: shard(shard(2 * a + 1, np.arange(8).reshape(2, 4)), np.array([[0, 2, 4, 6], [1, 3, 5, 7]])),
        (A,), mesh=XY, splits=(("x", "y"),), backward={"collective-permute": 1},
        inspect=moves(("collective-permute", 64, [(0, 0), (1, 2), (2, 4), (3, 6), (4, 1), (5, 3), (6, 5), (7, 7)]))),
    recut("permute_axes_in_other_order", (("x", "y"), None), (("y", "x"), None), XY,
        inspect=moves(("collective-permute", 64))),
    # x and y are of one size: every device gets the part of its mirror image.
    recut("permute_x_to_y", ("x", None), ("y", None), "x:2,y:2",
        inspect=moves(("collective-permute", 256, [(0, 0), (1, 2), (2, 1), (3, 3)]))),
    recut("permute_x_to_coarser_y", ("x", None), ("y", None), YX,
        inspect=moves(("collective-permute", 128), ("all-gather", 256))),
    # A halo: everything moves by one row, so each device sends one row of its two to the next.
    Case(
        "permute_halo",
        lambda a: split(tf.pad(split(2 * a + 1, 0, 8)[:-1], [[1, 0], [0, 0]]), 0, 8),
        (A,),
        splits=(_ROWS,),
        inspect=moves(("collective-permute", 32, [(i, i + 1) for i in range(7)])),
        backward={"collective-permute": 1},
        several_processes=True,
    ),
]  # fmt: skip

LOCAL = [
    Case("local_elementwise", lambda a, b: tf.nn.relu(split(a, 0, 8) * b + 1.0), (A, A + 1), splits=(_ROWS, _ROWS),
        forward={}, backward={}),
]  # fmt: skip

CASES = [*GATHERS, *REDUCTIONS, *ALL_TO_ALLS, *PERMUTES, *LOCAL]
