"""The engines behind one interface: equal results, the devices they need, and errors with a remedy."""

from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf
from processes import run_python
from refusals import refuses

from lingvo_moe.core import sharding
from lingvo_moe.core.engine import tf_engine
from lingvo_moe.core.engine.base import EngineError
from lingvo_moe.core.engine.devices import initialize_distributed, request_cpu_devices
from lingvo_moe.core.engine.engines import make_engine
from lingvo_moe.core.engine.lowering.lowering import LoweringError
from lingvo_moe.core.engine.lowering.specs import SpecError, TensorSpec
from lingvo_moe.core.engine.tpu_strategy import device_assignment
from lingvo_moe.core.job.launchers import JobError
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.task.step import Step

ONE, EIGHT = sharding.single_device(), Mesh.parse("expert:8")
INT = TensorSpec((), "int32")
STATE = NestedMap(w=TensorSpec((4, 4), "float32"), step=INT)
BATCH = NestedMap(x=TensorSpec((8, 4), "float32", ("expert", None)))


def _init(seed):
    w = tf.reshape(tf.cast(tf.range(16), tf.float32), [4, 4]) * 0.01
    return NestedMap(w=w + tf.cast(seed, tf.float32), step=tf.zeros([], tf.int32))


def _step(state, batch):
    x = sharding.shard_letters(batch.x, "BM", {"B": "expert"})
    with tf.GradientTape() as tape:
        tape.watch(state.w)
        loss = tf.reduce_sum(tf.nn.tanh(tf.matmul(x, state.w)) ** 2)
    new = NestedMap(w=state.w - 0.1 * tape.gradient(loss, state.w), step=state.step + 1)
    return new, NestedMap(loss=loss)


INIT = Step("init", _init, [INT], results=STATE)


def _losses(engine):
    shown = []
    with engine.Showing(shown.append):
        state = engine.Once(INIT, np.int32(1))
        step = engine.Build(_step, [STATE, BATCH], donate=(0,), name="step")
    assert any(line.endswith("ing step") for line in shown)  # lowering or tracing
    batch = NestedMap(x=np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4))
    losses = []
    for _ in range(4):
        state, metrics = step(state, batch)
        losses.append(float(engine.Get(metrics).loss))
    assert engine.Get(state).step == 4
    return losses


def test_tensorflow_alone_and_eight_devices_train_alike():
    tf_losses = _losses(make_engine("tf", ONE))
    losses = _losses(make_engine("pjrt", EIGHT))
    graph_losses = _losses(make_engine("tf_graph", ONE))
    np.testing.assert_allclose(losses, tf_losses, rtol=1e-6)
    np.testing.assert_allclose(graph_losses, tf_losses, rtol=1e-6)
    assert losses[-1] < losses[0]


def test_tf_graph_traces_nothing_that_is_called_once(monkeypatch):
    def trace(*args, **kwargs):
        raise AssertionError("traced")

    monkeypatch.setattr(tf_engine, "trace", trace)
    engine = make_engine("tf_graph", ONE)
    state = engine.Once(INIT, np.int32(1))
    np.testing.assert_array_equal(state.w, _init(1).w)
    with pytest.raises(SpecError):
        engine.Once(INIT, np.float32(1))
    with pytest.raises(SpecError):
        engine.Once(replace(INIT, fn=lambda x: x), np.int32(1))


def test_the_tf_engine_shows_its_hlo_and_checks_arguments():
    engine = make_engine("tf", ONE)
    compiled = engine.Build(lambda x: x * 2.0, [TensorSpec((3,), "float32")])
    assert "HloModule" in compiled.HloText()
    with pytest.raises(SpecError, match=r"x has to be float32\[3\], got float32\[4\]"):
        compiled(np.zeros(4, np.float32))
    with pytest.raises(SpecError, match="got float64"):
        compiled(np.zeros(3))
    with pytest.raises(LoweringError, match="int64"):
        engine.Build(lambda x: x, [TensorSpec((3,), "int64")])
    with pytest.raises(SpecError, match="'b' is missing"):
        engine.Put(NestedMap(a=1), NestedMap(b=TensorSpec((), "int32")))
    assert engine.Get(engine.Put(NestedMap(a=1), NestedMap(a=TensorSpec((), "int32")))).a == 1
    assert engine.AnyProcess(True) is True


_TRANSPOSED = """
from lingvo_moe.core.console.tensorflow_import import import_tensorflow
import_tensorflow()
import tensorflow as tf
from lingvo_moe.core.engine.tf_engine import TfGraphEngine
TfGraphEngine()
print(tf.function(tf.transpose)(tf.ones([2, 3], tf.int32)).shape)
"""


def test_a_fallback_of_onednn_is_not_logged_as_an_error():
    done = run_python("-c", _TRANSPOSED, env={"TF_CPP_MIN_LOG_LEVEL": "2"}, check=True)
    assert (done.stdout, done.stderr) == ("(3, 2)\n", "")


def test_tpu_strategy_assigns_every_core_to_one_replica():
    # A v3 slice of 2 x 2 chips with 2 cores each, as one task sees it.
    coordinates = [[[x, y, 0, c] for y in range(2) for x in range(2) for c in range(2)]]
    topology = tf.tpu.experimental.Topology(
        mesh_shape=[2, 2, 1, 2], device_coordinates=np.array(coordinates)
    )
    assignment = device_assignment(topology, Mesh.parse("expert:8"))
    assert (assignment.num_replicas, assignment.num_cores_per_replica) == (1, 8)
    with pytest.raises(EngineError, match=r"has 4 devices, but the TPU has 8 cores.*expert:8"):
        device_assignment(topology, Mesh.parse("expert:4"))


def test_virtual_devices_in_a_fresh_process():
    code = (
        "from lingvo_moe.core.engine.devices import request_cpu_devices; request_cpu_devices(3); "
        "import jax; print(len(jax.devices()))"
    )
    flags = "--xla_force_host_platform_device_count=2"
    out = run_python("-c", code, env={"XLA_FLAGS": flags}, timeout=120)
    assert out.stdout.strip() == "3", out.stderr


@refuses((EngineError, JobError),
    (lambda: make_engine("pjr", ONE), r"--engine=pjr: must be .*did you mean 'pjrt'"),
    (lambda: make_engine("tf", EIGHT), r"tf .*one device, not on mesh expert:8.*--engine=pjrt"),
    (lambda: make_engine("tf_graph", EIGHT), r"tf_graph .*one device, not on mesh expert:8"),
    (lambda: make_engine("tpu_strategy", EIGHT), r"finds no TPU.*--engine=pjrt"),
    (lambda: make_engine("tf_graph", ONE).Build(tf.identity, [INT]).HloText(), "XLA compiles only small pieces"),
    (lambda: request_cpu_devices(4), r"devices=4, or .*_devices\(4\): this process has already started with 8"),
    (lambda: request_cpu_devices(0), "at least one"),
    (lambda: make_engine("pjrt", Mesh.parse("expert:9")), r"a mesh that fits: expert:8; .*or request_cpu_devices\(9\)"),
    (lambda: initialize_distributed("host:1", 2, 2), "numbered 0..num_processes-1"),
    (lambda: initialize_distributed("host:1", 0, 0), "numbered 0..num_processes-1"),
    (lambda: initialize_distributed("host", 2, 0), "expected host:port"),
    (lambda: initialize_distributed("host:x", 2, 0), "expected host:port"),
)  # fmt: skip
def test_what_engines_and_devices_refuse(call):
    request_cpu_devices(8)  # as many as there are
    initialize_distributed("", 1, 0)  # a job of one process needs nothing
    call()
