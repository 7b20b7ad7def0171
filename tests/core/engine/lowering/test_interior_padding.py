"""Padding between elements is lowered as reshapes and padding at the edges: the same tensor."""

import re

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

from lingvo_moe.core.engine.eager.testing import run_sharded, run_single
from lingvo_moe.core.engine.lowering.lowering import lower
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.sharding import single_device


@pytest.mark.parametrize("shape, low, high, interior", [
    ((5, 4), (0, 0), (0, 0), (1, 0)),
    ((5, 4), (1, 7), (3, 0), (2, 3)),
    ((5, 4), (-2, -3), (0, -1), (2, 1)),
    ((5, 4), (-9, 0), (12, 0), (3, 0)),
    ((1, 4), (2, 0), (1, 0), (3, 2)),
    ((0, 4), (2, 0), (1, 0), (3, 2)),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16, tf.int32])
def test_the_tensor_is_the_same(shape, low, high, interior, dtype):
    def pad(x):
        return tf.cast(gen_xla_ops.xla_pad(tf.cast(x, dtype), 7, low, high, interior), tf.float32)

    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    got, _ = run_sharded(pad, [x], single_device())
    np.testing.assert_array_equal(got, run_single(pad, [x]))
    text = lower(pad, [TensorSpec(shape, "float32")], single_device()).Text()
    assert "stablehlo.pad" in text and not re.search(r"interior = \[.*[1-9].*\]", text)
