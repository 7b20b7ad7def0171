"""The TPU compiler's program of a pipelined step: its collectives, and its memory for more micro-batches."""

import functools
import importlib.util
from dataclasses import replace

import pytest

from lingvo_moe.analysis.plans.machines.machine import parse_machine
from lingvo_moe.analysis.plans.pipeline import PipelineSchedule, pipelines
from lingvo_moe.analysis.plans.work.costs import costs
from lingvo_moe.analysis.programs.aot import aot
from lingvo_moe.analysis.programs.hlo.collectives import collective_use
from lingvo_moe.analysis.programs.hlo.module import parse_module
from lingvo_moe.core.engine.lowering.lowering import lower_step
from lingvo_moe.core.sharding import Mesh, dims_mapping
from lingvo_moe.core.task.pipelined_step import pipelined_step
from lingvo_moe.core.task.step import Step
from tests.core.pipeline.pipeline_toys import Dense, cell_toy
from tests.core.pipeline.toy_stacks import toy

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("libtpu"), reason="no TPU compiler (libtpu)"
)
# Cores of this generation have little fast memory, which the peak does not count alike. So small tensors suffice, and
# those compile faster.
TOPOLOGY, MESH = "v3:2x2", "stage:4,data:2"
ROWS, LENGTH, WIDTH = 8, 64, 128  # of a micro-batch
BOUNDARY = 4 * ROWS * LENGTH * WIDTH  # bytes of one of the three tensors that pass between stages


@functools.cache
def _compiled(num, cells=False):
    """A step of `num` micro-batches in four stages; the devices along `data` compute the same."""
    pipeline = {"stages": 4, "micro_batches": num, "schedule": "1f1b"}
    if cells:
        task, _, specs = cell_toy(num * ROWS * LENGTH, Dense, sizes=[WIDTH] * 4 + [8], **pipeline)
    else:
        task, _, specs = toy(num * ROWS, width=WIDTH, length=LENGTH, **pipeline)
        task = type(task)(task.p.Copy().Set(activation_split={}))
    specs = specs.Transform(lambda s: replace(s, split=dims_mapping(s.letters, {})))
    step = Step("step", pipelined_step(task, specs), (task.StateSpecs(), specs), donate=(0,))
    return aot.compile_for_topology(lower_step(step, Mesh.parse(MESH)), TOPOLOGY)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cells", "tensors", "blocks"), [(False, 3, {"low": 4, "high": 4}), (True, 1, {"seq": 4})]
)
def test_a_tick_has_one_permute_for_each_tensor_and_no_weights_move(cells, tensors, blocks):
    module = parse_module(_compiled(16, cells).hlo_text)
    permutes = 0
    for executed in module.executions():
        use = collective_use(executed.instruction, executed.computation, module.attributes)
        if use is None or use.bytes < BOUNDARY // 2:
            continue
        assert use.kind in ("collective-permute", "all-reduce"), executed
        permutes += executed.times * use.tensors * (use.kind == "collective-permute")
    assert permutes == 2 * tensors * (16 + 4 - 1)
    schedule = PipelineSchedule("1f1b", 4, 16, stacks=tuple(blocks.items()))
    (found,) = pipelines(module, costs(module), parse_machine(TOPOLOGY), schedule)
    assert found["bubble"] == pytest.approx(3 / 19)
    assert (found["blocks"], found["padding"]) == (blocks, 0)


@pytest.mark.slow
def test_beyond_4k_micro_batches_a_step_of_1f1b_takes_no_more_memory():
    """Even the first stack has gradients by then."""
    peaks = [_compiled(num).memory["peak"] for num in (16, 24)]
    assert (peaks[1] - peaks[0]) / 8 == pytest.approx(0, abs=0.1 * 3 * BOUNDARY)
