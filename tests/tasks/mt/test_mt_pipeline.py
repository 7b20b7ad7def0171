"""The translation model in stages: the loss of its step is that without a pipeline; refusals."""

import re

import pytest
import tensorflow as tf
from equivalence import assert_same, state_and_batch

from lingvo_moe.core import kernels
from lingvo_moe.core.config import registry
from lingvo_moe.core.engine.eager.testing import run_single
from lingvo_moe.core.engine.loop.steps import train_step
from lingvo_moe.core.engine.lowering.lowering import lower_step
from lingvo_moe.core.kernels import tensorflow
from lingvo_moe.core.sharding import Mesh, ShardingError
from lingvo_moe.core.task.meshes import check_divisible

SIZES = "task.num_encoder_layers=4;task.num_decoder_layers=4;input.batch_size=8;task.num_groups=8"
STAGES = "task.pipeline.stages=2;task.pipeline.micro_batches=2"


def _experiment(*overrides):
    params = registry.GetParams("mt.M4Tiny", ";".join((SIZES, *overrides)))
    return params, params.task.Instantiate(), params.input.Instantiate()


@pytest.mark.slow
def test_a_step_in_stages_has_the_loss_and_the_metrics_of_the_step_without(monkeypatch):
    """Routing is random; its seeds belong to micro-batches and layers.

    Its gradients and its devices are those of tests/core/pipeline/test_pipelined_step.py, whose two stacks give on the
    same tensors, and with experts beside those of tests/tasks/transformer/test_transformer_parts.py."""
    monkeypatch.setattr(tf.GradientTape, "gradient", lambda _, y, xs, *more, **named: _zeros(xs))
    _, plain, inputs = _experiment("task.optimizer=sgd")
    # A part has one block: a loop over it would cost as much again.
    gpipe = "task.pipeline.schedule=gpipe;task.repeat=False"
    _, staged, _ = _experiment("task.optimizer=sgd", STAGES, gpipe)
    args = state_and_batch(plain, inputs)
    _, want = run_single(train_step(plain, inputs, 2).fn, args, jit_compile=False)
    with kernels.using(tensorflow):
        _, got = run_single(train_step(staged, inputs).fn, args, jit_compile=False)
    assert want.moe.encoder.expert_load.shape == want.moe.decoder.expert_load.shape == (2, 8)
    assert_same(got, want, floor=1e-3)


def _zeros(tensors):
    return tf.nest.map_structure(tf.zeros_like, tensors)


@pytest.mark.parametrize(("override", "mesh", "message"), [
    ("task.pipeline.stages=4", "stage:4,expert:2",
     "task.pipeline.stages=4: the encoder has 2 blocks, fewer than 4 parts; choose at most 2 stages"),
    ("task.pipeline.repeats=3;task.pipeline.schedule=gpipe", "stage:2,expert:2",
     "task.pipeline.stages=2 x task.pipeline.repeats=3: the encoder has 2 blocks, fewer than 6 parts; choose "
     "stages x repeats of at most 2"),
    ("task.pipeline.micro_batches=3", "stage:2,expert:2",
     "task.pipeline.micro_batches=3: input.batch_size=8 and task.num_groups=8 do not divide"),
    ("task.pipeline.micro_batches=4", "stage:2,expert:4",
     "task.pipeline.micro_batches=4: a micro-batch has input.batch_size=8 / 4 = 2, which does not divide over "
     "the 4 devices"),
    ("", "stage:4,expert:2", "task.pipeline.stages=2: the axis 'stage' of mesh stage:4,expert:2 has 4 devices"),
    ("", "expert:2", "task.pipeline.stages=2: mesh expert:2 has no axis 'stage' of that size"),
    ("train.num_micro_batches=2", "stage:2,expert:2",
     "train.num_micro_batches=2: a pipeline has micro-batches of its own"),
])  # fmt: skip
def test_what_does_not_go_together_is_refused(override, mesh, message):
    params, task, _ = _experiment(STAGES, override)
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        check_divisible(params, task, Mesh.parse(mesh))


def test_a_dispatcher_that_stages_cannot_use_is_refused():
    _, task, inputs = _experiment(STAGES, "task.moe.dispatcher=dropless")
    step = train_step(task, inputs)
    with pytest.raises(ShardingError, match=r"choose task.moe.dispatcher=index"):
        lower_step(step, Mesh.parse("stage:2,expert:2"))
