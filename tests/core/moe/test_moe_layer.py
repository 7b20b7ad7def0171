"""The MoE layer compared with a loop over tokens: values, gradients, overflow, padding, inference, cost."""

import moe_reference
import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core import randomness, sharding
from lingvo_moe.core.moe.layer import MoELayer
from lingvo_moe.core.nested_map import NestedMap

B, T, M, H, E = 4, 6, 8, 16, 4
SEED = np.array([5, 6], np.int32)


@pytest.fixture(autouse=True)
def _one_device():
    with sharding.use_mesh(sharding.single_device()):
        yield


def _layer(**params) -> tuple[MoELayer, NestedMap]:
    p = MoELayer.Params().Set(name="moe", model_dim=M, hidden_dim=H, num_experts=E)
    layer = p.Set(**params).Instantiate()
    return layer, layer.InitTheta(tf.constant([1, 2]))


def _inputs(seed: int = 0, padded: int = 2) -> tuple[tf.Tensor, tf.Tensor]:
    rng = np.random.default_rng(seed)
    paddings = np.zeros((B, T), np.float32)
    paddings[1:, T - padded :] = 1
    return tf.constant(rng.normal(size=(B, T, M)), tf.float32), tf.constant(paddings)


def _reference(layer: MoELayer, theta: NestedMap, x, paddings, groups, capacity, seed):
    """Computes the layer by loops: (y, routing)."""
    x = x.numpy().reshape(groups, -1, M)
    real = 1 - paddings.numpy().reshape(groups, -1)
    gates = tf.nn.softmax(tf.einsum("GSM,ME->GSE", x, theta.router.wg)).numpy()
    rnd = None
    if seed is not None:
        rnd = randomness.uniform(layer.FoldSeed(tf.constant(seed), "router"), real.shape).numpy()
    routed = moe_reference.route(gates, real, capacity, rnd)
    wi, wo = theta.experts.wi.numpy(), theta.experts.wo.numpy()
    return moe_reference.moe(x, routed, wi, wo).reshape(B, T, M), routed


def test_shared_experts_are_one_wide_layer_beside_the_routed_ones():
    plain, theta = _layer()
    layer, more = _layer(num_shared_experts=2)
    x, paddings = _inputs()
    theta.shared_experts = more.shared_experts
    assert theta.shared_experts.wi.shape == (M, 2 * H)
    wi, wo = theta.shared_experts.wi, theta.shared_experts.wo
    beside = np.maximum(x.numpy() @ wi.numpy(), 0) @ wo.numpy()
    for seed in (None, tf.constant(SEED)):
        y, _ = layer.FProp(theta, x, paddings, seed=seed)
        routed, _ = plain.FProp(theta, x, paddings, seed=seed)
        np.testing.assert_allclose(y, routed + beside, atol=1e-5)
    flops = [one.FPropMeta(one.p, (B, T, M)).flops for one in (layer, plain)]
    assert flops[0] - flops[1] == 2 * 2 * B * T * M * 2 * H


@pytest.mark.parametrize("num_groups", [0, 2])
def test_equals_a_loop_over_tokens(num_groups):
    layer, theta = _layer(num_groups=num_groups, capacity_factor=1.0, min_capacity=1)
    x, paddings = _inputs()
    y, extras = layer.FProp(theta, x, paddings, seed=tf.constant(SEED))
    groups = num_groups or B
    capacity = -(-(B * T // groups) // E)
    want, routed = _reference(layer, theta, x, paddings, groups, capacity, SEED)
    assert (routed["wanted"] > routed["kept"]).any(), "nothing overflowed: a weak case"
    np.testing.assert_allclose(y, want, atol=1e-5)
    np.testing.assert_allclose(extras.aux_loss, routed["aux_loss"], rtol=1e-5)
    np.testing.assert_allclose(extras.metrics.effective_capacity, E * capacity * groups / (B * T))


def test_gradients_equal_those_of_a_dense_mixture():
    """Differentiates sum_k gate_k FFN_{e_k}(x) with every expert computed for every token."""
    layer, theta = _layer(num_groups=2, capacity_factor=1.0, min_capacity=1)
    x, paddings = _inputs()
    target = tf.constant(np.random.default_rng(3).normal(size=(B, T, M)), tf.float32)
    _, routed = _reference(layer, theta, x, paddings, 2, 3, SEED)
    weights = [theta.router.wg, theta.experts.wi, theta.experts.wo, x]

    def dense() -> tf.Tensor:
        gates = tf.nn.softmax(tf.einsum("BTM,ME->BTE", x, theta.router.wg))
        gates = tf.reshape(gates, [2, -1, E])
        chosen = tf.gather(gates, routed["index"], batch_dims=2)
        share = chosen / tf.reduce_sum(chosen, -1, keepdims=True) * routed["kept"]
        per_expert = tf.reduce_sum(share[..., None] * tf.one_hot(routed["index"], E), 2)
        hidden = tf.nn.relu(tf.einsum("BTM,EMH->BTEH", x, theta.experts.wi))
        out = tf.einsum("BTEH,EHM->BTEM", hidden, theta.experts.wo)
        return tf.einsum("BTE,BTEM->BTM", tf.reshape(per_expert, [B, T, E]), out)

    grads = []
    for fn in (lambda: layer.FProp(theta, x, paddings, seed=tf.constant(SEED))[0], dense):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            loss = tf.reduce_sum((fn() - target) ** 2)
        grads.append(tape.gradient(loss, weights))
    for got, want, name in zip(*grads, ("wg", "wi", "wo", "x")):
        assert np.abs(want).max() > 1e-3, name
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("seed", [None, SEED])
def test_padding_comes_out_as_zeros_and_moves_nothing(seed):
    layer, theta = _layer(num_groups=2)
    x, paddings = _inputs()
    seed = None if seed is None else tf.constant(seed)
    y, extras = layer.FProp(theta, x, paddings, seed=seed)
    assert not np.any(y.numpy()[paddings.numpy() == 1])
    noise = x + 100 * paddings[..., None]
    y2, extras2 = layer.FProp(theta, noise, tf.cast(paddings, tf.bool), seed=seed)
    np.testing.assert_array_equal(y, y2)
    for (name, a), b in zip(extras.FlattenItems(), extras2.Flatten()):
        np.testing.assert_array_equal(a, b, err_msg=name)


def test_inference_drops_nothing():
    # 5 groups divide nothing here.
    layer, theta = _layer(num_groups=5, capacity_factor=0.1, min_capacity=1)
    x, paddings = _inputs(padded=0)
    y, extras = layer.FProp(theta, x, paddings)
    want, _ = _reference(layer, theta, x, paddings, B, None, None)
    np.testing.assert_allclose(y, want, atol=1e-5)
    np.testing.assert_allclose(extras.metrics.dispatch_2, 1, rtol=1e-6)


def test_bfloat16_activations_are_routed_in_float32():
    layer, theta = _layer(num_groups=2, fprop_dtype="bfloat16")
    exact, _ = _layer(num_groups=2)
    x, paddings = _inputs()
    x = tf.cast(tf.cast(x, tf.bfloat16), tf.float32)
    y, extras = layer.FProp(theta, x, paddings, seed=tf.constant(SEED))
    want, want_extras = exact.FProp(theta, x, paddings, seed=tf.constant(SEED))
    assert y.dtype == tf.bfloat16
    np.testing.assert_allclose(tf.cast(y, tf.float32), want, atol=0.05)
    for (name, a), b in zip(extras.FlattenItems(), want_extras.Flatten()):
        assert a.dtype == tf.float32
        np.testing.assert_allclose(a, b, rtol=1e-6, err_msg=name)
