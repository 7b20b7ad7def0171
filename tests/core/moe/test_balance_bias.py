"""Balancing by bias: a variable that no gradient changes, through stacks, steps, devices and programs.

Letters: B batch, T time, M model, E expert, L layer.
"""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from equivalence import assert_same

from lingvo_moe.core.base_layer import BaseLayer, WeightParams, updates_of
from lingvo_moe.core.engine.eager.testing import run_sharded
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.initializers import WeightInit
from lingvo_moe.core.layers.repeat import Repeat
from lingvo_moe.core.moe.layer import MoELayer
from lingvo_moe.core.moe.routers.top_k import TopKRouter
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import Mesh, single_device, use_mesh
from lingvo_moe.core.task.base_task import BaseTask
from lingvo_moe.tasks.mt.model import MtModel

B, T, M, E, K, L = 8, 4, 6, 8, 2, 2
RATE = 0.05


class Block(BaseLayer):
    """x plus an MoE layer."""

    def __init__(self, params):
        super().__init__(params)
        router = TopKRouter.Params().Set(k=K, balance_bias=RATE, load_balance_weight=0.0)
        moe = MoELayer.Params().Set(
            model_dim=M, hidden_dim=5, num_experts=E, num_groups=B, router=router
        )
        self.CreateChild("moe", moe)

    def FProp(self, theta, x, shared, seed=None):
        y, extras = self.moe.FProp(theta.moe, x, shared.paddings, seed=seed)
        return x + y, extras


class Fit(BaseTask):
    """A stack of blocks, in a loop or unrolled, trained to output 1."""

    @classmethod
    def Params(cls):
        p = super().Params()
        p.Define("unroll", False, "")
        return p

    def __init__(self, params):
        super().__init__(params)
        repeat = Repeat.Params().Set(
            body=Block.Params(), num_repeats=L, unroll=self.p.unroll, carry_letters="BTM"
        )
        self.CreateChild("blocks", repeat)

    def FProp(self, theta, batch, seed=None):
        shared = NestedMap(paddings=batch.paddings)
        y, extras = self.blocks.FProp(theta.blocks, self.Shard(batch.x, "BTM"), shared, seed=seed)
        loss = tf.reduce_sum(tf.square(y - batch.target)) * (1 / 64)
        metrics = NestedMap(load=extras.metrics.expert_load)
        metrics.update(updates_of(extras))
        return loss, metrics


def _task(unroll=False) -> Fit:
    split = {"B": "expert", "G": "expert", "E": "expert"}
    p = Fit.Params().Set(name="fit", unroll=unroll, activation_split=split)
    return p.Set(weight_split={"E": "expert"}).Instantiate()


def _batch(step, target=1.0):
    rng = np.random.default_rng(step)
    x = rng.normal(size=(B, T, M)).astype(np.float32) + 0.7  # uneven from the start
    paddings = (rng.random((B, T)) < 0.2).astype(np.float32)
    return NestedMap(x=x, paddings=paddings, target=np.float32(target))


def _states(task, steps=3):
    """Returns the state before the first step and after each, on one device, and the last metrics."""
    step = tf.function(task.TrainStep, autograph=False)
    with use_mesh(single_device()):
        states = [task.InitState(tf.constant(1))]
        for i in range(steps):
            state, metrics = step(states[-1], _batch(i).Transform(tf.constant))
            states.append(state)
        skipped, _ = step(states[-1], _batch(0, target=np.nan).Transform(tf.constant))
    return [state.Transform(np.asarray) for state in states], metrics, skipped


@pytest.fixture(scope="module")
def run():
    return _states(_task())


def _router(state):
    return state.theta.blocks.body.moe.router


def test_the_bias_moves_as_computed_by_hand(run):
    """In the first layer, whose input is the batch: choices counted token by token."""
    states, _, _ = run
    assert _router(states[0]).balance_bias.shape == (L, E)
    assert not _router(states[0]).balance_bias.any()
    for i, (state, after) in enumerate(itertools.pairwise(states)):
        batch, router = _batch(i), _router(state)
        count = np.zeros(E)
        for b, t in zip(*np.nonzero(batch.paddings == 0)):
            logits = batch.x[b, t] @ router.wg[0]
            score = np.exp(logits) / np.exp(logits).sum() + router.balance_bias[0]
            for e in np.argsort(-score)[:K]:
                count[e] += 1
        assert count.std() > 1
        moved = np.where(count < count.mean(), RATE, np.where(count > count.mean(), -RATE, 0))
        np.testing.assert_allclose(
            _router(after).balance_bias[0], router.balance_bias[0] + moved, atol=1e-6
        )
        assert np.abs(_router(after).balance_bias[1] - router.balance_bias[1]).max() > 0.9 * RATE


def _close(one, two):
    # Adafactor's steps hardly shrink with the gradient, rounding errors included.
    assert_same(one, two, 1e-3)
    assert_same(_router(one).balance_bias, _router(two).balance_bias, 1e-6)


def test_unrolled_is_the_same(run):
    _close(run[0][-1], _states(_task(unroll=True))[0][-1])


def test_sharded_is_the_same(run):
    """Repeats the last step from the same state on eight devices."""
    task, rows = _task(), ("expert", None, None)
    splits = NestedMap(
        x=TensorSpec((B, T, M), "float32", rows),
        paddings=TensorSpec((B, T), "float32", rows[:2]),
        target=TensorSpec((), "float32"),
    )
    (state, _), collectives = run_sharded(
        task.TrainStep,
        [run[0][-2], _batch(2)],
        Mesh(("expert",), (8,)),
        [task.StateSpecs(), splits],
    )
    _close(run[0][-1], state)
    assert collectives["all-to-all"]  # it was sharded


def test_a_skipped_step_leaves_it_and_nothing_else_holds_it(run):
    states, metrics, skipped = run
    np.testing.assert_array_equal(_router(skipped).balance_bias, _router(states[-1]).balance_bias)
    assert skipped.skipped == 1
    assert "updates" not in metrics
    paths = [path for path, _ in states[-1].slots.FlattenItems()]
    assert any("router.wg" in path for path in paths)
    assert not any("balance_bias" in path for path in paths)


class Count(BaseTask):
    """A trained weight, a count of steps that the task returns, and a constant that it does not."""

    def __init__(self, params):
        super().__init__(params)
        for name, trainable in (("w", True), ("count", False), ("constant", False)):
            weight = WeightParams((2,), "M", WeightInit.Constant(3.0), trainable=trainable)
            self.CreateVariable(name, weight)

    def FProp(self, theta, batch, seed=None):
        loss = tf.reduce_sum(tf.square(theta.w) * theta.constant)
        updates = NestedMap(task=NestedMap({batch: theta.count + 1}))
        return loss, NestedMap(loss=loss, updates=updates)


def test_any_task_may_have_state_that_is_not_trained():
    task = Count.Params().Set(name="task", clip_gradient_norm=1.0).Instantiate()
    with use_mesh(single_device()):
        state = task.InitState(tf.constant(1))
        state, metrics = task.TrainStep(state, "count")
        np.testing.assert_array_equal(state.theta.count, [4, 4])
        np.testing.assert_array_equal(state.theta.constant, [3, 3])
        assert (state.theta.w.numpy() < 3).all()
        assert [path for path, _ in state.slots.FlattenItems()] == ["w.full"]
        np.testing.assert_allclose(metrics.grad_norm, 18 * np.sqrt(2), 1e-6)  # of w alone
        with pytest.raises(ValueError, match=r"task\.w: an update of what is not a variable"):
            task.TrainStep(state, "w")


def test_the_translation_model_passes_it_on():
    """Both sides' biases are among the new theta, and found by what they were."""
    p = MtModel.Params().Set(
        name="mt",
        source_vocab_size=11,
        target_vocab_size=13,
        model_dim=4,
        hidden_dim=8,
        num_heads=2,
        key_dim=2,
        num_encoder_layers=2,
        num_decoder_layers=2,
        num_experts=4,
        num_groups=1,
        activation_split={},
        weight_split={},
        repeat=False,
    )
    p.moe.router = TopKRouter.Params().Set(k=1, balance_bias=RATE)
    task = p.Instantiate()
    ids = np.random.default_rng(0).integers(4, 11, (2, 5)).astype(np.int32)
    row = NestedMap(ids=ids, segment_ids=ids // ids, segment_pos=ids * 0)
    batch = NestedMap(src=row, tgt=NestedMap(row, labels=ids)).Transform(tf.constant)
    with use_mesh(single_device()):
        state, metrics = task.TrainStep(task.InitState(tf.constant(1)), batch)
        assert "updates" not in task.EvalStep(state.theta, batch)
    moved = [v.numpy() for k, v in state.theta.FlattenItems() if k.endswith("balance_bias")]
    assert len(moved) == 2 and "updates" not in metrics
    for bias in moved:
        assert set(np.unique(np.round(bias / RATE))) <= {-1.0, 0.0, 1.0} and bias.any()


@pytest.mark.parametrize("num_experts", [7, 13, 28, 60])
@pytest.mark.parametrize("load", [1, 3, 11, 1000])
def test_an_expert_at_the_mean_gets_no_step(num_experts, load):
    """In floating point, 1/E times the sum of E equal loads does not always equal the load."""
    router = TopKRouter.Params().Set(
        name="router", model_dim=M, num_experts=num_experts, k=1, balance_bias=RATE
    )
    bias_E = tf.zeros([num_experts])
    count_GE = tf.fill([1, num_experts], float(load))
    next_E = router.Instantiate()._NextBias(bias_E, count_GE)
    np.testing.assert_array_equal(next_E, bias_E)
    more_E = router.Instantiate()._NextBias(bias_E, count_GE + tf.one_hot([2], num_experts))
    np.testing.assert_allclose(more_E, RATE * (1 - 2 * tf.one_hot(2, num_experts)))
