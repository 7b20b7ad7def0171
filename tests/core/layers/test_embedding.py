"""Token and position embeddings: formulas, the dense gradient, sharded = unsharded."""

import numpy as np
import pytest
import tensorflow as tf
from equivalence import compare, with_gradients
from layer_testing import SPLITS, init, normal, single, wave

from lingvo_moe.core.layers.embedding import Embedding
from lingvo_moe.core.layers.positions import PositionalEmbedding
from lingvo_moe.core.nested_map import NestedMap


def _layer(**kwargs):
    p = Embedding.Params().Set(name="emb", vocab_size=11, model_dim=4, **SPLITS)
    return p.Set(**kwargs).Instantiate()


def test_lookup_and_its_dense_gradient():
    layer, theta = _layer(), NestedMap(table=normal(0, 11, 4))
    ids = tf.constant([[1, 5, 1], [0, 10, 5]])

    def fn(theta):
        y = layer.FProp(theta, ids)
        return wave(y), y

    with tf.GradientTape() as tape:
        tape.watch(theta.table)
        loss = single(fn, theta)[0]
    raw = tape.gradient(loss, theta.table)
    assert isinstance(raw, tf.Tensor)  # never IndexedSlices
    y = theta.table.numpy()[ids.numpy()] * 2
    np.testing.assert_allclose(single(fn, theta)[1], y, rtol=1e-6)
    expected = np.zeros([11, 4])
    np.add.at(expected, ids.numpy(), 2 * np.cos(y + np.arange(4)))
    np.testing.assert_allclose(raw, expected, atol=1e-5)


def test_bfloat16_sums_gradients_in_float32():
    """512 equal terms: a bfloat16 sum would stop growing at 256."""
    layer = _layer(fprop_dtype="bfloat16")
    ids = tf.fill([8, 64], 3)

    def fn(theta):
        y = layer.FProp(theta, ids)
        return tf.reduce_sum(tf.cast(y, tf.float32)), y

    out = single(with_gradients(fn), init(layer))
    assert out.rest.dtype == tf.bfloat16
    assert out.grads[0].dtype == tf.float32
    np.testing.assert_allclose(out.grads[0][3], 512 * 2.0)


def test_table_starts_at_unit_size():
    layer = _layer(vocab_size=500, model_dim=64)
    y = single(layer.FProp, init(layer), tf.range(500)[tf.newaxis])
    np.testing.assert_allclose(np.std(y), 1, atol=0.02)


def test_positions():
    layer = PositionalEmbedding.Params().Set(name="pos", model_dim=6).Instantiate()
    pos = tf.constant([[0, 1, 2, 0, 1000]])
    y = single(layer.FProp, NestedMap(), pos)
    angles = np.array([0, 1, 2, 0, 1000.0])[:, None] / np.array([1.0, 100.0, 10000.0])
    waves = np.concatenate([np.sin(angles), np.cos(angles)], -1)
    np.testing.assert_allclose(y[0], waves, atol=1e-4)
    assert layer.VariableSpecs() == {}
    with pytest.raises(ValueError, match=r"pos\.model_dim=7: must be even"):
        PositionalEmbedding.Params().Set(name="pos", model_dim=7).Instantiate()


def test_sharded():
    """Ids are sharded along B, the table is replicated: nothing has to be gathered."""
    position = PositionalEmbedding.Params().Set(name="pos", model_dim=4).Instantiate()

    def fn(theta, ids):
        return _layer().FProp(theta, ids) + position.FProp(NestedMap(), ids)

    ids = tf.constant(np.random.RandomState(0).randint(0, 11, [8, 3]).astype("int32"))
    theta = NestedMap(table=normal(0, 11, 4))
    _, collectives = compare(with_gradients(fn, wave), [theta, ids], [None, ("expert", None)])
    assert collectives["all-gather"] == 0
