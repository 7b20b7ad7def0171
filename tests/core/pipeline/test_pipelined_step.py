"""A pipelined step is the step of the same micro-batches without one, for every schedule, sharded or not."""

import collections
import functools
from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf
from equivalence import assert_same

from lingvo_moe.analysis.programs.hlo.collectives import collective_use
from lingvo_moe.analysis.programs.hlo.module import parse_module
from lingvo_moe.core import kernels
from lingvo_moe.core.engine.eager.testing import run_sharded, run_single
from lingvo_moe.core.engine.engines import make_engine
from lingvo_moe.core.kernels import tensorflow
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.pipeline import stage_layout
from lingvo_moe.core.pipeline.loops import Loops
from lingvo_moe.core.pipeline.stage_layout import padded
from lingvo_moe.core.pipeline.stage_vectors import by_path, from_paths
from lingvo_moe.core.sharding import Mesh, dims_mapping, single_device, use_mesh
from lingvo_moe.core.task.micro_batches import accumulating_step
from lingvo_moe.core.task.pipelined_step import pipelined_step
from lingvo_moe.core.task.step import Step
from tests.core.pipeline.pipeline_toys import SIZES, Dense, cell_toy
from tests.core.pipeline.toy_stacks import LENGTH, WIDTH, toy

pytestmark = pytest.mark.slow


def _sharded(task, specs):
    split = task.p.activation_split
    return specs.Transform(lambda s: replace(s, split=dims_mapping(s.letters, split)))


def _after(step_of, task, batch, specs):
    """Metrics, gradients and the loss's terms after a step on one device, by TensorFlow itself."""
    grads = []
    update = task.optimizer.Update

    def recording(before, gradients, *rest):
        grads.append(gradients)
        return update(before, gradients, *rest)

    task.optimizer.Update = recording
    step = step_of(task, _sharded(task, specs))

    def run(state, batch):
        after, metrics = step(state, batch)
        return NestedMap(metrics=metrics, gradients=grads[-1], theta=after.theta)

    with use_mesh(Mesh(("stage", "data"), (1, 1))), kernels.using(tensorflow):
        state = task.InitState(tf.constant(1))
        return run(state, batch.Transform(tf.constant))


def _same(found, wanted, tolerance):
    """Some numbers are float32 whatever the model's type."""
    for tol, double in ((tolerance, True), (max(tolerance, 1e-6), False)):
        trees = [
            {path: x for path, x in tree.FlattenItems() if (x.dtype == tf.float64) == double}
            for tree in (found, wanted)
        ]
        assert_same(*trees, tol)


def _padded_with_nan(w, blocks):
    real = np.arange(blocks.largest) < blocks.counts[:, np.newaxis]
    assert np.sum(real) == blocks.num < real.size
    return tf.where(real.reshape([-1, 1, 1]), padded(w, blocks), np.nan)


@functools.cache
def _without_pipeline(num):
    """The result of `_after` for the step of `num` micro-batches without stages."""
    return _after(
        lambda task, specs: accumulating_step(task, num, specs), *toy(16, "float64", blocks=5)
    )


def _with_nan(x):
    return x + tf.constant(np.nan if x.dtype.is_floating else 7, x.dtype)


def _start_with_nan(start):
    """Makes a stack's state before the first tick: the stages compute on NaN until the first micro-batch comes."""

    def with_nan(self, j, carry):
        found = start(self, j, carry)
        for name in ("arriving", "upstream", "inputs"):
            found[name] = found[name].Transform(_with_nan)
        return found

    return with_nan


@pytest.mark.parametrize(
    ("schedule", "stages", "micro_batches", "repeats", "splits"),
    # Parts of different sizes: 2, 2 and 1; 1, 3 and 1; 2, 1, 1 and 1.
    [
        ("zb_h1", 3, 2, 1, ()),
        ("1f1b", 3, 4, 1, (1, 4, 5)),
        ("interleaved", 2, 2, 2, ()),
        ("gpipe", 2, 2, 2, ()),
    ],
)
def test_every_schedule_gives_the_step_without_a_pipeline(
    schedule, stages, micro_batches, repeats, splits, monkeypatch
):
    """The weights of padding, and the values that stages compute in the bubble, are NaN."""
    monkeypatch.setattr(stage_layout, "padded", _padded_with_nan)
    monkeypatch.setattr(Loops, "_StackStart", _start_with_nan(Loops._StackStart))
    asked = {"stages": stages, "micro_batches": micro_batches, "repeats": repeats}
    if splits:
        asked["splits"] = list(splits)
    found = _after(pipelined_step, *toy(16, "float64", blocks=5, schedule=schedule, **asked))
    _same(found, _without_pipeline(micro_batches), 1e-10)


@functools.cache
def _cells_in_turn(num):
    """The result of _without_pipeline for cells of different shapes."""
    task, *args = cell_toy()
    return _by_variable(
        task, _after(lambda t, specs: accumulating_step(t, num, specs), task, *args)
    )


def _by_variable(task, found):
    specs = task.VariableSpecs()
    trained = [(spec, g) for spec, g in specs.Zip(found.gradients) if spec.trainable]
    of, values = (NestedMap(x=list(leaves)) for leaves in zip(*trained, strict=True))
    updates = by_path(*(NestedMap(x=list(x)) for x in zip(*_updates(specs, found), strict=True)))
    return NestedMap(metrics=found.metrics, gradients=by_path(of, values), updates=updates)


def _updates(specs, found):
    return [(spec, new) for spec, new in specs.Zip(found.theta) if not spec.trainable]


@pytest.mark.parametrize(
    ("schedule", "stages", "micro_batches", "repeats"),
    [("gpipe", 4, 8, 1), ("1f1b", 4, 8, 1), ("zb_h1", 4, 2, 1), ("interleaved", 2, 4, 2)],
)
def test_every_schedule_gives_the_step_of_cells_in_turn(
    schedule, stages, micro_batches, repeats, monkeypatch
):
    """The cells have shapes, noise, losses and moving averages of their own, and pass on integers."""
    monkeypatch.setattr(Loops, "_StackStart", _start_with_nan(Loops._StackStart))
    asked = {"stages": stages, "micro_batches": micro_batches, "schedule": schedule}
    task, *args = cell_toy(**asked, **({"repeats": repeats} if repeats > 1 else {}))
    found = _by_variable(task, _after(pipelined_step, task, *args))
    _same(found, _cells_in_turn(micro_batches), 2e-5)


@functools.cache
def _sharded_step():
    """The step of eight micro-batches in four stages, each of two devices with micro-batches of their own: the compiled
    module and what it gives."""
    task, batch, specs = toy(32, stages=4, micro_batches=8, schedule="1f1b")
    engine = make_engine("pjrt", Mesh.parse("stage:4,data:2"))
    specs = _sharded(task, specs)
    step = Step("step", pipelined_step(task, specs), (task.StateSpecs(), specs), donate=(0,))
    program = engine.BuildStep(step)
    with use_mesh(single_device()), kernels.using(tensorflow):
        state = task.InitState(tf.constant(1))
    state = engine.Put(state.Transform(lambda x: x.numpy()), step.arg_specs[0])
    after, metrics = program(state, engine.Put(batch, step.arg_specs[1]))
    found = NestedMap(theta=engine.Get(after).theta, metrics=engine.Get(metrics))
    return parse_module(program.HloText()), found


def test_a_sharded_pipeline_computes_the_same():
    task, batch, specs = toy(32)
    step = accumulating_step(task, 8, _sharded(task, specs))
    with use_mesh(single_device()), kernels.using(tensorflow):
        after, metrics = step(task.InitState(tf.constant(1)), batch.Transform(tf.constant))
    _same(_sharded_step()[1], NestedMap(theta=after.theta, metrics=metrics), 2e-6)


def _collectives(module):
    for executed in module.executions():
        use = collective_use(executed.instruction, executed.computation, module.attributes)
        if use is not None:
            yield use, executed


def test_a_sharded_pipeline_of_cells_computes_the_same_and_gives_on_one_boundary_a_tick():
    """Rows of a micro-batch are spread over two devices of each stage."""
    plain, batch, specs = cell_toy(cell=Dense)
    state = run_single(plain.InitState, [np.int32(1)], jit_compile=False)
    wanted, metrics = run_single(
        accumulating_step(plain, 8, specs), [state, batch], jit_compile=False
    )
    asked = {"stages": 4, "micro_batches": 8, "schedule": "1f1b"}
    task, _, specs = cell_toy(cell=Dense, split={"B": "data"}, **asked)
    state, specs = (
        from_paths(task.StateSpecs(), by_path(plain.StateSpecs(), state)),
        _sharded(task, specs),
    )
    (after, found), collectives = run_sharded(
        pipelined_step(task, specs),
        [state, batch],
        Mesh.parse("stage:4,data:2"),
        [task.StateSpecs(), specs],
    )
    assert_same(found, metrics)
    assert_same(by_path(task.StateSpecs(), after), by_path(plain.StateSpecs(), wanted))
    assert not collectives["all-gather"] and not collectives["all-to-all"]
    boundary, permuted = 4 * max(SIZES), 0
    for use, executed in _collectives(parse_module(collectives.hlo)):
        if use.kind == "collective-permute" and "concat" in executed.instruction.op_name:
            permuted += executed.times * (use.bytes == boundary)
        # Gradients are exchanged after all loops; within, the loss and the layer before get their stage's tensors.
        if use.kind == "all-reduce" and executed.loops:
            assert use.bytes <= boundary
    assert permuted == 2 * (8 + 4 - 1)


def test_stages_give_one_boundary_a_tick_and_no_weights():
    """Two stacks give on three tensors: both their x, and the second what it reads of the first; each way."""
    permuted: collections.Counter[int] = collections.Counter()
    for use, executed in _collectives(_sharded_step()[0]):
        if use.kind == "collective-permute":
            permuted[use.bytes] += executed.times
        elif executed.loops:
            assert use.kind == "all-reduce", executed
    ticks, boundary = 8 // 2 + 4 - 1, 4 * (32 // 8) * LENGTH * WIDTH
    assert permuted == {boundary: 2 * 3 * ticks}


def test_replicas_exchange_gradients_once():
    """Gradients are exchanged after all loops, for any number of micro-batches, and in no tick outside of a loop."""
    total = 0
    for use, executed in _collectives(_sharded_step()[0]):
        stages = {{device // 2 for device in group} == {group[0] // 2} for group in use.devices}
        if use.kind == "all-reduce" and stages == {True}:  # among the devices of one stage
            assert not executed.loops, executed
            total += use.bytes
    # Of a block of each stack, and of both tables.
    gradients = 4 * (2 * WIDTH * WIDTH + 2 * 10 * WIDTH)
    assert gradients <= total < 1.1 * gradients
