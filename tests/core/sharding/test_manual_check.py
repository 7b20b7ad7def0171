"""Wrong use of manual regions raises while a function is traced, and right use does not."""

import pytest
import tensorflow as tf
from refusals import refuses

from lingvo_moe.core import sharding
from lingvo_moe.core.engine.lowering.lowering import lower
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.engine.tf_engine import TfEngine
from lingvo_moe.core.sharding import Mesh, ShardingError, use_mesh
from lingvo_moe.core.sharding.manual import (
    all_reduce,
    auto_to_manual,
    device_index,
    manual_region,
    manual_to_auto,
    rotate,
)
from lingvo_moe.core.sharding.manual_check import check_regions

MESH = Mesh.parse("d:8")
ROWS = ("d", None)


def _trace(fn, *shapes, mesh=MESH):
    @tf.function(autograph=False, jit_compile=True)
    def traced(*args):
        with use_mesh(mesh):
            return fn(*args)

    graph = traced.get_concrete_function(*[tf.TensorSpec(s) for s in shapes]).graph
    check_regions(graph, "step", len(shapes), [f"result[{i}]" for i in range(len(graph.outputs))])
    return graph


def _loop(body, x, turns=3):
    return tf.while_loop(
        lambda i, *_: i < turns,
        lambda i, x: (i + 1, body(x)),
        (tf.constant(0), x),
        maximum_iterations=turns,
    )[1]


def _left_open(x):
    return x * 2, auto_to_manual(x, ROWS) * 2


def _left_open_in_a_loop(x):
    return _loop(lambda y: y + 1, auto_to_manual(x, ROWS))


def _left_open_in_a_function(x):
    return tf.function(lambda x: auto_to_manual(x, ROWS), autograph=False)(x)


def _left_open_by_a_gradient(x):
    with tf.GradientTape() as tape:
        local = auto_to_manual(x, ROWS)
        tape.watch(local)
        y = manual_to_auto(local * local, ROWS)
    return tape.gradient(y, local)


def _mixed(x):
    return manual_to_auto(auto_to_manual(x, ROWS) + x[:1], ROWS)


def _mixed_in_a_loop(x):
    local = auto_to_manual(x, ROWS)
    return manual_to_auto(_loop(lambda y: y * tf.reduce_sum(x), local), ROWS)


def _captured_by_a_region(x):
    return manual_region(lambda local: local * tf.reduce_sum(x), [ROWS], ROWS)(x)


def _opened_in_one_branch(x):
    local = tf.cond(tf.reduce_sum(x) > 0, lambda: auto_to_manual(x, ROWS), lambda: x[:1])
    return manual_to_auto(local, ROWS)


def _opened_by_a_loop(x):
    return _loop(lambda y: y + tf.reduce_sum(auto_to_manual(x, ROWS)), x)


def _devices_that_decide_apart(x):
    local = auto_to_manual(x, ROWS)
    return tf.cond(tf.reduce_sum(local) > 0, lambda: x, lambda: 2 * x)


@refuses(ShardingError,
    (_left_open, r"result\[1\] is a local tensor .*auto_to_manual\(args_0:0\) opened \(at test_man"),
    (_left_open_in_a_loop, r"result\[0\] is a local tensor .* left open.* Close it with manual"),
    (_left_open_in_a_function, r"result\[0\] is a local tensor"),
    (_left_open_by_a_gradient, r"result\[0\] is a local tensor"),
    (_mixed, r"AddV2 'add' mixes the local tensor .* with strided_slice:0 \(1, 4\), which has its"),
    (_mixed_in_a_loop, r"Mul .* mixes the local tensor"),
    (_captured_by_a_region, r"Mul 'mul' mixes .*Take that one into the region by auto_to_man"),
    (_opened_in_one_branch, r"If 'cond' has cond:0 in two ways"),
    (_opened_by_a_loop, r"AddV2 .* mixes the local tensor"),
    (_devices_that_decide_apart, r"If 'cond' .*auto_to_manual"),
    (lambda x: sharding.replicate(auto_to_manual(x, ROWS)), "cannot be annotated"),
    (lambda x: manual_to_auto(x, ROWS), "closes args_0:0, which is no local tensor"),
)  # fmt: skip
def test_wrong_use_raises(fn):
    _trace(fn, (8, 4))


GRID = Mesh.parse("a:2,b:4")
ON_A = ("a", None)


def _on_a(body):
    """Runs a region that is manual along axis a and automatic along b."""
    return manual_region(body, [ON_A], ON_A, GRID, "a")


def _loop_s_gradient(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = _on_a(lambda x: _loop(lambda x: x * x, x))(x)
    return tape.gradient(y, x)


@refuses(ShardingError,
    (lambda x: manual_to_auto(auto_to_manual(x, ON_A, axis="a"), ON_A),
     "a manual_to_auto of all axes closes .* of the manual region of one axis that auto_to_man"),
    (_on_a(lambda x: all_reduce(x, "a")), "device_index, all_reduce and rotate are for regions"),
    (_on_a(lambda x: x * tf.cast(device_index("a"), x.dtype)),
     "Mul 'mul' mixes .* of a manual region of all axes and of one of one axis"),
    (_loop_s_gradient, "collects local tensors of the manual region of one axis .* XLA cannot"),
)  # fmt: skip
def test_a_region_of_one_axis_is_not_one_of_all(fn):
    """Either mistake would end the process in XLA."""
    _trace(fn, (8, 4), mesh=GRID)


def test_lowering_raises_before_xla_sees_it():
    with pytest.raises(ShardingError, match=r"_left_open: result\[1\] is a local tensor"):
        lower(_left_open, [TensorSpec((8, 4), "float32")], MESH)


def _good(x):
    table = tf.range(4.0)  # a constant, inside and outside

    def body(local):
        local = _loop(lambda y: y * table + tf.cast(device_index("d"), tf.float32), local)
        local += tf.cond(tf.reduce_sum(local) > 0, lambda: tf.ones([1, 4]), lambda: local)
        return rotate(local, "d") + all_reduce(local, "d")

    return _loop(lambda x: manual_region(body, [ROWS], ROWS)(x) * table, x) + tf.reduce_sum(x)


def test_right_use_does_not():
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.function(_good, autograph=False)(x)
        return y, tape.gradient(y, x)

    _trace(_good, (8, 4))
    _trace(gradient, (8, 4))


@refuses(ShardingError,
    (lambda x: auto_to_manual(x, ROWS), (15, 4), "has 15 elements, not a multiple of the 8 partit"),
    (lambda x: auto_to_manual(x, ROWS), (None, 4), "dimension 0 of shape .* has no static size"),
    (lambda x: manual_to_auto(auto_to_manual(x, ROWS), ROWS, [15, 4]), (8, 4),
     r"local shape \[1, 4\] makes a full shape of \[8, 4\], not \[15, 4\]"),
    (lambda x: all_reduce(auto_to_manual(x, ROWS), "e"), (8, 4), "has no axis 'e'"),
    (lambda x: manual_region(lambda a: a, [ROWS] * 2, ROWS)(x), (8, 4), "1 tensors for 2 in_map"),
    (lambda x: manual_region(lambda a: (a, a), [ROWS], ROWS)(x), (8, 4), "give a list of 2$"),
    (lambda x: manual_region(lambda a: {"a": a}, [ROWS], ROWS)(x), (8, 4), "returns a dict"),
    (lambda x: auto_to_manual(x, None), (8, 4), r"\(args_0:0, None\): None is no mapp"),
    (lambda x: auto_to_manual(x, MESH, ROWS), (8, 4), "the mesh is a tuple; give a sharding"),
    (lambda x: auto_to_manual(x, ROWS, Mesh.parse("d:1")), (8, 4), "1 devices, but the mesh in fo"),
    (lambda x: all_reduce(auto_to_manual(x, ROWS), 0), (8, 4), r"all_reduce\(IdentityN:0, 0\): 0, "),
    (lambda x: device_index("e"), (8, 4), r"device_index\('e'\): mesh d:8 has no axis 'e'"),
    (lambda x: rotate(auto_to_manual(x, ROWS), ("d",)), (8, 4), "must be the name of one mesh axis"),
)  # fmt: skip
def test_arguments_are_checked(fn, shape):
    _trace(fn, shape)


def test_on_one_device_a_region_is_the_function():
    """TensorFlow alone, which cannot run a region, runs the function."""
    engine = TfEngine(Mesh.parse("d:1"))
    compiled = engine.Build(_good, [TensorSpec((8, 4), "float32")])
    assert "Spmd" not in compiled.HloText()
    assert _trace(_good, (8, 4), mesh=Mesh.parse("d:1")).outputs[0].shape == (8, 4)
