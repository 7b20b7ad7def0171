"""Operations forward and backward, under every pair of shardings of an operand and of the result."""

import numpy as np
import pytest
import tensorflow as tf
from backward_operations import OPERATIONS
from sharding_pairs import GRID, ROW, check_pairs
from spmd_case import floats, ints

from lingvo_moe.core.engine.lowering import embedding

pytestmark = pytest.mark.slow  # in all

X, ODD = floats(12, 8), floats(13, 9)


def _bfloat16(x: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.cast(x, tf.bfloat16)[1::3], tf.float32)


# XLA's partitioner computes the gradients of these wrongly, unless lowering writes them in another way.
STRIDED = {
    "by_2": (lambda x: x[::2], X),
    "by_3_unevenly": (lambda x: x[1::3], ODD),
    "along_both": (lambda x: x[1::2, ::3], ODD),
    "backwards_along_both": (lambda x: x[10:2:-3, ::-2], ODD),
    "of_bfloat16": (_bfloat16, floats(12, 8).round()),
}


@pytest.mark.parametrize("name", STRIDED)
def test_strided_slices(name):
    fn, x = STRIDED[name]
    check_pairs(fn, x, mesh=GRID)


VECTOR, ROWS = floats(13), ints(7, 1, below=13)
# Where some devices hold copies, XLA computes more scatters wrongly: also of indices that are sharded unevenly.
INDICES = {
    "gather": (tf.gather_nd, VECTOR, ROWS),
    "scatter_add": (tf.tensor_scatter_nd_add, VECTOR, ROWS, floats(7)),
    "scatter_max": (tf.tensor_scatter_nd_max, -9 - abs(VECTOR), ROWS, -9 - abs(floats(7))),
}


@pytest.mark.parametrize("name", INDICES)
def test_indices_over_two_axes(name):
    check_pairs(*INDICES[name], mesh=GRID)


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name):
    check_pairs(*OPERATIONS[name])


@pytest.mark.parametrize("mesh", [ROW, GRID], ids=str)
def test_slices_from_beyond_the_end(mesh):
    """Every pair that is named where a start is out of range is wrong, and no other."""
    check_pairs(
        lambda x, start: tf.slice(x, start, [8, 4]),
        X,
        np.array([11, 7], np.int32),
        mesh=mesh,
        reference=lambda x, start: tf.slice(x, tf.clip_by_value(start, 0, [4, 4]), [8, 4]),
    )


def test_strided_slices_as_tensorflow_writes_their_gradients(monkeypatch):
    """If this fails, XLA has been mended, and lowering need not write them in another way."""
    monkeypatch.setattr(embedding, "without_interior_padding", lambda module: None)
    check_pairs(lambda x: x[::3], floats(13, 1))
    with pytest.raises(Exception, match=r"Failed after spmd-partitioning"):
        check_pairs(lambda x: x[::2], floats(12, 1), mesh=GRID)
