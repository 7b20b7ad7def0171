"""The translation model in stages: refusals. tests/tasks/transformer/test_transformer_parts.py has its step."""

import re

import pytest

from lingvo_moe.core.config import registry
from lingvo_moe.core.engine.loop.steps import train_step
from lingvo_moe.core.engine.lowering.lowering import lower_step
from lingvo_moe.core.sharding import Mesh, ShardingError
from lingvo_moe.core.task.meshes import check_divisible

SIZES = "task.num_encoder_layers=4;task.num_decoder_layers=4;input.batch_size=8;task.num_groups=8"
STAGES = "task.pipeline.stages=2;task.pipeline.micro_batches=2"


def _experiment(*overrides):
    params = registry.GetParams("mt.M4Tiny", ";".join((SIZES, *overrides)))
    return params, params.task.Instantiate(), params.input.Instantiate()


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
