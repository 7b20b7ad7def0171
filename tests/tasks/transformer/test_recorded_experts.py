"""Recorded experts of a forward pass in another one: the same bits, other experts, in a loop and unrolled; two devices.

Letters: B batch, T time, L MoE layer, k choice rank.
"""

import numpy as np
import pytest
import tensorflow as tf
from equivalence import assert_same, compare, state_and_batch

from lingvo_moe.core.config import registry
from lingvo_moe.core.engine.eager.testing import run_sharded, run_single
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.moe.routers.losses_and_metrics import noting_choices, recorded_experts
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import Mesh

pytestmark = pytest.mark.slow

# Two blocks of a dense layer and one with experts.
SIZES = (
    "task.vocab_size=24;input.target_vocab_size=24;input.target_length=8;input.batch_size=4;task.num_layers=4;"
    "task.num_experts=4;task.moe_every=2;task.num_groups=4;task.dropout=0.0"
)
TOP_K = (
    "task.moe.router=top_k;task.moe.router.k=3;task.moe.router.gate=sigmoid;task.moe.router.jitter=0.2;"
    "task.moe.dispatcher=dropless"
)
ROUTERS = {"top_k": (TOP_K, 3), "top2": ("task.moe.capacity_factor=1.0", 2)}
BOTH = pytest.mark.parametrize("router", ROUTERS)


def _experiment(*overrides):
    params = registry.GetParams("lm.Tiny", ";".join((SIZES, *overrides)))
    return params.task.Instantiate(), params.input.Instantiate()


def _step(task):
    """(theta, batch) -> loss, gradients and the experts [B,T,L,k] of a forward pass of training."""

    def run(theta, batch):
        with tf.GradientTape() as tape, noting_choices():
            tape.watch(theta.Flatten())
            loss, metrics = task.FProp(theta, batch, tf.constant([3, 4], tf.int32))
        experts = recorded_experts(metrics.moe.decoder.choices, batch.ids)
        grads = tape.gradient(loss, theta.Flatten())
        return NestedMap(loss=loss, grads=theta.Pack(grads), experts=experts)

    return run


def _run(fn, *args):
    return run_single(fn, args, jit_compile=False)


def _equal(got, want):
    for (path, x), (_, y) in zip(got.FlattenItems(), want.FlattenItems(), strict=True):
        np.testing.assert_array_equal(x, y, err_msg=path)


@BOTH
def test_the_step_of_recorded_experts_is_the_ordinary_one_bit_for_bit(router):
    """Other experts are taken over, too; where they are negative the router's own stay."""
    override, k = ROUTERS[router]
    task, inputs = _experiment(override)
    state, batch = state_and_batch(task, inputs)
    want = _run(_step(task), state.theta, batch)
    assert want.experts.shape == (*batch.ids.shape, 2, k)
    assert (want.experts[:, :, 0] != want.experts[:, :, 1]).any()
    recorded = NestedMap(batch, experts=want.experts)
    _equal(_run(_step(task), state.theta, recorded), want)
    unrolled, _ = _experiment(override, "task.repeat=False")
    assert_same(_run(_step(unrolled), state.theta, recorded), want)

    turned = NestedMap(batch, experts=(want.experts + 1) % 4)
    turned.experts[1:] = -1
    other = _run(_step(task), state.theta, turned)
    np.testing.assert_array_equal(other.experts[0], turned.experts[0])
    np.testing.assert_array_equal(other.experts[1:], want.experts[1:])
    assert abs(other.loss - want.loss) > 1e-4
    gating = [g for path, g in other.grads.FlattenItems() if path.endswith("router.wg")]
    assert gating and all(np.abs(g).max() > 1e-6 for g in gating)


def test_scored_experts_give_the_same_scores():
    task, inputs = _experiment(TOP_K)
    state, batch = state_and_batch(task, inputs)

    def score(theta, batch):
        return task.LogProbs(theta, batch, with_experts=True)

    log_probs, _, experts = _run(score, state.theta, batch)
    assert experts.shape == (*batch.ids.shape, 2, 3)
    again = _run(score, state.theta, NestedMap(batch, experts=experts))
    np.testing.assert_array_equal(again[0], log_probs)
    other = _run(score, state.theta, NestedMap(batch, experts=(experts + 1) % 4))
    np.testing.assert_array_equal(other[2], (experts + 1) % 4)
    assert np.abs(other[0] - log_probs).max() > 1e-4


def test_over_two_devices():
    """The same values and gradients; recorded experts lie beside their tokens, and nothing more is exchanged."""
    override, k = ROUTERS["top2"]
    task, inputs = _experiment(override, "task.activation_split={'B': 'data', 'G': 'data'}")
    state, batch = state_and_batch(task, inputs)
    chosen = np.argsort(np.random.RandomState(0).rand(*batch.ids.shape, 2, 4), -1)[..., :k]
    recorded = NestedMap(batch, experts=chosen.astype(np.int32))

    def splits(batch):
        rows = ("data", None)
        specs = batch.Transform(
            lambda x: TensorSpec(x.shape, x.dtype.name, rows + (None,) * (x.ndim - 2))
        )
        return [task.VariableSpecs(), specs]

    mesh, step = "data:2", _step(task)
    _, without = run_sharded(step, [state.theta, batch], Mesh.parse(mesh), splits(batch))
    got, collectives = compare(step, [state.theta, recorded], splits(recorded), mesh)
    np.testing.assert_array_equal(got.experts, chosen)
    assert dict(collectives) == dict(without) != {}


def test_recorded_experts_that_do_not_fit_are_refused():
    task, inputs = _experiment(TOP_K)
    state, batch = state_and_batch(task, inputs)

    def run(task, *sizes):
        experts = np.zeros((*batch.ids.shape, *sizes), np.int32)
        _run(task.FProp, state.theta, NestedMap(batch, experts=experts))

    with pytest.raises(ValueError, match="recorded `experts` are of 4 layers, and 2 have experts"):
        run(task, 4, 3)
    with pytest.raises(ValueError, match="have 2 for each token, and this router chooses 3"):
        run(task, 2, 2)
    soft, _ = _experiment("task.moe.router=soft")
    with pytest.raises(ValueError, match="SoftRouter takes no recorded `experts`; top_k and top2"):
        run(soft, 2, 4)
