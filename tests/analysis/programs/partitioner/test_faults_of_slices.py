"""The detector warns of slices from starts of run time that XLA gets wrong out of range; a clipped start is right."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.analysis.programs.hlo.module import parse_module
from lingvo_moe.analysis.programs.partitioner import known_faults as kf
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.engine.pjrt import PjrtEngine
from lingvo_moe.core.private.tensorflow import gen_xla_ops
from lingvo_moe.core.sharding import Mesh, replicate, split

MESH = Mesh.parse("d:4")


def _annotated(x, how):
    return split(x, 0, 4) if how == "sharded" else replicate(x)


def _check(fn, args, starts, is_wrong, capfd):
    """Checks what a program of (*args, start) computes, and that it is named where it is wrong from other starts.

    `starts`: start -> the right result, and whether the start is in range.
    """
    specs = [TensorSpec(a.shape, a.dtype.name) for a in (*args, np.int32())]
    capfd.readouterr()
    compiled = PjrtEngine(MESH).Build(fn, specs)
    assert ("partitioner may compute wrong" in capfd.readouterr().err) == is_wrong
    for start, (want, is_inside) in starts.items():
        is_right = np.array_equal(compiled(*args, np.int32(start)), want)
        assert is_right == (is_inside or not is_wrong), start


@pytest.mark.parametrize("is_clipped", [False, True])
@pytest.mark.parametrize("rows, size, before, after", [
    (16, 8, "sharded", "sharded"),
    (15, 8, "whole", "sharded"),
    (16, 8, "sharded", "whole"),
    (16, 7, "sharded", "sharded"),
])  # fmt: skip
def test_slices(rows, size, before, after, is_clipped, capfd):
    a = np.arange(rows * 6, dtype=np.float32).reshape(rows, 6)

    def fn(a, start):
        start = tf.clip_by_value(start, 0, rows - size) if is_clipped else start
        a = _annotated(a + 5.0, before)
        return _annotated(tf.slice(a, tf.stack([start, 0]), [size, 6]), after) * 2.0

    starts = {}
    for start in (-3, 2, rows - size, rows - size + 2, rows + 9):
        first = min(max(start, 0), rows - size)
        starts[start] = 2 * a[first : first + size] + 10, start <= rows - size
    is_wrong = after == "sharded" and size % 4 == 0 and not is_clipped
    _check(fn, [a], starts, is_wrong, capfd)


@pytest.mark.parametrize("size, after, is_clipped", [
    (1, "sharded", False),
    (1, "sharded", True),
    (2, "sharded", False),
    (1, "whole", False),
])  # fmt: skip
def test_replaced_elements(size, after, is_clipped, capfd):
    a = np.arange(96, dtype=np.float32).reshape(16, 6)
    update = np.full((size, 6), -1.0, np.float32)

    def fn(a, update, start):
        start = tf.clip_by_value(start, 0, 16 - size) if is_clipped else start
        a = _annotated(a + 5.0, "sharded")
        y = gen_xla_ops.xla_dynamic_update_slice(a, update, tf.stack([start, 0]))
        return _annotated(y, after) * 2.0

    starts = {}
    for start in (-2, 3, 16 - size, 17):
        first = min(max(start, 0), 16 - size)
        want = a + 5.0
        want[first : first + size] = update
        starts[start] = 2 * want, first == start
    _check(fn, [a, update], starts, after == "sharded" and size == 1 and not is_clipped, capfd)


@pytest.mark.parametrize("start, is_named", [
    ("%i = s32[] parameter(1)", True),
    ("%i = s32[] constant(3)", False),
    ("%p = s32[] parameter(1)\n  %c = s32[] constant(2)\n  %i = s32[] add(%p, %c)", True),
    ("%p = s32[] parameter(1)\n  %c = s32[] constant(2)\n  %i = s32[] minimum(%p, %c)", False),
    ("%p = s32[] parameter(1)\n  %c = s32[] constant(2)\n  %i = s32[] clamp(%c, %p, %c)", False),
])  # fmt: skip
def test_starts_that_are_followed(start, is_named):
    sharded = "sharding={devices=[4,1]<=[4]}"
    module = parse_module(f"""HloModule jit_call, num_partitions=4

ENTRY %main (x: f32[16,6], start: s32[]) -> f32[8,6] {{
  %x = f32[16,6] parameter(0), {sharded}
  {start}
  %zero = s32[] constant(0)
  ROOT %r = f32[8,6] dynamic-slice(%x, %i, %zero), dynamic_slice_sizes={{8,6}}, {sharded}
}}
""")
    assert [fault.kind for fault in kf.known_faults(module)] == [kf.SLICE] * is_named


def test_a_warning_has_line_and_remedy(capfd):
    def fn(a, start):
        return split(tf.slice(split(a, 0, 4), tf.stack([start, 0]), [8, 6]), 0, 4)  # the line

    PjrtEngine(MESH).Build(fn, [TensorSpec((16, 6), "float32"), TensorSpec((), "int32")])
    error = capfd.readouterr().err
    assert "warning: program 'fn': XLA's partitioner may compute wrong numbers for 1" in error
    assert "test_faults_of_slices.py" in error and "tf.clip_by_value(start, 0, 8)" in error
