"""A small program with one collective, for tests of the compilers."""

import tensorflow as tf

from lingvo_moe.core import sharding
from lingvo_moe.core.engine.lowering.lowering import lower
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.sharding import Mesh


def gram(rows, dtype="float32", devices=8):
    """Computes x x^T of x [rows, 512], sharded by rows; the result is replicated."""
    return lower(
        lambda x: sharding.replicate(tf.matmul(x, x, transpose_b=True)),
        [TensorSpec((rows, 512), dtype, ("expert", None))],
        Mesh(("expert",), (devices,)),
        name="gram",
    )
