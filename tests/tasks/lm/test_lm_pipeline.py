"""The language model in stages: its step is that without a pipeline."""

import re

import pytest
from equivalence import assert_same, state_and_batch

from lingvo_moe.core.config import registry
from lingvo_moe.core.engine.eager.testing import run_sharded, run_single
from lingvo_moe.core.engine.loop.steps import train_step
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.training.checks import check_divisible

STAGES = "task.pipeline.stages=2;task.pipeline.micro_batches=4"
SIZES = "task.vocab_size=40;input.target_vocab_size=40;input.target_length=8"


def _experiment(*overrides):
    params = registry.GetParams("lm.Tiny", ";".join((SIZES, *overrides)))
    return params, params.task.Instantiate(), params.input.Instantiate()


def test_a_checkpoint_does_not_depend_on_stages():
    states = [
        {path: (s.shape, s.dtype) for path, s in task.StateSpecs().FlattenItems()}
        for task in (_experiment()[1], _experiment(STAGES)[1])
    ]
    assert states[0] == states[1]


def test_a_step_in_stages_is_the_step_without_whatever_it_keeps():
    """With dropout, whose seeds belong to micro-batches and layers; rows are sharded beside the stages, of two blocks
    each. SGD's velocities are the gradients. What remat names is not computed again."""
    changes = "task.num_layers=4;task.dropout=0.3;task.position=rotary;task.optimizer=sgd"
    _, plain, inputs = _experiment(changes)
    args = state_and_batch(plain, inputs)
    want = run_single(train_step(plain, inputs, 4).fn, args, jit_compile=False)
    products = {}
    for remat in ("full", "dots"):
        more = f"task.remat={remat};task.pipeline.schedule=gpipe"
        step = train_step(_experiment(changes, STAGES, more)[1], inputs)
        got, collectives = run_sharded(step.fn, args, Mesh.parse("stage:2,data:2"), step.arg_specs)
        assert_same(got, want, 1e-5, floor=1e-3)
        products[remat] = collectives.hlo.count(" dot(")
    # Five products of a block, in each of two loops: nothing needs its last one's output.
    assert products["full"] - products["dots"] == 2 * 5


def test_micro_batches_that_do_not_divide_the_rows_are_refused():
    params, task, _ = _experiment(STAGES, "task.pipeline.micro_batches=3")
    message = "task.pipeline.micro_batches=3: input.batch_size=8"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        check_divisible(params, task, Mesh.parse("stage:2"))
