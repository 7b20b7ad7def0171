"""What the TPU compiler makes of a pipelined step: its collectives, and its memory for more micro-batches."""

import functools
import importlib.util
from dataclasses import replace

import pytest

from lingvo_moe.core.engine.aot import aot
from lingvo_moe.core.engine.lowering.lowering import lower_step
from lingvo_moe.core.hlo.collectives import collective_use
from lingvo_moe.core.hlo.module import parse_module
from lingvo_moe.core.sharding import Mesh, dims_mapping
from lingvo_moe.core.task.pipelined_step import pipelined_step
from lingvo_moe.core.task.step import Step
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
def _compiled(schedule, num):
    """A step of `num` micro-batches in four stages; the devices along `data` compute the same."""
    pipeline = {"stages": 4, "micro_batches": num, "schedule": schedule}
    task, _, specs = toy(num * ROWS, width=WIDTH, length=LENGTH, **pipeline)
    task = type(task)(task.p.Copy().Set(activation_split={}))
    specs = specs.Transform(lambda s: replace(s, split=dims_mapping(s.letters, {})))
    step = Step("step", pipelined_step(task, specs), (task.StateSpecs(), specs), donate=(0,))
    return aot.compile_for_topology(lower_step(step, Mesh.parse(MESH)), TOPOLOGY)


def test_a_tick_has_one_permute_for_each_tensor_and_no_weights_move():
    module = parse_module(_compiled("1f1b", 16).hlo_text)
    permutes = 0
    for executed in module.executions():
        use = collective_use(executed.instruction, executed.computation, module.attributes)
        if use is None or use.bytes < BOUNDARY // 2:
            continue
        assert use.kind in ("collective-permute", "all-reduce"), executed
        permutes += executed.times * use.tensors * (use.kind == "collective-permute")
    assert permutes == 2 * 3 * (16 + 4 - 1)


@pytest.mark.parametrize(
    ("schedule", "numbers", "kept"),
    # The three tensors of every stage, and a quarter of the last stage's output. And nothing beyond 4K micro-batches,
    # after which even the first stack has its gradients.
    [("gpipe", (8, 16), 3.25), ("1f1b", (16, 24), 0.0)],
)
def test_memory_grows_by_what_a_micro_batch_keeps_or_not_at_all(schedule, numbers, kept):
    peaks = [_compiled(schedule, num).memory["peak"] for num in numbers]
    slope = (peaks[1] - peaks[0]) / (numbers[1] - numbers[0])
    assert slope == pytest.approx(kept * BOUNDARY, abs=0.1 * 3 * BOUNDARY)
