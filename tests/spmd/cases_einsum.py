"""Einsum (section 3.3.2): every way to shard batch, contracting and non-contracting dimensions.

Letters of the mixture of experts: G group, S token in group, E expert, C capacity slot, M model, H hidden.
Others are b batch, i and k non-contracting, j contracting. Where a case differs from what the paper leads
one to expect, a comment says so.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from spmd_case import Case, floats, ints, moves

from lingvo_moe.core.sharding import current_mesh, mesh_split, split

XY = "x:2,y:4"
N, D, X, Y, Z = None, "d", "x", "y", "z"
_MATRICES = ((8, 16), (16, 24))
_BATCHED = ((8, 8, 8), (8, 8, 8))
SIZES = {"G": 8, "S": 4, "E": 8, "C": 2, "M": 6, "H": 10}


def einsum(
    name: str,
    equation: str,
    lhs: tuple,
    rhs: tuple,
    result: tuple | None = None,
    shapes: tuple = _BATCHED,
    mesh: str = "d:8",
    **options: Any,
) -> Case:
    """Two operands that lie as `lhs` and `rhs` say; the result is wanted as `result` says, or it is left
    to the partitioner."""

    def fn(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
        mesh = current_mesh()
        y = tf.einsum(equation, mesh_split(2.0 * a, mesh, lhs), mesh_split(b, mesh, rhs))
        return y if result is None else mesh_split(y, mesh, result) * 1.5

    args = (floats(*shapes[0]), floats(*shapes[1], seed=1))
    return Case(name, fn, args, mesh=mesh, splits=(lhs, rhs), **options)


def matrices(
    name: str, lhs: tuple, rhs: tuple, result: tuple | None = None, **options: Any
) -> Case:
    return einsum(name, "ij,jk->ik", lhs, rhs, result, _MATRICES, **options)


def moe(name: str, equation: str, lhs: tuple, rhs: tuple, result: tuple, **options: Any) -> Case:
    """One of Algorithm 2's einsums, by its letters' sizes."""
    sizes = SIZES | options.pop("sizes", {})
    left, right = equation.split("->")[0].split(",")
    shapes = (tuple(sizes[c] for c in left), tuple(sizes[c] for c in right))
    return einsum(name, equation, lhs, rhs, result, shapes, **options)


def in_bfloat16(fn: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    return lambda *args: tf.cast(fn(*[tf.cast(a, tf.bfloat16) for a in args]), tf.float32)


def small_integers(*shape: int) -> np.ndarray:
    """Floats whose products and sums bfloat16 operands give exactly."""
    return np.round(floats(*shape) * 2)


BATCH = [
    # The same sharding of the batch in both operands and the result: nothing is sent, forward or backward.
    einsum(
        "batch",
        "bij,bjk->bik",
        (D, N, N),
        (D, N, N),
        collectives={},
        gradient_collectives={},
    ),
    einsum("batch_in_the_middle", "ibj,jbk->ibk", (N, D, N), (N, D, N), collectives={}),
    einsum(
        "batch_two_dimensions",
        "abij,abjk->abik",
        (X, Y, N, N),
        (X, Y, N, N),
        shapes=((4, 4, 3, 5), (4, 4, 5, 2)),
        mesh=XY,
        collectives={},
        gradient_collectives={},
    ),
    # The other operand is whole: each device takes its slice of it, and its gradient is gathered.
    einsum(
        "batch_of_one_operand",
        "bij,bjk->bik",
        (D, N, N),
        (N, N, N),
        collectives={},
        gradient_collectives={"all-gather": 1},
    ),
    # The operands disagree: one is brought to the other's sharding.
    einsum(
        "batch_against_columns",
        "bij,bjk->bik",
        (D, N, N),
        (N, N, D),
        inspect=moves(("all-to-all", 256)),
    ),
]

CONTRACTING = [
    # Figure 4b: one all-reduce, of the result.
    matrices(
        "contracting",
        (N, D),
        (D, N),
        inspect=moves(("all-reduce", 768)),
        gradient_collectives={},
        several_processes=True,
    ),
    # One operand is sharded and the other whole. A large one is contracted where it lies; differs: one that
    # is smaller than the result is gathered instead.
    einsum(
        "contracting_of_one_large_operand",
        "ij,jk->ik",
        (N, D),
        (N, N),
        shapes=((8, 64), (64, 4)),
        inspect=moves(("all-reduce", 128)),
    ),
    matrices(
        "contracting_of_one_small_operand",
        (N, D),
        (N, N),
        inspect=moves(("all-gather", 512)),
    ),
    einsum(
        "contracting_two_dimensions",
        "ijk,jkl->il",
        (N, X, Y),
        (X, Y, N),
        mesh=XY,
        collectives={"all-reduce": 2},
        gradient_collectives={},
    ),
    # Differs: a result that is annotated as sharded could be reduce-scattered; XLA for CPUs sums it all everywhere.
    matrices(
        "contracting_wanted_by_rows",
        (N, D),
        (D, N),
        (D, N),
        inspect=moves(("all-reduce", 768)),
        gradient_collectives={"all-gather": 1},
    ),
    # What to write instead: the parts of each sum as a batch, exchanged, and summed where they belong.
    Case(
        "contracting_by_all_to_all",
        lambda a, b: tf.reduce_sum(
            split(tf.einsum("idj,djk->dik", split(2 * a, 1, 8), split(b, 0, 8)), 1, 8), 0
        ),
        (floats(8, 8, 2), floats(8, 2, 24)),
        inspect=moves(("all-to-all", 768)),
    ),
    einsum(
        "contracting_to_a_scalar",
        "ij,ij->",
        (D, N),
        (D, N),
        shapes=((8, 16), (8, 16)),
        inspect=moves(("all-reduce", 4)),
        gradient_collectives={},
    ),
    # A label of one operand only is summed before the product, and that sum is what is reduced.
    Case(
        "contracting_a_label_of_one_operand",
        lambda a, b: tf.einsum("ijl,jk->ik", split(2 * a, 2, 8), b),
        (floats(6, 4, 8), floats(4, 5)),
        inspect=moves(("all-reduce", 6 * 4 * 4)),
    ),
    # Partial sums over x of a result that is sharded along y.
    matrices(
        "contracting_x_result_by_y",
        (Y, X),
        (X, N),
        (Y, N),
        mesh=XY,
        inspect=moves(("all-reduce", 192)),
        gradient_collectives={"all-reduce": 1},
    ),
    einsum(
        "partial_sums_then_cut_anew",
        "GSM,MH->GSH",
        (N, N, D),
        (D, N),
        (N, N, D),
        shapes=((8, 4, 16), (16, 8)),
        inspect=moves(("all-reduce", 1024)),
    ),
]

NON_CONTRACTING = [
    matrices("rows_of_lhs", (D, N), (N, N), collectives={}, gradient_collectives={"all-gather": 1}),
    # The gradient of the whole operand sums over the sharded dimension.
    matrices(
        "columns_of_rhs", (N, N), (N, D), collectives={}, gradient_collectives={"all-reduce": 1}
    ),
    einsum(
        "outer_product",
        "i,k->ik",
        (X,),
        (Y,),
        shapes=((8,), (12,)),
        mesh=XY,
        collectives={},
    ),
    # Both, each along its own axis: local, and each gradient is summed over the other's axis.
    matrices(
        "rows_and_columns_2d",
        (X, N),
        (N, Y),
        (X, Y),
        mesh=XY,
        collectives={},
        gradient_collectives={"all-reduce": 2},
        several_processes=True,
    ),
    # Differs from figure 4c: both along one axis. XLA gathers an operand, here the one that the result
    # does not follow; it loops only over operands above its threshold. `looped_einsum` always loops.
    matrices(
        "rows_and_columns_1d_by_rows",
        (D, N),
        (N, D),
        (D, N),
        inspect=moves(("all-gather", 1536)),
    ),
    matrices(
        "rows_and_columns_1d_by_columns",
        (D, N),
        (N, D),
        (N, D),
        inspect=moves(("all-gather", 512)),
    ),
    # Without annotations XLA gathers the smaller operand.
    matrices("rows_and_columns_1d_free", (D, N), (N, D), inspect=moves(("all-gather", 512))),
    # Both operands and the result sharded both ways: a row and a column of parts are gathered.
    matrices(
        "everything_2d",
        (X, Y),
        (X, Y),
        (X, Y),
        mesh=XY,
        inspect=moves(("all-gather", 384), ("all-gather", 256)),
    ),
]

MIXTURE_OF_EXPERTS = [
    moe(
        "moe_gating",
        "GSM,ME->GSE",
        (D, N, N),
        (N, N),
        (D, N, N),
        collectives={},
        gradient_collectives={"all-reduce": 1},  # of the gate's weights, which are whole
    ),
    # Figure 4a: by groups first, then the result goes from groups to experts.
    moe(
        "moe_dispatch",
        "GSEC,GSM->EGCM",
        (D, N, N, N),
        (D, N, N),
        (D, N, N, N),
        inspect=moves(("all-to-all", 384)),
        gradient_collectives={"all-to-all": 1},
        several_processes=True,
    ),
    moe(
        "moe_expert_in",
        "EGCM,EMH->EGCH",
        (D, N, N, N),
        (D, N, N),
        (D, N, N, N),
        collectives={},
        gradient_collectives={},
    ),
    # Back from experts to groups.
    moe(
        "moe_expert_out",
        "EGCH,EHM->GECM",
        (D, N, N, N),
        (D, N, N),
        (D, N, N, N),
        inspect=moves(("all-to-all", 384)),
        gradient_collectives={"all-to-all": 1},
    ),
    moe(
        "moe_combine",
        "GSEC,GECM->GSM",
        (D, N, N, N),
        (D, N, N, N),
        (D, N, N),
        collectives={},
        gradient_collectives={},
    ),
    # The model dimension along the other axis: each device sends what it has of it.
    moe(
        "moe_dispatch_2d",
        "GSEC,GSM->EGCM",
        (X, N, N, N),
        (X, N, Y),
        (X, N, N, Y),
        mesh=XY,
        sizes={"M": 8},
        inspect=moves(("all-to-all", 512)),
    ),
    moe(
        "moe_expert_in_2d",
        "EGCM,EMH->EGCH",
        (X, N, N, N),
        (X, N, Y),
        (X, N, N, Y),
        mesh=XY,
        sizes={"H": 8},
        collectives={},
        gradient_collectives={"all-reduce": 1},
    ),
    moe(
        "moe_expert_out_2d",
        "EGCH,EHM->EGCM",
        (X, N, N, Y),
        (X, Y, N),
        (X, N, N, N),
        mesh=XY,
        sizes={"H": 8},
        inspect=moves(("all-reduce", 1536)),
        gradient_collectives={},
    ),
    # Experts along x, groups along y: weights are shared along y, their gradients summed there.
    moe(
        "moe_experts_and_groups",
        "EGCM,EMH->EGCH",
        (X, Y, N, N),
        (X, N, N),
        (X, Y, N, N),
        mesh=XY,
        collectives={},
        gradient_collectives={"all-reduce": 1},
    ),
]

MIXED = [
    einsum(
        "batch_and_contracting",
        "bij,bjk->bik",
        (X, N, Y),
        (X, Y, N),
        (X, N, N),
        mesh=XY,
        inspect=moves(("all-reduce", 1024)),
        gradient_collectives={},
    ),
    einsum(
        "batch_and_non_contracting",
        "bij,bjk->bik",
        (X, Y, N),
        (X, N, N),
        (X, Y, N),
        mesh=XY,
        collectives={},
        gradient_collectives={"all-reduce": 1},
    ),
    einsum(
        "contracting_and_non_contracting",
        "bij,bjk->bik",
        (N, X, Y),
        (N, Y, N),
        (N, X, N),
        mesh=XY,
        inspect=moves(("all-reduce", 1024)),
        gradient_collectives={"all-reduce": 1},
    ),
    einsum(
        "batch_contracting_and_non_contracting",
        "bij,bjk->bik",
        (X, Y, Z),
        (X, Z, N),
        (X, Y, N),
        mesh="x:2,y:2,z:2",
        inspect=moves(("all-reduce", 512)),
        gradient_collectives={"all-reduce": 1},
    ),
]

FORMS = [
    einsum(
        "ellipsis",
        "...ij,jk->...ik",
        (X, N, Y),
        (Y, N),
        shapes=((4, 3, 8), (8, 5)),
        mesh=XY,
        inspect=moves(("all-reduce", 120)),
        gradient_collectives={"all-reduce": 1},
    ),
    Case(
        "repeated_label",
        lambda a, b: tf.einsum("iij,jk->ik", split(2 * a, 2, 8), split(b, 0, 8)),
        (floats(6, 6, 8), floats(8, 5)),
        inspect=moves(("all-reduce", 120)),
    ),
    # Pairs are contracted one after the other: rows and columns meet, and one operand is gathered.
    Case(
        "three_operands",
        lambda a, b, c: tf.einsum("ij,jk,kl->il", split(a, 0, 8), b, split(c, 1, 8)),
        (floats(8, 6), floats(6, 4), floats(4, 8)),
        inspect=moves(("all-gather", 128)),
    ),
    Case(
        "three_operands_2d",
        lambda a, b, c: tf.einsum(
            "ij,jk,kl->il",
            mesh_split(a, current_mesh(), (X, N)),
            mesh_split(b, current_mesh(), (N, Y)),
            mesh_split(c, current_mesh(), (Y, N)),
        ),
        (floats(8, 6), floats(6, 8), floats(8, 5)),
        mesh=XY,
        collectives={"all-reduce": 1},
    ),
    Case(
        "matmul_transpose_b",
        lambda a, b: tf.matmul(split(a, 1, 8), split(b, 1, 8), transpose_b=True),
        (floats(6, 16), floats(5, 16)),
        splits=((N, D), (N, D)),
        inspect=moves(("all-reduce", 120)),
        gradient_collectives={},
    ),
    Case(
        "matmul_transpose_a",
        lambda a, b: tf.matmul(split(a, 0, 8), split(b, 0, 8), transpose_a=True),
        (floats(16, 6), floats(16, 5)),
        splits=((D, N), (D, N)),
        inspect=moves(("all-reduce", 120)),
        gradient_collectives={},
    ),
    # The batch of 1 is broadcast; its gradient is summed over the devices.
    Case(
        "matmul_broadcast_batch",
        lambda a, b: tf.matmul(split(a, 0, 8), b),
        (floats(8, 4, 6), floats(1, 6, 5)),
        collectives={},
        gradient_collectives={"all-reduce": 1},
    ),
    Case(
        "tensordot",
        lambda a, b: tf.tensordot(split(a, 1, 8), split(b, 0, 8), [[1, 2], [0, 1]]),
        (floats(3, 8, 2), floats(8, 2, 5)),
        inspect=moves(("all-reduce", 60)),
    ),
    # On CPUs bfloat16 is widened to float32 before it is multiplied, and so are the sums.
    Case(
        "bfloat16_contracting",
        in_bfloat16(lambda a, b: tf.einsum("ij,jk->ik", split(a, 1, 8), split(b, 0, 8))),
        (small_integers(8, 16), small_integers(16, 4)),
        inspect=moves(("all-reduce", 128)),
        gradient_elsewhere=2**-7,  # one bit of bfloat16
    ),
    Case(
        "integers_contracting",
        lambda a, b: tf.einsum("ij,jk->ik", split(a, 1, 8), split(b, 0, 8)),
        (ints(4, 16, below=99), ints(16, 3, below=99)),
        inspect=moves(("all-reduce", 48)),
    ),
]

CASES = [*BATCH, *CONTRACTING, *NON_CONTRACTING, *MIXTURE_OF_EXPERTS, *MIXED, *FORMS]
