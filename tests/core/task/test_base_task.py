"""BaseTask: one step of training, and steps that are not finite, over eight devices."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core import kernels, randomness
from lingvo_moe.core.base_layer import VariableSpec, WeightParams
from lingvo_moe.core.engine.engines import make_engine
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.initializers import WeightInit
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.optimizers.adafactor import Adafactor
from lingvo_moe.core.optimizers.moving_average import average_specs, first_average, next_average
from lingvo_moe.core.optimizers.schedules import SqrtDecay
from lingvo_moe.core.sharding import Mesh, single_device, use_mesh
from lingvo_moe.core.task.base_task import BaseTask, TaskError


class Regression(BaseTask):
    """Predicts y from x [B,M] with experts' weights [E,M] and noise; the loss is scaled by the batch."""

    def __init__(self, params):
        super().__init__(params)
        weight = WeightParams((8, 4), "EM", WeightInit.Gaussian(1.0))
        self.CreateVariable("w", weight)

    def FProp(self, theta, batch, seed=None):
        x = kernels.dropout(self.Shard(batch.x, "BM"), 0.5, seed)
        y = self.Shard(tf.einsum("BM,EM->BE", x, self.Cast(theta.w)), "BE")
        error = tf.reduce_sum((y - 1.0) ** 2) * (1 / 64)
        loss = error * batch.scale
        return loss, NestedMap(loss=loss, error=error)


def test_a_method_that_tasks_had_is_refused_with_what_took_its_place():
    with pytest.raises(
        TypeError, match=r"Old\.MetricLayers is read no more: give TaskMetrics\.Layers"
    ):
        type("Old", (BaseTask,), {"MetricLayers": lambda self: {}})


def _task(**kwargs):
    p = Regression.Params().Set(
        name="regression",
        activation_split={"B": "expert", "E": "expert"},
        weight_split={"E": "expert"},
        optimizer=Adafactor.Params().Set(
            learning_rate=SqrtDecay.Params().Set(multiplier=0.3, constant_steps=1)
        ),
    )
    return p.Set(**kwargs).Instantiate()


def _batch(step=0, scale=1.0):
    x = np.sin(np.arange(32, dtype=np.float32) + step).reshape(8, 4)
    return NestedMap(x=x, scale=np.float32(scale))


@pytest.fixture(scope="module")
def built():
    """The engine, and the first state and the step of a task with all that a step can have."""
    task = _task(ema_decay=0.2, clip_gradient_norm=0.1)
    engine = make_engine("pjrt", Mesh(("expert",), (8,)))
    specs = NestedMap(
        x=TensorSpec((8, 4), "float32", ("expert", None)), scale=TensorSpec((), "float32")
    )
    states = task.StateSpecs()
    init = engine.Build(task.InitState, [TensorSpec((), "int32")], results=states)
    step = engine.Build(task.TrainStep, [states, specs], donate=(0,))
    return engine, init, step


@pytest.mark.parametrize("scale", [np.nan, 3e38])
def test_steps_that_are_not_finite_change_nothing(built, scale):
    """The loss is finite at 3e38, but the gradient's norm overflows."""
    engine, init, step = built
    state, _ = step(init(np.int32(2)), _batch(0))
    before = engine.Get(state)
    for i in range(2):
        state, metrics = step(state, _batch(1 + i, scale))
        assert not np.isfinite(engine.Get(metrics).grad_norm)
    after, metrics = engine.Get(state), engine.Get(metrics)
    assert (after.step, after.skipped, metrics.skipped) == (3, 2, 2.0)
    for name in ("theta", "slots"):
        for (path, old), new in zip(before[name].FlattenItems(), after[name].Flatten()):
            np.testing.assert_array_equal(old, new, err_msg=path)
            assert np.isfinite(new).all()
    # Training continues as if there had been no bad batches, except for their step numbers.
    state, metrics = step(state, _batch(3))
    assert np.isfinite(engine.Get(metrics).loss)
    went_on = engine.Get(state)
    assert (went_on.step, went_on.skipped) == (4, 2)
    assert not np.array_equal(went_on.theta.w, after.theta.w)


def test_the_moving_average_follows_the_weights(built):
    """The average equals NumPy's; a step that is not finite leaves it alone and counts as no update."""
    engine, init, step = built
    state = init(np.int32(3))
    want = engine.Get(state).theta.w
    np.testing.assert_array_equal(engine.Get(state).ema.w, want)
    updates = 0
    for i, scale in enumerate([np.nan, 1.0, 1.0, np.inf, 1.0, 1.0, 1.0]):
        state, _ = step(state, _batch(i, scale))
        now = engine.Get(state)
        if np.isfinite(scale):
            keep = min(0.2, updates / (updates + 9))
            want = keep * want + (1 - keep) * now.theta.w
            updates += 1
        np.testing.assert_allclose(now.ema.w, want, rtol=1e-5, atol=1e-7)
    assert updates / (updates + 9) > 0.2  # the largest share was reached
    assert not np.array_equal(now.ema.w, now.theta.w)


def test_the_moving_average_of_narrow_weights_is_wide_and_others_are_copied():
    specs = NestedMap(
        w=VariableSpec("w", (2,), "bfloat16", "M", WeightInit.Constant(1.0), (None,)),
        count=VariableSpec("c", (), "int32", "", WeightInit.Constant(3), (), trainable=False),
    )
    kept = average_specs(specs)
    assert (kept.w.dtype, kept.count.dtype, kept.w.path) == ("float32", "int32", "w")
    theta = NestedMap(w=tf.constant([1.0, 2.0], tf.bfloat16), count=tf.constant(3))
    average = first_average(theta, specs)
    assert average.w.dtype == tf.float32
    new = NestedMap(w=tf.constant([2.0, 4.0], tf.bfloat16), count=tf.constant(4))
    average = next_average(average, new, specs, 0.75, tf.constant(1000))
    np.testing.assert_allclose(average.w, [1.25, 2.5])
    assert average.count == 4


def test_every_step_draws_other_random_numbers_and_the_same_ones_again():
    """Another step has another loss of the same batch and weights, from dropout; the seed determines it."""

    def loss_at(step, seed):
        task = _task(seed=seed)
        with _one_device():
            state = task.InitState(tf.constant(1))
            state.step = tf.constant(step)
            batch = _batch().Transform(tf.constant)
            return float(task.TrainStep(state, batch)[1].loss)

    assert loss_at(5, 7) == loss_at(5, 7)
    assert len({loss_at(5, 7), loss_at(6, 7), loss_at(5, 8)}) == 3


def test_evaluation_is_without_chance_and_without_change():
    task = _task()
    with _one_device():
        theta = task.InitTheta(randomness.make_seed(1, 0))
        batch = _batch().Transform(tf.constant)
        error = np.square(batch.x.numpy() @ theta.w.numpy().T - 1).sum() / 64
        np.testing.assert_allclose(task.EvalStep(theta, batch).error, error, rtol=1e-6)


def test_a_forward_pass_that_returns_its_loss_alone_is_refused():
    class LossAlone(BaseTask):
        def FProp(self, theta, batch, seed=None):
            return tf.constant(1.0)

    task, batch = LossAlone.Params().Set(name="task").Instantiate(), NestedMap(x=tf.ones([2]))
    with pytest.raises(TaskError, match=r"LossAlone.FProp returned a \w*Tensor; it has to return"):
        task.EvalStep(NestedMap(), batch)


def test_a_variable_that_the_loss_does_not_use_is_named():
    class Idle(Regression):
        def __init__(self, params):
            super().__init__(params)
            self.CreateVariable("idle", WeightParams((2,), "M", WeightInit.Constant()))

    task = Idle.Params().Set(name="task").Instantiate()
    with _one_device():
        state, batch = task.InitState(tf.constant(1)), _batch().Transform(tf.constant)
        with pytest.raises(ValueError, match=r"task: the loss does not depend on variable 'idle'"):
            task.TrainStep(state, batch)


def _one_device():
    return use_mesh(single_device())
