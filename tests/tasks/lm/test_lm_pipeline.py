"""The language model in stages: its step is that without a pipeline."""

import re

import pytest
from equivalence import assert_same, compare_steps, state_and_batch

from lingvo_moe.core.config import registry
from lingvo_moe.core.engine.eager.testing import run_sharded
from lingvo_moe.core.engine.loop.steps import train_step
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.training.checks import check_divisible

STAGES = "task.pipeline.stages=2;task.pipeline.micro_batches=4"
SIZES = "task.vocab_size=40;input.target_vocab_size=40;input.target_length=8"


def _experiment(*overrides):
    params = registry.GetParams("lm.Tiny", ";".join((SIZES, *overrides)))
    return params, params.task.Instantiate(), params.input.Instantiate()


def test_a_step_in_stages_is_the_step_without():
    """With dropout, whose seeds belong to micro-batches and layers; rows are sharded beside the stages. Adam's slots
    are moments of the gradients."""
    _, plain, inputs = _experiment("task.position=rotary")
    _, staged, _ = _experiment(STAGES, "task.position=rotary")
    compare_steps(train_step(staged, inputs), train_step(plain, inputs, 4), plain, inputs)


def test_a_stage_keeps_the_products_that_remat_names():
    """The same step with fewer products; in stages of two blocks, with dropout."""
    found = {}
    for remat in ("full", "dots"):
        override = f"task.num_layers=4;task.dropout=0.3;task.remat={remat}"
        _, task, inputs = _experiment(STAGES, override, "task.pipeline.schedule=gpipe")
        step, mesh = train_step(task, inputs), Mesh.parse("stage:2,data:2")
        found[remat] = run_sharded(step.fn, state_and_batch(task, inputs), mesh, step.arg_specs)
    (want, full), (got, dots) = found["full"], found["dots"]
    assert_same(got, want, 1e-6, floor=1e-3)
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
