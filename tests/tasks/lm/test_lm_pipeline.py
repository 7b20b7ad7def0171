"""The language model in stages: its step is that without a pipeline."""

import re

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core.config import registry
from lingvo_moe.core.engine.eager.testing import run_sharded
from lingvo_moe.core.engine.loop.steps import train_step
from lingvo_moe.core.engine.pjrt import PjrtEngine
from lingvo_moe.core.sharding import Mesh, use_mesh
from lingvo_moe.training.checks import check_divisible

STAGES = "task.pipeline.stages=2;task.pipeline.micro_batches=4"
SIZES = "task.vocab_size=40;input.target_vocab_size=40;input.target_length=8"


def _experiment(*overrides):
    params = registry.GetParams("lm.Tiny", ";".join((SIZES, *overrides)))
    return params, params.task.Instantiate(), params.input.Instantiate()


def _after(step, mesh, state, batch):
    engine = PjrtEngine(Mesh.parse(mesh))
    program = engine.BuildStep(step)
    args = zip((state, batch), step.arg_specs, strict=True)
    return [engine.Get(tree) for tree in program(*[engine.Put(x, spec) for x, spec in args])]


@pytest.mark.parametrize(
    "schedule, tied, position", [("gpipe", False, "sinusoidal"), ("1f1b", True, "rotary")]
)
def test_a_step_in_stages_is_the_step_without(schedule, tied, position):
    """With dropout, whose seeds belong to micro-batches and layers; rows are sharded beside the stages. Adam's slots
    are moments of the gradients."""
    model = f"task.tied_softmax={tied};task.position={position}"
    _, plain, inputs = _experiment(model)
    _, staged, _ = _experiment(STAGES, f"task.pipeline.schedule={schedule}", model)
    batch = plain.SampleBatch(inputs, np.random.RandomState(0))
    with use_mesh(Mesh.parse("data:1")):
        state = tf.function(plain.InitState, autograph=False)(tf.constant(3))
    state = state.Transform(lambda x: x.numpy())
    want = _after(train_step(plain, inputs, 4), "data:1", state, batch)
    got = _after(train_step(staged, inputs), "stage:2,data:2", state, batch)
    for have, wanted in zip(got, want, strict=True):
        assert [p for p, _ in have.FlattenItems()] == [p for p, _ in wanted.FlattenItems()]
        for (path, x), (_, y) in zip(have.FlattenItems(), wanted.FlattenItems(), strict=True):
            np.testing.assert_allclose(x, y, 1e-5, 1e-5 * max(np.abs(y).max(), 1e-3), err_msg=path)


def test_a_stage_keeps_the_products_that_remat_names():
    """The same step with fewer products; in stages of two blocks, with dropout."""
    found = {}
    for remat in ("full", "dots"):
        override = f"task.num_layers=4;task.dropout=0.3;task.remat={remat}"
        _, task, inputs = _experiment(STAGES, override, "task.pipeline.schedule=gpipe")
        if not found:
            batch = task.SampleBatch(inputs, np.random.RandomState(0))
            with use_mesh(Mesh.parse("data:1")):
                state = tf.function(task.InitState, autograph=False)(tf.constant(3))
        step = train_step(task, inputs)
        mesh = Mesh.parse("stage:2,data:2")
        found[remat] = run_sharded(step.fn, [state, batch], mesh, step.arg_specs)
    (want, full), (got, dots) = found["full"], found["dots"]
    for have, wanted in zip(got, want, strict=True):
        for x, y in zip(have.Flatten(), wanted.Flatten(), strict=True):
            np.testing.assert_allclose(x, y, 1e-6, 1e-6 * max(np.abs(y).max(), 1e-3))
    # Five products of a block, in each of two loops: nothing needs its last one's output.
    assert full.hlo.count(" dot(") - dots.hlo.count(" dot(") == 2 * 5


def test_a_checkpoint_does_not_depend_on_stages():
    states = [
        {path: (s.shape, s.dtype) for path, s in task.StateSpecs().FlattenItems()}
        for task in (_experiment()[1], _experiment(STAGES)[1])
    ]
    assert states[0] == states[1]


def test_micro_batches_that_do_not_divide_the_rows_are_refused():
    params, task, _ = _experiment(STAGES, "task.pipeline.micro_batches=3")
    message = "task.pipeline.micro_batches=3: input.batch_size=8"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        check_divisible(params, task, Mesh.parse("stage:2"))
