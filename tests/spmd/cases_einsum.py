"""Einsum (section 3.3.2): every way to shard batch, contracting and non-contracting dimensions.

Letters of the mixture of experts: G group, S token in group, E expert, C capacity slot, M model, H hidden.
Others are b batch, i and k non-contracting, j contracting. Where a case differs from what the paper leads
one to expect, a comment says so.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from spmd_case import Case, floats, moves

from lingvo_moe.core.sharding import current_mesh, mesh_split, split

XY = "x:2,y:4"
_MATRICES = {"i": 8, "j": 16, "k": 24}
_BATCHED = dict.fromkeys("bijk", 8)
_EXPERTS = {"G": 8, "S": 4, "E": 8, "C": 2, "M": 6, "H": 10}
LOCAL: dict[str, int] = {}
ONE_REDUCE, ONE_GATHER, ONE_EXCHANGE = {"all-reduce": 1}, {"all-gather": 1}, {"all-to-all": 1}


def einsum(name: str, equation: str, cuts: str, sizes: Mapping[str, int], **options: Any) -> Case:
    """Two operands of these sizes, sharded as `cuts` says, with a mesh axis or a dot in the place of each letter.

    If it names the result, that is annotated too; else it is left to the partitioner.
    """
    terms, (*operands, result) = equation.replace("->", ",").split(","), _mappings(cuts)

    def fn(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
        mesh = current_mesh()
        y = tf.einsum(
            equation, mesh_split(2.0 * a, mesh, operands[0]), mesh_split(b, mesh, operands[1])
        )
        return y if result is None else mesh_split(y, mesh, result) * 1.5

    args = [floats(*(sizes[c] for c in t), seed=i) for i, t in enumerate(terms[:2])]
    return Case(name, fn, args, splits=operands, **options)


def _mappings(cuts: str) -> list[tuple[str | None, ...] | None]:
    """The mapping of each operand and of the result; None for a result without one."""
    operands, arrow, result = cuts.partition("->")
    found = [tuple(None if c == "." else c for c in t) for t in (*operands.split(","), result)]
    return found if arrow else [*found[:2], None]


def matrices(name: str, cuts: str, **options: Any) -> Case:
    return einsum(name, "ij,jk->ik", cuts, _MATRICES, **options)


def batched(name: str, cuts: str, **options: Any) -> Case:
    return einsum(name, "bij,bjk->bik", cuts, _BATCHED, **options)


def moe(name: str, equation: str, cuts: str, sizes: Mapping[str, int] = {}, **options: Any) -> Case:
    """One of Algorithm 2's einsums."""
    return einsum(name, equation, cuts, _EXPERTS | sizes, **options)


def in_bfloat16(fn: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    return lambda *args: tf.cast(fn(*[tf.cast(a, tf.bfloat16) for a in args]), tf.float32)


def small_integers(*shape: int) -> np.ndarray:
    """Floats whose products and sums bfloat16 operands give exactly."""
    return np.round(floats(*shape) * 2)


BATCH = [
    # The same sharding of the batch in both operands and the result: nothing is sent, forward or backward.
    batched("batch", "d..,d..", forward=LOCAL, backward=LOCAL),
    einsum("batch_in_the_middle", "ibj,jbk->ibk", ".d.,.d.", _BATCHED, forward=LOCAL),
    einsum("batch_two_dimensions", "abij,abjk->abik", "xy..,xy..", {"a": 4, "b": 4, "i": 3, "j": 5, "k": 2}, mesh=XY,
        forward=LOCAL, backward=LOCAL),
    # The other operand is whole: each device takes its slice of it, and its gradient is gathered.
    batched("batch_of_one_operand", "d..,...", forward=LOCAL, backward=ONE_GATHER),
    # The operands disagree: one is brought to the other's sharding.
    batched("batch_against_columns", "d..,..d", inspect=moves(("all-to-all", 256))),
]  # fmt: skip

CONTRACTING = [
    # Figure 4b: one all-reduce, of the result.
    matrices("contracting", ".d,d.", inspect=moves(("all-reduce", 768)), backward=LOCAL, several_processes=True),
    # One operand is sharded and the other whole. A large one is contracted where it lies; differs: one that
    # is smaller than the result is gathered instead.
    einsum("contracting_of_one_large_operand", "ij,jk->ik", ".d,..", {"i": 8, "j": 64, "k": 4},
        inspect=moves(("all-reduce", 128))),
    matrices("contracting_of_one_small_operand", ".d,..", inspect=moves(("all-gather", 512))),
    einsum("contracting_two_dimensions", "ijk,jkl->il", ".xy,xy.", dict.fromkeys("ijkl", 8), mesh=XY,
        forward={"all-reduce": 2}, backward=LOCAL),
    # Differs: a result that is annotated as sharded could be reduce-scattered; XLA for CPUs sums it all everywhere.
    matrices("contracting_wanted_by_rows", ".d,d.->d.", inspect=moves(("all-reduce", 768)), backward=ONE_GATHER),
    # What to write instead: the parts of each sum as a batch, exchanged, and summed where they belong.
    Case(
        "contracting_by_all_to_all",
        lambda a, b: tf.reduce_sum(
            split(tf.einsum("idj,djk->dik", split(2 * a, 1, 8), split(b, 0, 8)), 1, 8), 0
        ),
        (floats(8, 8, 2), floats(8, 2, 24)),
        inspect=moves(("all-to-all", 768)),
    ),
    einsum("contracting_to_a_scalar", "ij,ij->", "d.,d.", _MATRICES, inspect=moves(("all-reduce", 4)), backward=LOCAL),
]  # fmt: skip

NON_CONTRACTING = [
    matrices("rows_of_lhs", "d.,..", forward=LOCAL, backward=ONE_GATHER),
    # The gradient of the whole operand sums over the sharded dimension.
    matrices("columns_of_rhs", "..,.d", forward=LOCAL, backward=ONE_REDUCE),
    einsum("outer_product", "i,k->ik", "x,y", {"i": 8, "k": 12}, mesh=XY, forward=LOCAL),
    # Both, each along its own axis: local, and each gradient is summed over the other's axis.
    matrices("rows_and_columns_2d", "x.,.y->xy", mesh=XY, forward=LOCAL, backward={"all-reduce": 2},
        several_processes=True),
    # Differs from figure 4c: both along one axis. XLA gathers an operand, here the one that the result
    # does not follow; it loops only over operands above its threshold. `looped_einsum` always loops.
    matrices("rows_and_columns_1d_by_rows", "d.,.d->d.", inspect=moves(("all-gather", 1536))),
    # Both operands and the result sharded both ways: a row and a column of parts are gathered.
    matrices("everything_2d", "xy,xy->xy", mesh=XY, inspect=moves(("all-gather", 384), ("all-gather", 256))),
]  # fmt: skip

MIXTURE_OF_EXPERTS = [
    moe(
        "moe_gating",
        "GSM,ME->GSE",
        "d..,..->d..",
        forward=LOCAL,
        backward=ONE_REDUCE,  # of the gate's weights, which are whole
    ),
    # Figure 4a: by groups first, then the result goes from groups to experts.
    moe("moe_dispatch", "GSEC,GSM->EGCM", "d...,d..->d...", inspect=moves(("all-to-all", 384)), backward=ONE_EXCHANGE,
        several_processes=True),
    moe("moe_expert_in", "EGCM,EMH->EGCH", "d...,d..->d...", forward=LOCAL, backward=LOCAL),
    # Back from experts to groups.
    moe("moe_expert_out", "EGCH,EHM->GECM", "d...,d..->d...", inspect=moves(("all-to-all", 384)),
        backward=ONE_EXCHANGE),
    moe("moe_combine", "GSEC,GECM->GSM", "d...,d...->d..", forward=LOCAL, backward=LOCAL),
    # The model dimension along the other axis: each device sends what it has of it.
    moe("moe_dispatch_2d", "GSEC,GSM->EGCM", "x...,x.y->x..y", {"M": 8}, mesh=XY, inspect=moves(("all-to-all", 512))),
]  # fmt: skip

FORMS = [
    Case(
        "matmul_transpose_a",
        lambda a, b: tf.matmul(split(a, 0, 8), split(b, 0, 8), transpose_a=True),
        (floats(16, 6), floats(16, 5)),
        splits=(("d", None), ("d", None)),
        inspect=moves(("all-reduce", 120)),
        backward=LOCAL,
    ),
    Case("tensordot", lambda a, b: tf.tensordot(split(a, 1, 8), split(b, 0, 8), [[1, 2], [0, 1]]),
        (floats(3, 8, 2), floats(8, 2, 5)), inspect=moves(("all-reduce", 60))),
    # On CPUs bfloat16 is widened to float32 before it is multiplied, and so are the sums.
    Case(
        "bfloat16_contracting",
        in_bfloat16(lambda a, b: tf.einsum("ij,jk->ik", split(a, 1, 8), split(b, 0, 8))),
        (small_integers(8, 16), small_integers(16, 4)),
        inspect=moves(("all-reduce", 128)),
        gradient_elsewhere=2**-7,  # one bit of bfloat16
    ),
]  # fmt: skip

CASES = [*BATCH, *CONTRACTING, *NON_CONTRACTING, *MIXTURE_OF_EXPERTS, *FORMS]
