"""Gradient accumulation: a step of M micro-batches is the step of the batch, in a program that does not grow with M."""

import functools
import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from equivalence import assert_same, compare

from lingvo_moe.analysis.programs.aot import aot
from lingvo_moe.analysis.programs.hlo.collectives import collective_use
from lingvo_moe.analysis.programs.hlo.module import parse_module
from lingvo_moe.core import kernels, randomness
from lingvo_moe.core.base_layer import WeightParams
from lingvo_moe.core.config import registry
from lingvo_moe.core.engine.eager.testing import run_single
from lingvo_moe.core.engine.loop.steps import train_step
from lingvo_moe.core.engine.lowering.lowering import lower_step
from lingvo_moe.core.initializers import WeightInit
from lingvo_moe.core.input.base_input import ArraySpec
from lingvo_moe.core.input.division import Division, MicroBatchError, check_divides
from lingvo_moe.core.kernels import tensorflow
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.optimizers.schedules import Constant
from lingvo_moe.core.optimizers.sgd import Sgd
from lingvo_moe.core.sharding import Mesh, single_device, use_mesh
from lingvo_moe.core.task.base_task import BaseTask
from lingvo_moe.core.task.micro_batches import accumulating_step

# Nothing is random, routing neither; and a group has fewer slots than tokens want. Few layers are traced sooner without
# a loop.
DETERMINISTIC = (
    "input.batch_size=16;task.num_experts=8;task.num_groups=16;task.moe.router=top_k;task.dropout=0.0;"
    "task.moe.router.z_loss_weight=0.5;task.aux_loss_weight=0.1;task.moe.capacity_factor=1.0;"
    "task.repeat=False;task.optimizer=sgd"
)
# One layer of attention and experts.
LANGUAGE = (
    "task.num_layers=1;task.moe_every=1;task.activation_split={'B': 'expert', 'G': 'expert', 'E': 'expert'};"
    "task.weight_split={'E': 'expert'}"
)
MESH = Mesh.parse("expert:4")


# --- how rows are divided


@pytest.mark.parametrize(
    ("rows", "groups", "num", "devices"),
    [(16, 8, 2, 4), (16, 16, 4, 4), (16, 4, 2, 2), (8, 16, 2, 4)],
)
def test_groups_stay_whole_and_rows_on_their_devices(rows, groups, num, devices):
    blocks = int(np.gcd(rows, groups)) // num
    specs = NestedMap(x=ArraySpec((rows, 6), "int32", "BT"), all=ArraySpec((3,), "int32", "M"))
    division = Division(num, blocks, specs)
    x = np.arange(rows * 6).reshape(rows, 6)
    stacked = division.Stacked(NestedMap(x=tf.constant(x), all=tf.constant([1, 2, 3])))
    whole = {tuple(group) for group in x.reshape(groups, -1)}
    found = []
    for i in range(num):
        part = division.Part(stacked, tf.constant(i))
        assert [part.x.shape, part.all.shape] == [s.shape for s in division.PartSpecs().Flatten()][
            ::-1
        ]
        found += [tuple(group) for group in part.x.numpy().reshape(groups // num, -1)]
        # Device d holds the d-th block of rows, before and after.
        own = part.x.numpy()[:, 0] // 6 // (rows // devices)
        np.testing.assert_array_equal(own, np.repeat(np.arange(devices), rows // num // devices))
    assert set(found) == whole and len(found) == groups


def test_a_number_that_does_not_divide_names_what_would():
    name = "train.num_micro_batches"
    check_divides(4, {"input.batch_size": 8, "task.num_groups": 16}, name)
    with pytest.raises(
        MicroBatchError,
        match=r"^train.num_micro_batches=3: input.batch_size=16 and task.num_groups=8 do not divide into that many "
        r"equal parts; choose 1, 2, 4 or 8$",
    ):
        check_divides(3, {"input.batch_size": 16, "task.num_groups": 8}, name)
    with pytest.raises(MicroBatchError, match=r"input.batch_size=7 does not .* choose 1 or 7"):
        check_divides(2, {"input.batch_size": 7}, name)


# --- any task


class Line(BaseTask):
    """A linear model with dropout, a mean over rows that count, and a moving average of its inputs."""

    UNIT = "rows"

    @classmethod
    def Params(cls):
        p = super().Params()
        p.Define("dropout", 0.0, "Rate.")
        return p.Set(
            optimizer=Sgd.Params().Set(momentum=0.0, learning_rate=Constant.Params().Set(value=0.1))
        )

    def __init__(self, params):
        super().__init__(params)
        self.CreateVariable("w", WeightParams((8,), "M", WeightInit.Gaussian(1.0)))
        average = WeightParams((), "", WeightInit.Constant(0.0), "float32", trainable=False)
        self.CreateVariable("average", average)

    def Units(self, batch):
        return NestedMap(rows=tf.reduce_sum(tf.cast(batch.real, self.p.dtype)))

    def FProp(self, theta, batch, seed=None):
        x = kernels.dropout(batch.x, self.p.dropout, seed)
        real = tf.cast(batch.real, theta.w.dtype)
        rows = tf.reduce_sum(real)
        error = tf.square(tf.einsum("BM,M->B", tf.cast(x, theta.w.dtype), theta.w) - 1.0)
        loss = tf.reduce_sum(error * real) / tf.maximum(rows, 1.0)
        moved = 0.5 * theta.average + 0.5 * tf.reduce_mean(batch.x)
        updates = NestedMap()
        updates.Set(f"{self.path}.average", moved)
        return loss, NestedMap(loss=loss, rows=rows, updates=updates)


def _line(rows=12, **kwargs):
    task = Line.Params().Set(name="line", **kwargs).Instantiate()
    rng = np.random.RandomState(0)
    batch = NestedMap(
        x=tf.constant(rng.randn(rows, 8).astype(np.float32)),
        real=tf.constant((np.arange(rows) % 5 != 0) & (np.arange(rows) < rows - 3)),
    )
    specs = NestedMap(x=ArraySpec((rows, 8), "float32", "BM"), real=ArraySpec((rows,), "bool", "B"))
    return task, batch, specs


def _after(task, batch, specs, num):
    """State and metrics after one step of so many micro-batches; the metrics have its gradient too."""
    task = type(task)(task.p)
    update = task.optimizer.Update
    grads = []

    def recording(before, gradients, *rest):
        grads.append(gradients.w)
        return update(before, gradients, *rest)

    task.optimizer.Update = recording
    step = task.TrainStep if num == 1 else accumulating_step(task, num, specs)

    def fn(state, batch):
        state, metrics = step(state, batch)
        return state, NestedMap(metrics, grad=grads[-1])

    with use_mesh(single_device()), kernels.using(tensorflow):
        return tf.function(fn, autograph=False)(task.InitState(tf.constant(1)), batch)


def test_rows_weigh_alike_whichever_micro_batch_they_are_in():
    """Micro-batches have different numbers of rows that count."""
    task, batch, specs = _line(dtype="float64")
    tolerance = 1e-12
    want, want_metrics = _after(task, batch, specs, 1)
    for num in (2, 3, 12):
        state, metrics = _after(task, batch, specs, num)
        # The optimizer computes in float32.
        np.testing.assert_allclose(state.theta.w, want.theta.w, rtol=1e-6)
        np.testing.assert_allclose(state.theta.average, want.theta.average, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(metrics.loss, want_metrics.loss, rtol=tolerance)
        np.testing.assert_allclose(metrics.grad, want_metrics.grad, rtol=tolerance, atol=tolerance)
        assert (metrics.rows, set(metrics)) == (want_metrics.rows, set(want_metrics))


def test_each_micro_batch_draws_with_its_own_seed():
    task, batch, specs = _line(dropout=0.5)
    _, metrics = _after(task, batch, specs, 2)
    with use_mesh(single_device()):
        state = task.InitState(tf.constant(1))
        division = Division(2, 6, specs)
        total = 0.0
        for i in range(2):
            seed = randomness.fold_in(randomness.make_seed(task.p.seed, 0), i)
            part = division.Part(division.Stacked(batch), tf.constant(i))
            total += task.FProp(state.theta, part, seed)[1].loss * task.Units(part).rows
    np.testing.assert_allclose(metrics.loss, total / task.Units(batch).rows, rtol=1e-6)


def test_one_micro_batch_that_is_not_finite_skips_the_step():
    task, batch, specs = _line()
    batch.x = tf.tensor_scatter_nd_update(batch.x, [[7, 0]], [np.nan])
    state, metrics = _after(task, batch, specs, 3)
    first = task.InitState(tf.constant(1))
    np.testing.assert_array_equal(state.theta.w, first.theta.w)
    np.testing.assert_array_equal(state.theta.average, first.theta.average)
    assert (state.step, state.skipped) == (1, 1) and np.isnan(metrics.loss)


def test_gradients_of_narrow_weights_are_summed_in_float32():
    """1 + 2^-9 is not a bfloat16."""

    class Sum(Line):
        def FProp(self, theta, batch, seed=None):
            # In bfloat16 the sum over micro-batches would stay at the first, largest term.
            loss = tf.reduce_sum(tf.cast(theta.w, tf.float32)) * tf.reduce_sum(batch.x)
            return loss, NestedMap(loss=loss, rows=tf.constant(1.0))

        def MicroBatchTerms(self, theta, batch, seed, shares):
            return self.FProp(theta, batch, seed)

    task, batch, specs = _line(rows=3)
    task = Sum(task.p.Copy().Set(dtype="bfloat16"))
    batch.x = tf.constant([[1.0] + [0.0] * 7, [2**-9] + [0.0] * 7, [2**-9] + [0.0] * 7])
    grad = _after(task, batch, specs, 3)[1].grad
    assert grad.dtype == tf.float32
    np.testing.assert_array_equal(grad, np.full(8, 1 + 2**-8, np.float32))


def _times_reduced(text):
    """The number of times that each all-reduce of w's gradient, float32 [8], runs in a step."""
    module = parse_module(text)
    return [
        executed.times
        for executed in module.executions()
        if executed.instruction.opcode.removesuffix("-start") == "all-reduce"
        and any(array.dims == (8,) for array in executed.instruction.arrays)
    ]


@functools.cache
def _line_program(num):
    """A step of _line's task over eight devices."""
    task, _, specs = _line(rows=32 * 8, activation_split={"B": "data"})
    step = train_step(task, SimpleNamespace(BatchSpec=lambda: specs), num)
    return lower_step(step, Mesh.parse("data:8"))


def test_the_program_does_not_grow_with_the_number():
    two, eight = (_line_program(num).Text().count("\n") for num in (2, 8))
    assert abs(two - eight) <= 2  # some constants are equal in one of them


@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="no TPU compiler (libtpu)")
def test_the_tpu_compiler_reduces_a_gradient_once_a_step():
    """It moves the all-reduce behind the loop, where a variable is not one of a scanned layer."""
    texts = [aot.compile_for_topology(_line_program(num), "v3:2x2").hlo_text for num in (2, 8)]
    assert [_times_reduced(text) for text in texts] == [[1], [1]]


# --- models


def _model(num, name="lm.Tiny", override=LANGUAGE):
    params = registry.GetParams(name, f"{DETERMINISTIC};{override}")
    task, inputs = params.task.Instantiate(), params.input.Instantiate()
    batch = task.SampleBatch(inputs, np.random.RandomState(0))
    for side in [batch] if name == "lm.Tiny" else [batch.src, batch.tgt]:
        rows, length = side.segment_ids.shape
        for row in range(rows):  # of different lengths, and one of padding
            side.segment_ids[row, length - 1 - row * 7 % (length - 2) :] = 0
        side.segment_ids[-1] = 0
    return task, batch, train_step(task, inputs, num)


def _state(task):
    return run_single(task.InitState, [np.int32(1)], jit_compile=False)


def test_a_step_of_two_micro_batches_over_devices_is_the_step_of_the_batch():
    """Tokens weigh alike in the loss, groups and tokens in the auxiliary losses; metrics of layers are the batch's.
    SGD's velocities are the gradients.

    Division and slices of the batch need no communication: no collective has their names."""
    task, batch, step = _model(2)
    args, reference = [_state(task), batch], _model(1)[2]
    (_, metrics), collectives = compare(
        step.fn, args, step.arg_specs, str(MESH), reference.fn, tol=2e-6, floor=1e-3
    )
    assert metrics.moe.decoder.over_capacity_ratio.max() > 0.05
    moving = []
    module = parse_module(collectives.hlo)
    for executed in module.executions():
        use = collective_use(executed.instruction, executed.computation, module.attributes)
        if use and use.kind != "all-reduce" and use.bytes >= 16 * 24 * 4 // MESH.size // 2:
            moving.append(executed.instruction.op_name)
    assert not [name for name in moving if "dispatcher" not in name and "experts" not in name]


def test_both_sides_of_the_translation_model_weigh_by_their_own_tokens(monkeypatch):
    """Loss and metrics are compared; gradients are not computed, for those of sums are sums."""
    monkeypatch.setattr(tf.GradientTape, "gradient", lambda _, y, xs: [*map(tf.zeros_like, xs)])
    task, batch, one = _model(1, "mt.M4Tiny", "")
    args, two = [_state(task), batch], _model(2, "mt.M4Tiny", "")[2]
    (_, want), (_, got) = (run_single(s.fn, args, jit_compile=False) for s in (one, two))
    assert want.moe.encoder.over_capacity_ratio.max() > 0.05
    assert_same(got, want, tol=2e-6)
