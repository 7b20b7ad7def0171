"""The TPU compiler's program of a pipeline: its collectives, and its memory for more micro-batches."""

import functools
import importlib.util

import pytest
import tensorflow as tf
from pipeline_toys import cells

from lingvo_moe.analysis.plans.costs import costs
from lingvo_moe.analysis.plans.machines.machine import parse_machine
from lingvo_moe.analysis.plans.pipeline import PipelineSchedule, pipelines
from lingvo_moe.analysis.programs.aot import aot
from lingvo_moe.analysis.programs.hlo.collectives import collective_use
from lingvo_moe.analysis.programs.hlo.module import parse_module
from lingvo_moe.core.engine.lowering.lowering import lower
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.pipeline.layers import PipeliningLayer
from lingvo_moe.core.sharding import Mesh

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("libtpu"), reason="no TPU compiler (libtpu)"
)
ROWS, WIDTH = 256, 128  # of a micro-batch; small tensors compile faster
DEVICES = 2  # that its rows are spread over
BOUNDARY = ROWS // DEVICES * WIDTH * 4  # bytes of a micro-batch between two stages, on a device


@functools.cache
def _compiled(num):
    """Gradients of four cells for `num` micro-batches."""
    layers = cells(sizes=(WIDTH, WIDTH, WIDTH, WIDTH, 8))
    splits = {"weight_split": {"Z": "stage"}, "activation_split": {"B": "data"}}
    p = PipeliningLayer.Params().Set(name="seq", cell_tpl=layers, num_micro_batches=num, **splits)
    layer = p.Instantiate()
    specs = layer.VariableSpecs()

    def gradients(theta, x):
        with tf.GradientTape() as tape:
            tape.watch(theta.Flatten())
            loss = tf.reduce_sum(tf.square(layer.FProp(theta, x)))
        return NestedMap(grads=theta.Pack(tape.gradient(loss, theta.Flatten())))

    args = [specs, TensorSpec((num * ROWS, WIDTH), "float32", ("data", None))]
    mesh = Mesh.parse(f"stage:4,data:{DEVICES}")
    program = lower(gradients, args, mesh, results=NestedMap(grads=specs))
    return aot.compile_for_topology(program, "v5e:2x4")


def _collectives(text):
    """(kind, times a step, bytes) of each collective of more than a number."""
    module = parse_module(text)
    found = []
    for executed in module.executions():
        use = collective_use(executed.instruction, executed.computation, module.attributes)
        if use is not None and use.bytes > 4:
            found.append((use.kind, executed.times, use.bytes))
    return found


@pytest.mark.parametrize("num", [8, 16])
def test_a_tick_has_one_permute_each_way_and_gradients_are_reduced_once(num):
    found = _collectives(_compiled(num).hlo_text)
    permutes = [c for c in found if c[0] == "collective-permute"]
    assert permutes == [("collective-permute", num + 3, BOUNDARY)] * 2
    reductions = [c for c in found if c[0] == "all-reduce"]
    assert len(permutes) + len(reductions) == len(found)  # No weight is gathered.
    # The outputs from the last stage, and the gradients of weights over rows; none in a loop.
    assert [times for _, times, _ in reductions] == [1] * len(reductions)


def test_its_plan_has_the_ticks_and_the_bubble_of_the_law():
    module, machine = parse_module(_compiled(8).hlo_text), parse_machine("v5e:2x4")
    (found,) = pipelines(module, costs(module), machine, PipelineSchedule("gpipe", 4, 8))
    ticks = {loop["phase"]: loop["ticks"] for loop in found["loops"]}
    assert (found["name"], ticks) == ("seq", {"forward": 11, "backward": 11})
    assert found["bubble"] == pytest.approx(3 / 11)
    assert found["seconds"] == pytest.approx(
        sum(loop["ticks"] * loop["tick_seconds"] for loop in found["loops"])
    )
    rows = [row for loop in found["loops"] for row in loop["permutes"]]
    assert [(row["count"], row["bytes"]) for row in rows] == [(1, BOUNDARY)] * 2
    assert all(0 <= row["overlapped_seconds"] <= row["seconds"] for row in rows)


def test_reduced_bytes_of_gradients_do_not_depend_on_the_number_of_micro_batches():
    weights = 4 * (WIDTH * WIDTH + WIDTH)

    def reduced(num):
        return sum(
            b for kind, _, b in _collectives(_compiled(num).hlo_text) if kind == "all-reduce"
        )

    outputs = ROWS // DEVICES * 8 * 4  # of a micro-batch
    assert [reduced(num) - num * outputs for num in (8, 16)] == [weights, weights]


def test_a_micro_batch_more_takes_its_inputs_and_one_boundary():
    """The inputs as they came (arguments) and as they are divided, and what a stage keeps for the backward pass."""
    few, many = (_compiled(num).memory for num in (8, 16))
    more = (many["peak"] - many["arguments"]) - (few["peak"] - few["arguments"])
    assert more / 8 == pytest.approx(2 * BOUNDARY, rel=0.1)
