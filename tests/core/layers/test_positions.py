"""Rotary positions: the formula, distances, steps over a cache, packed rows. test_blockwise.py has them sharded."""

import numpy as np
import pytest
import tensorflow as tf
from layer_testing import SPLITS, init, normal, single

from lingvo_moe.core import kernels
from lingvo_moe.core.kernels import tensorflow, xla
from lingvo_moe.core.layers import masks
from lingvo_moe.core.layers.attention import MultiHeadAttention
from lingvo_moe.core.layers.positions import Rotary


def _layer(**kwargs):
    p = MultiHeadAttention.Params().Set(name="atten", model_dim=8, num_heads=4, dim_per_head=6)
    return p.Set(position=Rotary.Params(), **SPLITS).Set(**kwargs).Instantiate()


def test_the_formula_and_that_products_depend_on_the_distance():
    rotary = Rotary.Params().Set(name="rotary", max_timescale=100.0).Instantiate()
    x = normal(0, 1, 1, 1, 6).numpy()  # [B, T, N, K]
    turned = [single(rotary.Give, tf.constant(x), tf.constant([[p]]))[0, 0, 0] for p in range(9)]
    z = x[0, 0, 0, :3] + 1j * x[0, 0, 0, 3:]
    want = z * np.exp(1j * 5 * 100.0 ** (-np.arange(3) / 3))
    np.testing.assert_allclose(turned[5], np.concatenate([want.real, want.imag]), atol=1e-5)
    products = [np.dot(turned[p], turned[p + 3]) for p in (0, 2, 5)]
    np.testing.assert_allclose(products, products[0], rtol=1e-5)
    with pytest.raises(ValueError, match=r"a head has 5; set task\.key_dim"):
        _layer(dim_per_head=5)


@pytest.mark.parametrize("ops, kv_heads", [(xla, 0), (tensorflow, 1)], ids=["xla", "tensorflow"])
def test_steps_and_packed_rows_equal_whole_sequences(ops, kv_heads):
    layer = _layer(num_kv_heads=kv_heads)
    theta, x = init(layer), normal(0, 2, 5, 8)
    causal = tf.constant(np.tril(np.ones([2, 5, 5], bool)))
    places = tf.constant(np.tile(np.arange(5, dtype="int32"), [2, 1]))
    with kernels.using(ops):
        whole = single(layer.FProp, theta, x, x, causal, positions=places)
        cache = single(layer.InitCache, 2, 5)
        for t in range(5):
            step = causal[:, t : t + 1]
            y, cache = single(layer.ExtendStep, theta, x[:, t : t + 1], cache, tf.constant(t), step)
            np.testing.assert_allclose(y[:, 0], whole[:, t], atol=2e-5)
        both = tf.reshape(x, [1, 10, 8])  # two segments of one row
        segments = tf.constant([[1] * 5 + [2] * 5])
        pos = tf.reshape(places, [1, 10])
        mask = masks.causal_segment_mask(segments, pos)
        packed = single(layer.FProp, theta, both, both, mask, positions=pos)
    np.testing.assert_allclose(tf.reshape(packed, [2, 5, 8]), whole, atol=2e-5)
    with pytest.raises(ValueError, match="atten: queries and keys take positions"):
        single(layer.FProp, theta, x, x, causal)
