"""Manual regions: values, gradients and collectives equal those of the functions that they replace."""

import numpy as np
import pytest
import tensorflow as tf
from cases_manual import CASES
from spmd_case import check

from lingvo_moe import xla_sharding as xs


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case):
    check(case, CASES)


@pytest.mark.parametrize("by, calls", [(1, 1), (-1, 1), (3, 1), (1, 2)])
def test_rotate_gives_the_tensor_of_the_device_further_along_the_axis(by, calls):
    """Device i of a ring of n holds after t calls what device (i + t) % n began with."""

    def region(block):
        for _ in range(calls):
            block = xs.rotate(block, "ring", by=by)
        return block

    rows = [("ring", None)]
    ring = xs.shard_function(xs.manual_region(region, rows, rows[0]), mesh="ring:8,rest:1")
    blocks = ring(tf.range(8, dtype=tf.float32)[:, tf.newaxis])[:, 0]
    np.testing.assert_array_equal(blocks, [(i + calls * by) % 8 for i in range(8)])
