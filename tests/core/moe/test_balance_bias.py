"""Balancing by bias: a variable that no gradient changes, through a model's stacks and steps.

Letters: M model, E expert.
"""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core.moe.routers.top_k import TopKRouter
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import single_device, use_mesh
from lingvo_moe.tasks.mt.mt_model import MtModel

M = 6
RATE = 0.05


def test_the_translation_model_passes_it_on():
    """Both sides' biases are among the new theta, and found by what they were."""
    sizes = {"source_vocab_size": 11, "target_vocab_size": 13, "model_dim": 4, "hidden_dim": 8}
    p = MtModel.Params().Set(
        name="mt", num_heads=2, key_dim=2, num_experts=4, num_groups=1, **sizes
    )
    p.Set(num_encoder_layers=2, num_decoder_layers=2, repeat=False)
    p.Set(activation_split={}, weight_split={})
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
    assert not any("balance_bias" in path for path, _ in state.slots.FlattenItems())
    for bias in moved:
        assert set(np.unique(np.round(bias / RATE))) <= {-1.0, 0.0, 1.0} and bias.any()


@pytest.mark.parametrize("num_experts", [7, 28])
@pytest.mark.parametrize("load", [3, 1000])
def test_an_expert_at_the_mean_gets_no_step(num_experts, load):
    """1/E times the sum of E equal loads does not always equal the load in floating point."""
    router = TopKRouter.Params().Set(
        name="router", model_dim=M, num_experts=num_experts, k=1, balance_bias=RATE
    )
    bias_E = tf.zeros([num_experts])
    count_GE = tf.fill([1, num_experts], float(load))
    next_E = router.Instantiate()._NextBias(bias_E, count_GE)
    np.testing.assert_array_equal(next_E, bias_E)
    more_E = router.Instantiate()._NextBias(bias_E, count_GE + tf.one_hot([2], num_experts))
    np.testing.assert_allclose(more_E, RATE * (1 - 2 * tf.one_hot(2, num_experts)))
