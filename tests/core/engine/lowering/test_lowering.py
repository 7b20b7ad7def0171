"""Lowering and running programs: values, shardings, donation, errors."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from refusals import refusals

from lingvo_moe.core import randomness, sharding
from lingvo_moe.core.engine.base import EngineError
from lingvo_moe.core.engine.eager.testing import run_sharded
from lingvo_moe.core.engine.lowering.lowering import AUTO, LoweringError, lower
from lingvo_moe.core.engine.lowering.specs import SpecError, TensorSpec
from lingvo_moe.core.engine.pjrt import PjrtEngine
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import Mesh, ShardingError

MESH = Mesh.parse("expert:8")
STATE = NestedMap(
    theta=NestedMap(
        b=TensorSpec((16,), "float32"), layers=[TensorSpec((8, 16), "float32", ("expert", None))]
    ),
    step=TensorSpec((), "int32"),
)
BATCH = NestedMap(x=TensorSpec((16, 8), "float32", ("expert", None)))


def _same(x):
    return x


def _init(seed):
    w = tf.reshape(tf.range(128, dtype=tf.float32), [8, 16]) + tf.cast(seed, tf.float32)
    return NestedMap(
        theta=NestedMap(b=tf.ones([16]), layers=[w * 0.01]), step=tf.zeros([], tf.int32)
    )


def _step(state, batch):
    x = sharding.shard_letters(batch.x, "BM", {"B": "expert"})
    y = tf.nn.tanh(tf.matmul(x, state.theta.layers[0]) + state.theta.b)
    theta = state.theta.Transform(lambda w: w + tf.reduce_mean(y))
    return NestedMap(theta=theta, step=state.step + 1), NestedMap(
        loss=tf.reduce_sum(y), rows=tf.reduce_sum(y, 1)
    )


@functools.cache
def _built(mesh):
    engine = PjrtEngine(mesh)
    init = engine.Build(_init, [TensorSpec((), "int32")], results=STATE)
    return engine, init, engine.Build(_step, [STATE, BATCH], donate=(0,))


def _train(mesh, steps=3):
    engine, init, step = _built(mesh)
    state = init(np.int32(3))
    batch = NestedMap(x=np.linspace(-1, 1, 128, dtype=np.float32).reshape(16, 8))
    losses = []
    for _ in range(steps):
        state, metrics = step(state, batch)
        losses.append(engine.Get(metrics).loss.item())
    return engine, step, state, losses


def test_state_is_cut_as_specified_and_metrics_are_whole():
    _, step, state, _ = _train(MESH)
    w = state.theta.layers[0]
    assert tuple(w.sharding.spec) == ("expert", None)
    assert w.addressable_shards[0].data.shape == (1, 16)
    _, metrics = step(state, NestedMap(x=np.zeros((16, 8), np.float32)))
    assert metrics.rows.is_fully_replicated


def test_the_state_is_donated_and_the_batch_is_not():
    engine, step, state, _ = _train(MESH, steps=1)
    batch = engine.Put(NestedMap(x=np.zeros((16, 8), np.float32)), BATCH)
    step(state, batch)
    assert all(leaf.is_deleted() for leaf in state.Flatten())
    assert not batch.x.is_deleted()
    assert step.Memory()["aliased"] >= 16 * 4 + 16 * 4 + 4


def test_a_step_is_traced_once():
    calls = []

    def fn(x):
        calls.append(1)
        return x + 1

    compiled = PjrtEngine(MESH).Build(fn, [TensorSpec((8,), "float32")])
    for _ in range(3):
        compiled(np.zeros(8, np.float32))
    assert len(calls) == 1


def test_operations_of_a_called_function_have_the_line_of_the_call():
    program = lower(
        lambda seed: randomness.bits(seed, [8, 4]), [TensorSpec([2], tf.int32)], Mesh.parse("x:2")
    )
    assert program.sources is not None
    line = program.sources.Line("random_bits/add_1")
    assert line is not None and line.function == "bits"


def test_bfloat16_and_bool_cross_the_border():
    x = tf.constant([1.5, 2.5], tf.bfloat16)
    flags = np.array([True, False])
    (y, f), _ = run_sharded(lambda a, b: (a * 2, ~b), [x, flags], MESH)
    assert y.dtype.name == "bfloat16"
    assert y.astype(np.float32).tolist() == [3.0, 5.0]
    assert f.tolist() == [False, True]


def test_results_as_the_partitioner_likes():
    spec = [TensorSpec((8, 2), "float32", ("expert", None))]
    program = lower(lambda x: x + 1, spec, MESH, results=AUTO)
    out = PjrtEngine(MESH).Compile(program)(np.zeros((8, 2), np.float32))
    assert out.addressable_shards[0].data.shape == (1, 2)


def test_wrong_arguments_are_named():
    engine = PjrtEngine(MESH)
    compiled = engine.Build(lambda batch: batch.x, [BATCH])
    with pytest.raises(SpecError, match=r"batch\.x' is missing, 'batch\.y' is unknown"):
        compiled(NestedMap(y=1))
    message = r"batch\.x has to be float32\[16, 8\], got float32\[16, 7\]"
    with pytest.raises(SpecError, match=message):
        compiled(NestedMap(x=np.zeros((16, 7), np.float32)))
    with pytest.raises(SpecError, match="got float64"):
        compiled(NestedMap(x=np.zeros((16, 8))))
    with pytest.raises(SpecError, match=r"takes 1 argument\(s\) \(batch\), got 2"):
        compiled(NestedMap(), 1)


_PAIR = NestedMap(a=TensorSpec((2,), "float32"), b=TensorSpec((2,), "int32"))
_TWO = TensorSpec((2,), "float32")


def _lower(fn, *shape, dtype="float32", split=(), mesh=MESH):
    return lower(fn, [TensorSpec(shape, dtype, split)], mesh)


test_what_cannot_be_lowered_or_compiled = refusals(ShardingError,
    (lambda: sharding.split(tf.zeros([8, 2]), 0, 8), "no mesh is in force"),
    (lambda: lower(lambda batch: sharding.split(batch.x, 0, 8), [NestedMap(x=_TWO)], MESH),
     r"batch\.x.*dimension 0.*2 elements"),
    (lambda: _lower(_same, 12, split=("expert",)), "x: dimension 0.*12 elements.*8 partitions"),
    (lambda: _lower(_same, 8, split=("exprt",)), "did you mean 'expert'"),
    (lambda: _lower(_same, 8, split=("expert", None)), "of 2 dimensions"),
    (lambda: _lower(_same, 2, mesh=Mesh(("expert",), (2,), (1, 0))), "device_ids"),
    (lambda: _lower(_same, 2, dtype="int64"), LoweringError, "x is int64.*cast it to int32"),
    (lambda: _lower(lambda x: NestedMap(a=None, b=x), 2), LoweringError, r"result\.a is None"),
    (lambda: _lower(lambda x: tf.cast(x, tf.float64), 2), LoweringError, "result is float64"),
    (lambda: lower(lambda s: NestedMap(a=s.a), [_PAIR], MESH, donate=(0,)), LoweringError, r"result\.b' is missing"),
    (lambda: lower(lambda s: NestedMap(a=s.a, b=s.a), [_PAIR], MESH, donate=(0,)), LoweringError,
     r"result\.b is float32\[2\].*int32\[2\]"),
    (lambda: PjrtEngine(Mesh.parse("expert:16")), EngineError,
     r"16 devices, but there are 8.*expert:8.*--num_devices=16"),
    (lambda: PjrtEngine(MESH).Compile(_lower(_same, 8, mesh=Mesh.parse("expert:4"))), EngineError,
     "lowered for mesh expert:4, not for expert:8"),
)  # fmt: skip
