"""Activations, or weights too, in bfloat16: what stays float32, and a training step."""

import numpy as np
import pytest
import tensorflow as tf
import toy_translation as toy

from lingvo_moe.core.config import registry
from lingvo_moe.core.engine.engines import make_engine
from lingvo_moe.core.engine.loop.steps import train_step
from lingvo_moe.core.engine.lowering import lowering
from lingvo_moe.core.engine.lowering.tracing import trace
from lingvo_moe.core.randomness import make_seed
from lingvo_moe.core.sharding import Mesh, single_device, use_mesh

SMALL = (
    "task.source_vocab_size=50;task.target_vocab_size=50;input.source_length=8;input.target_length=8"
    ";task.num_encoder_layers=2;task.num_decoder_layers=2;task.repeat=False;"
)


def _task_and_step(override):
    params = registry.GetParams("mt.M4Tiny", SMALL + override)
    task = params.task.Instantiate()
    return task, train_step(task, params.input.Instantiate())


@pytest.mark.slow
@pytest.mark.parametrize("override, theta_dtype, engine", [
    ("task.fprop_dtype=bfloat16", "float32", ("pjrt", "expert:8")),
    ("task.dtype=bfloat16", "bfloat16", ("tf_graph", "expert:1")),  # compiles nothing
], ids=["activations", "weights"])  # fmt: skip
def test_a_step_trains(override, theta_dtype, engine, monkeypatch):
    """Slots are always float32; the loss equals that of float32 to bfloat16's precision."""
    traced = []
    monkeypatch.setattr(
        lowering, "trace", lambda *a, **k: traced.append(trace(*a, **k)) or traced[0]
    )
    task, step = _task_and_step(override)
    engine = make_engine(engine[0], Mesh.parse(engine[1]))
    with use_mesh(single_device()):
        before = task.InitState(tf.constant(1)).Transform(lambda x: x.numpy())
    batch = toy.batch(step.arg_specs[1], 50)
    state, metrics = engine.BuildStep(step)(before, batch)
    after, metrics = engine.Get(state), engine.Get(metrics)
    assert {w.dtype.name for w in after.theta.Flatten()} == {theta_dtype}
    assert {s.dtype.name for s in after.slots.Flatten()} == {"float32"}
    assert {m.dtype.name for m in metrics.Flatten()} == {"float32"}
    assert metrics.skipped == 0 and metrics.grad_norm > 0
    for (path, new), old in zip(after.theta.FlattenItems(), before.theta.Flatten(), strict=True):
        assert np.isfinite(new.astype(np.float32)).all(), path
        assert (new != old).any(), path
    wide, _ = _task_and_step("")
    theta = before.theta.Transform(lambda w: w.astype(np.float32))
    with use_mesh(single_device()):
        loss, _ = wide.FProp(theta, batch, seed=make_seed(wide.p.seed, 0))
    np.testing.assert_allclose(metrics.loss, loss, rtol=5e-3)
    if theta_dtype == "float32":
        _check_which_operations_are_in_which_type(traced[0].graph)


def _check_which_operations_are_in_which_type(graph):
    """Products and what the experts exchange are bfloat16; gates, probabilities, loss and optimiser float32."""
    graph = graph.as_graph_def()
    nodes = [*graph.node, *(n for f in graph.library.function for n in f.node_def)]

    def types(op, *inside, but="never"):
        found = [n for n in nodes if n.op == op and all(part in n.name for part in inside)]
        found = [tf.as_dtype(n.attr["T"].type).name for n in found if but not in n.name]
        assert found, (op, inside)
        return set(found)

    for op in ("Einsum", "Relu", "ReluGrad"):
        assert types(op, "", but="/router/") == {"bfloat16"}, op
    assert types("Transpose", "/dispatcher/") == {"bfloat16"}  # on its way to the experts and back
    assert types("XlaSharding", "/experts/", but="gradient_tape") == {"bfloat16"}
    for op in ("Einsum", "AddN"):  # gates, and the counts that assign slots
        assert types(op, "/router/") == {"float32"}, op
    for op in ("Softmax", "Exp", "Log", "Rsqrt", "UnsortedSegmentSum"):
        assert types(op) == {"float32"}, op
    for op in ("Sum", "Mul", "Rsqrt", "Sqrt"):
        assert types(op, "optimizer/") == {"float32"}, op
