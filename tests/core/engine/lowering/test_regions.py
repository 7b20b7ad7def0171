"""Manual regions share nothing with the rest of a lowered program."""

import tensorflow as tf

from lingvo_moe.core.engine.lowering.lowering import lower
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.sharding.manual import manual_region

MESH = Mesh.parse("d:8")
ROWS = ("d", None)
ENTER = "SPMDFullToShardShape"


def _text(fn) -> str:
    return lower(fn, [TensorSpec((8, 4), "float32")], MESH).Text()


def test_a_constant_that_both_sides_use_enters_the_region():
    """The zero that sums start from becomes a constant of the region, replicated."""

    def fn(x):
        return tf.reduce_sum(manual_region(lambda x: x + tf.reduce_sum(x), [ROWS], ROWS)(x))

    lines = _text(fn).splitlines()
    entered = [line for line in lines if ENTER in line]
    assert [line.rpartition("-> ")[2] for line in entered] == ["tensor<1x4xf32>", "tensor<f32>"]
    zero = entered[1].split("=")[0].strip()
    sums = [line for line in lines if "stablehlo.reduce(" in line]
    assert [f"init: {zero})" in line for line in sums] == [True, False]


def test_so_does_a_captured_tensor():
    """It is an argument of the function that TensorFlow traced, but a constant of the program."""
    captured = tf.constant([1.0, 2.0, 3.0, 4.0])

    def fn(x):
        return captured * manual_region(lambda x: x + captured, [ROWS], ROWS)(x)

    entered = [line for line in _text(fn).splitlines() if ENTER in line]
    assert [line.rpartition("-> ")[2] for line in entered] == ["tensor<1x4xf32>"] * 2


def test_so_does_a_loop_s_counter_where_it_meets_local_tensors():
    def fn(x):
        def body(x):
            step = lambda i, x: (i + 1, x * tf.cast(i, x.dtype))  # noqa: E731
            start = (tf.constant(0), x)
            return tf.while_loop(lambda i, _: i < 3, step, start, maximum_iterations=3)[1]

        return manual_region(body, [ROWS], ROWS)(x)

    entered = [line for line in _text(fn).splitlines() if ENTER in line]
    assert len(entered) == 2 and "tensor<1x4xf32>" in entered[0]
    assert entered[1].startswith(" " * 6), "not in the loop's body"  # the condition stays as it is
