"""Routing by sentence, task and id: what tokens share, what differs, which inputs it needs; the dense mixture.

Letters: B batch, T time, G group, S token in group, E expert, M model, U task.
"""

import moe_reference
import numpy as np
import pytest
import tensorflow as tf
from router_testing import SEED, check, route, router

from lingvo_moe.core.moe.layer import MoELayer
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.randomness import make_seed
from lingvo_moe.core.sharding import single_device, use_mesh

M, H, E = 4, 5, 6
RNG = np.random.default_rng(0)


def _layer(level: str, num_groups: int = 0, **router_params) -> MoELayer:
    p = MoELayer.Params().Set(
        name="moe", model_dim=M, hidden_dim=H, num_experts=E, num_groups=num_groups
    )
    p.router.Set(level=level, second_expert_policy="all", **router_params)
    return p.Instantiate()


def test_a_sentence_has_one_choice_and_packed_sentences_their_own():
    """The experts of a sentence are those of its mean, whatever else is in the row or the group."""
    segments = np.array([[1, 1, 1, 2, 2, 0], [1, 2, 2, 3, 3, 3]], np.int32)
    paddings = (segments == 0).astype(np.float32)
    x = RNG.normal(size=(2, 6, M)).astype(np.float32)
    layer = router("top2", M, E, level="sentence", second_expert_policy="all")
    theta = NestedMap(wg=tf.constant(RNG.normal(size=(M, E)), tf.float32))
    context = {"segment_ids": segments}
    routing = route(layer, x, paddings, None, theta=theta, context=context)
    check(routing, paddings)
    chosen = set()
    for b in range(2):
        for segment in range(1, segments[b].max() + 1):
            mine = segments[b] == segment
            gates = moe_reference.softmax(x[b, mine].mean(0) @ theta.wg.numpy())
            first, second = moe_reference.top_2(gates)
            index = routing.expert_index.numpy()[b, mine]
            assert (index == [first, second]).all()
            want = gates[[first, second]] / gates[[first, second]].sum()
            np.testing.assert_allclose(
                routing.gate.numpy()[b, mine], [want] * mine.sum(), rtol=1e-4
            )
            chosen.add((first, second))
    assert len(chosen) > 1  # the sentences do differ


def test_sentences_of_different_rows_are_different_in_a_group():
    """Rows share a group in training, and their sentences have the same numbers."""
    layer = _layer("sentence", num_groups=1)
    p = layer.p.Copy().Set(num_groups=0)
    B, T = 3, 4
    x = tf.constant(RNG.normal(size=(B, T, M)), tf.float32)
    context = NestedMap(segment_ids=tf.constant([[1, 1, 2, 2]] * B))
    outs = []
    with use_mesh(single_device()):
        theta = layer.InitTheta(make_seed(1, 0))
        for one in (layer, p.Set(capacity_factor=100.0).Instantiate()):
            one = one.p.Copy().Set(capacity_factor=100.0).Instantiate()
            outs.append(one.FProp(theta, x, tf.zeros([B, T]), seed=SEED, context=context)[0])
        inference = layer.FProp(theta, x, tf.zeros([B, T]), context=context)[0]
    np.testing.assert_allclose(outs[0], outs[1], atol=1e-6)
    np.testing.assert_allclose(outs[0], inference, atol=1e-6)


@pytest.mark.parametrize(
    ("level", "size", "name"), [("task", "num_tasks", "task_emb"), ("id", "vocab_size", "id_emb")]
)
def test_by_task_or_id(level, size, name):
    """The number alone decides: all its tokens have the experts of emb[number] wg."""
    U = 3
    numbers = RNG.integers(0, U, (2, 8)).astype(np.int32)
    layer = router("top2", M, E, level=level, second_expert_policy="all", **{size: U})
    table = tf.constant(RNG.normal(size=(U, M)), tf.float32)
    theta = NestedMap({"wg": tf.constant(RNG.normal(size=(M, E)), tf.float32), name: table})
    x, none = RNG.normal(size=(2, 8, M)), np.zeros((2, 8))
    context = {"task_ids" if level == "task" else "ids": numbers}
    index = route(layer, x, none, None, theta=theta, context=context).expert_index
    logits = table.numpy() @ theta.wg.numpy()
    np.testing.assert_array_equal(index, np.argsort(-logits, -1)[:, :2][numbers])
    specs = {k: s.shape for k, s in layer.VariableSpecs().FlattenItems()}
    assert specs == {"wg": (M, E), name: (U, M)}


@pytest.mark.parametrize("seed", [None, SEED], ids=["inference", "training"])
def test_the_dense_mixture(seed):
    """It computes sum_e softmax_e FFN_e(x), in training too, whatever the capacity; padding gives zero."""
    B, T = 2, 5
    p = MoELayer.Params().Set(
        name="moe", model_dim=M, hidden_dim=H, num_experts=E, capacity_factor=0.5, min_capacity=1
    )
    p.SetFromText("router", "soft")
    layer = p.Instantiate()
    x = RNG.normal(size=(B, T, M)).astype(np.float32)
    paddings = np.array([[0] * 5, [0, 0, 0, 1, 1]], np.float32)
    with use_mesh(single_device()):
        theta = layer.InitTheta(make_seed(1, 0))
        y, extras = layer.FProp(theta, tf.constant(x), tf.constant(paddings), seed=seed)
    gates = moe_reference.softmax(x @ theta.router.wg.numpy())
    hidden = np.maximum(np.einsum("btm,emh->bteh", x, theta.experts.wi), 0)
    want = np.einsum("bte,bteh,ehm->btm", gates, hidden, theta.experts.wo)
    np.testing.assert_allclose(y, want * (1 - paddings)[..., None], rtol=1e-4, atol=1e-5)
    assert extras.aux_loss == 0 and extras.metrics.experts_per_token == E
    meta = MoELayer.FPropMeta(p, (B, T, M)).flops
    assert meta >= 2 * B * T * M * E + 4 * B * T * E * M * H
