"""Section 3.3.3: uneven partitions, with every operator's identity element in the padding."""

import cases_uneven
import cases_uneven_indexing as indexing
import numpy as np
import pytest
import tensorflow as tf
from spmd_case import check

from lingvo_moe.core.engine.eager.testing import run_sharded
from lingvo_moe.core.sharding import Mesh, ShardingError, split

pytestmark = pytest.mark.slow  # in all


@pytest.mark.parametrize("case", cases_uneven.CASES, ids=str)
def test_uneven(case):
    check(case, cases_uneven.CASES)


@pytest.mark.parametrize("case", indexing.CASES, ids=str)
def test_uneven_indexing(case):
    check(case, indexing.CASES)


@pytest.mark.xfail(
    strict=True, raises=AssertionError, reason="XLA lets the padding of cut updates into row 0"
)
@pytest.mark.parametrize("case", indexing.WRONG, ids=str)
def test_scatter_of_cut_updates_by_whole_indices(case):
    check(case)


def test_what_whole_indices_get_wrong():
    """Row 0 also gets the row of padding, zeros plus five; all other rows are right."""
    rows, ids = np.ones((15, 2), np.float32), (np.arange(15) % 4).astype(np.int32)

    def segments(rows, ids):
        return tf.math.unsorted_segment_sum(split(rows, 0, 8) + 5.0, ids, 4)

    got, _ = run_sharded(segments, [rows, ids], Mesh.parse("d:8"), results=None)
    want = 6.0 * np.repeat([[4], [4], [4], [3]], 2, axis=1)
    assert np.array_equal(got - want, np.repeat([[5], [0], [0], [0]], 2, axis=1))


def test_fewer_elements_than_partitions_is_refused():
    with pytest.raises(ShardingError, match="7 elements, fewer than 8 partitions"):
        run_sharded(
            lambda a: split(a, 0, 8) * 2.0, [np.ones((7, 4), np.float32)], Mesh.parse("d:8")
        )
