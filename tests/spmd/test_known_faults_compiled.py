"""The detector names every case of this suite that XLA's partitioner computes wrongly, and nothing else.

Programs are compiled and not run, except for a few wrong ones that are only here. If one of these passes, XLA has fixed
the fault, and its condition in lingvo_moe/analysis/programs/partitioner can go.
"""

import cases_halo
import cases_pooling
import cases_uneven_indexing as indexing
import pytest
import tensorflow as tf
from cases_halo import YX, case, conv, over
from random_einsum import Group
from spmd_case import Case, check, floats, ints
from test_fuzz import KNOWN

from lingvo_moe.analysis.programs.aot.partitioning import partition
from lingvo_moe.analysis.programs.hlo.module import parse_module
from lingvo_moe.analysis.programs.partitioner import known_faults as kf
from lingvo_moe.core.engine.lowering.lowering import lower
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.sharding import Mesh, split

pytestmark = pytest.mark.slow  # in all


def _module(fn, args, mesh, splits=None):
    specs = [
        TensorSpec(a.shape, a.dtype.name, s or ())
        for a, s in zip(args, splits or [None] * len(args), strict=True)
    ]
    return parse_module(partition(lower(fn, specs, mesh)).before)


def _forward(case):
    return _module(case.fn, case.args, Mesh.parse(case.mesh), case.splits)


def _gradient(case):
    """The gradient of a sum whose terms have different derivatives, nowhere zero."""

    def gradients(*args):
        floating = [a for a in args if a.dtype.is_floating]
        with tf.GradientTape() as tape:
            tape.watch(floating)
            loss = tf.reduce_sum(tf.sin(case.fn(*args) + 1.0))
        return tuple(tf.convert_to_tensor(g) for g in tape.gradient(loss, floating))

    return _module(gradients, case.args, Mesh.parse(case.mesh), case.splits)


def _group(group: Group):
    return _module(group, group.Args(), group.mesh, group.Splits())


def _told(module):
    return [(fault.kind, fault.op.rpartition("/")[2]) for fault in kf.known_faults(module)]


*SCATTERS, EMBEDDING = indexing.WRONG


@pytest.mark.parametrize("case", SCATTERS, ids=str)
def test_scatters(case):
    ((kind, op),) = _told(_forward(case))
    assert kind == kf.SCATTER
    assert "Segment" in op or "Scatter" in op


def test_gradient_of_an_embedding():
    assert _told(_forward(EMBEDDING)) == []
    assert _told(_gradient(EMBEDDING)) == [(kf.SCATTER, "UnsortedSegmentSum")]


@pytest.mark.parametrize("case", cases_halo.WRONG_KERNEL_GRADIENT, ids=str)
def test_kernel_gradients(case):
    padded = case.name == "stride_3_last_window_padded"
    kind = kf.PADDED_WINDOWS if padded else kf.COPIES
    assert _told(_forward(case)) == []
    assert _told(_gradient(case)) == [(kind, "Conv2DBackpropFilter")]


@pytest.mark.parametrize("case", cases_pooling.WRONG, ids=str)
def test_pooling(case):
    assert _told(_forward(case)) == []
    assert _told(_gradient(case)) == [(kf.POOLING, "MaxPoolGrad")]


KINDS = {
    "rows whose devices come in different orders": (kf.ADDING_UP, "Einsum_1"),
    "operands that number a row's devices differently": (kf.EXCHANGED, "Einsum"),
    "a batch dimension sharded finer in the result": (kf.BATCH, "Einsum"),
    "a batch dimension that takes the sum's devices from another": (kf.BATCH, "Einsum"),
    "a sum over dimensions that the operands shard differently": (kf.SUMS, "Einsum"),
}


@pytest.mark.parametrize("pattern", KNOWN)
def test_products(pattern):
    assert _told(_group(KNOWN[pattern])) == [KINDS[pattern]]


# Rows over x, output features over y. Right in cases_halo, where the result has more features than the input.
KERNEL_GRADIENT = case(
    "4_to_4_features",
    (4, 16, 4, 4),
    (3, 3, 4, 4),
    conv(
        over(YX, None, "x", None, None),
        kernel=over(YX, None, None, None, "y"),
        result=over(YX, None, "x", None, "y"),
    ),
    None,
    None,
    mesh=YX,
)
IN_COPIES = Case(
    "segment_sum_by_ids_cut_alike_in_copies",
    lambda a, i: tf.math.unsorted_segment_sum(split(a, 0, 4) + 5.0, split(i, 0, 4), 4),
    (floats(15, 6), ints(15, below=4)),
    whole=True,
    gradients=(),
)


IN_BATCHES = Case(
    "gather_in_batches_over_two_and_over_three_devices",
    lambda a, i: tf.gather(
        over("a:2,b:3", "b", None)(a), over("a:2,b:3", "a", None)(i), batch_dims=1
    ),
    (floats(12, 15), ints(12, 7, below=15)),
    mesh="a:2,b:3",
    whole=True,
)
ONE_INDEX = Case(
    "one_row_into_a_tensor_that_was_just_sharded",
    lambda a, u: tf.tensor_scatter_nd_update(split(a, 0, 8), [[12]], u),
    (floats(16, 6), floats(1, 6)),
    gradients=(),
)


@pytest.mark.parametrize("case", [KERNEL_GRADIENT, IN_COPIES, IN_BATCHES, ONE_INDEX], ids=str)
@pytest.mark.xfail(strict=True, raises=AssertionError, reason="XLA's partitioner")
def test_further_wrong_numbers(case):
    check(case)


def test_further_wrong_numbers_are_told():
    assert _told(_forward(KERNEL_GRADIENT)) == []
    assert (kf.COPIES, "Conv2DBackpropFilter") in _told(_gradient(KERNEL_GRADIENT))
    assert _told(_forward(IN_BATCHES)) == [(kf.BATCHES, "GatherV2")]
    assert _told(_forward(ONE_INDEX)) == [(kf.ONE_INDEX, "TensorScatterUpdate")]
    assert _told(_forward(IN_COPIES)) == [(kf.SCATTER, "UnsortedSegmentSum")]


def _named(cases, name):
    (found,) = [c for c in cases if c.name == name]
    return found


@pytest.mark.parametrize("case", [
    _named(cases_halo.CASES, "batch_and_rows"),
    _named(cases_halo.CASES, "rows_and_output_feature"),
    _named(cases_halo.CASES, "figure_11"),
    _named(cases_pooling.CASES, "max_of_shifts"),
    _named(cases_pooling.CASES, "max_window_5_stride_3_same_24"),
    _named(indexing.CASES, "segment_sum_padded_by_hand"),
    _named(indexing.CASES, "embedding_by_cut_ids"),
], ids=str)  # fmt: skip
def test_right_ones_are_not_told(case):
    assert _told(_forward(case)) == _told(_gradient(case)) == []
