"""Attention: the formula, masks, dropout, steps over a cache (also of a flat beam), sharded = unsharded."""

import numpy as np
import pytest
import tensorflow as tf
from equivalence import assert_steps, compare, with_gradients
from layer_testing import SPLITS, init, normal, single, wave

from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.layers import masks
from lingvo_moe.core.layers.attention import MultiHeadAttention
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.randomness import make_seed


def _layer(**kwargs):
    p = MultiHeadAttention.Params().Set(name="atten", model_dim=8, num_heads=2, dim_per_head=3)
    return p.Set(**SPLITS).Set(**kwargs).Instantiate()


def _numpy(theta, x, source, mask):
    q, k, v = (
        np.einsum("btm,mnk->btnk", a, w)
        for a, w in ((x, theta.q), (source, theta.k), (source, theta.v))
    )
    logits = np.einsum("btnk,bsnk->bnts", q, k) / np.sqrt(3)
    e = np.exp(logits) * np.asarray(mask)[:, None]
    probs = e / e.sum(-1, keepdims=True)
    return np.einsum("bnts,bsnk,nkm->btm", probs, v, theta.o)


def test_formula_and_masks():
    theta = init(_layer())
    x, source = normal(0, 2, 4, 8), normal(1, 2, 5, 8)
    mask = np.random.RandomState(0).rand(2, 4, 5) < 0.5
    mask[:, :, 0] = True
    y = single(_layer().FProp, theta, x, source, tf.constant(mask))
    np.testing.assert_allclose(y, _numpy(theta, x, source, mask), atol=1e-5)
    one_row = mask[:, :1].astype("float32")  # one mask for all queries, as 0/1 numbers
    y = single(_layer().FProp, theta, x, source, tf.constant(one_row))
    np.testing.assert_allclose(y, _numpy(theta, x, source, one_row), atol=1e-5)


def test_masked_positions_never_matter_and_empty_masks_are_finite():
    theta, layer = init(_layer()), _layer()
    segments = tf.constant([[1, 1, 2, 0]])
    mask = masks.segment_mask(segments, segments)
    x = normal(0, 1, 4, 8)
    loud = x + 1e3 * tf.cast(segments != 1, tf.float32)[..., tf.newaxis]
    y, z = (single(layer.FProp, theta, t, t, mask).numpy() for t in (x, loud))
    np.testing.assert_array_equal(y[0, :2], z[0, :2])
    assert np.isfinite(z).all()


def test_dropout_on_probabilities():
    """With equal values the output is proportional to the sum of what dropout leaves."""
    layer = _layer(atten_dropout_prob=0.5)
    theta = init(layer)
    x = tf.ones([4, 50, 8])
    args = (theta, x, x, tf.ones([4, 1, 50], tf.bool))
    full = single(layer.FProp, *args).numpy()
    dropped = single(layer.FProp, *args, seed=make_seed(0, 1)).numpy()
    assert np.abs(dropped - full).max() > 1e-3
    np.testing.assert_allclose(dropped.mean((0, 1)), full.mean((0, 1)), atol=0.05)


def test_steps_equal_the_whole_sequence():
    layer = _layer()
    theta, x = init(layer), normal(0, 2, 5, 8)
    causal = tf.constant(np.tril(np.ones([2, 5, 5], bool)))
    whole = single(layer.FProp, theta, x, x, causal)

    @tf.function(jit_compile=True, autograph=False)
    def step(x, cache, time, mask):
        return single(layer.ExtendStep, theta, x, cache, time, mask)

    assert_steps(step, x, layer.InitCache(2, 5), causal, whole)


def test_flat_beam_equals_separate_sequences():
    """Three hypotheses in one cache; at step 2, two of them continue the first one."""
    layer, length, j = _layer(), 4, 3
    theta, x = init(layer), normal(0, 2, length, j, 8)
    parents = [[0, 1, 2], [0, 1, 2], [0, 0, 2], [2, 1, 0]]
    cache = layer.InitCache(2, length, j)
    own = np.zeros([j, length * j], bool)
    pasts = [[], [], []]
    for t in range(length):
        own, pasts = own[parents[t]], [list(pasts[i]) for i in parents[t]]
        for h in range(j):
            own[h, t * j + h] = True
            pasts[h].append(x[:, t, h])
        mask = tf.constant(np.stack([own, own]))
        y, cache = single(layer.ExtendStep, theta, x[:, t], cache, tf.constant(t), mask)
        for h in range(j):
            past = tf.stack(pasts[h], axis=1)
            alone = single(layer.FProp, theta, past, past, tf.ones([2, 1, t + 1], tf.bool))
            np.testing.assert_allclose(y[:, h], alone[:, -1], atol=1e-5)


def test_precomputed_memory():
    layer = _layer()
    theta, x, memory = init(layer), normal(0, 2, 3, 8), normal(1, 2, 5, 8)
    mask = tf.constant([[[1, 1, 1, 0, 0]], [[1, 1, 1, 1, 1]]])
    kv = single(layer.PrecomputeMemory, theta, memory)
    y = single(layer.AttendMemory, theta, x, kv, mask)
    np.testing.assert_allclose(y, single(layer.FProp, theta, x, memory, mask), atol=1e-6)


def test_bfloat16_is_close():
    theta, x = init(_layer()), normal(0, 2, 4, 8)
    mask = tf.ones([2, 1, 4], tf.bool)
    low = tf.cast(x, tf.bfloat16)
    y = single(_layer(fprop_dtype="bfloat16").FProp, theta, low, low, mask)
    assert y.dtype == tf.bfloat16
    full = single(_layer().FProp, theta, x, x, mask)
    np.testing.assert_allclose(tf.cast(y, tf.float32), full, atol=0.05)


def test_meta_and_errors():
    p = _layer().p
    meta = MultiHeadAttention.FPropMeta(p, (2, 4, 8), (2, 5, 8))
    projections = 2 * 8 * 6 * 2 * (4 + 5 + 5 + 4)
    assert meta.flops == projections + 2 * (2 * 2 * 2 * 4 * 5 * 3)
    assert meta.out_shapes == ((2, 4, 8),)
    with pytest.raises(ValueError, match="model_dim 8 does not divide into 3 heads"):
        _layer(num_heads=3, dim_per_head=0)


def test_sharded():
    layer = _layer(atten_dropout_prob=0.2)

    def fn(theta, x, source, mask, seed):
        return layer.FProp(theta, x, source, mask, seed=seed)

    mask = tf.constant(np.random.RandomState(0).rand(8, 2, 3) < 0.7)
    args = [init(layer), normal(0, 8, 2, 8), normal(1, 8, 3, 8), mask, make_seed(1, 1)]
    rows = ("expert", None, None)
    _, collectives = compare(with_gradients(fn, wave), args, [None, rows, rows, rows, None])
    assert collectives["all-gather"] == collectives["all-to-all"] == 0


def test_sharded_step():
    """A step on rows sharded over eight devices needs no communication at all."""
    layer = _layer()
    theta, x = init(layer), normal(0, 8, 2, 8)
    cache = NestedMap(k=normal(1, 3, 8, 2, 2, 3), v=normal(2, 3, 8, 2, 2, 3))
    own = np.array([[1, 0, 1, 0, 0, 0], [0, 1, 0, 1, 0, 0]], "int32")
    mask = tf.constant(np.tile(own, [8, 1, 1]))
    args = [theta, x, cache, tf.constant(1), mask]
    rows = ("expert", None, None)
    by_row = (None, "expert", None, None, None)
    split = cache.Transform(lambda c: TensorSpec(c.shape, "float32", by_row))
    splits = [None, rows, split, None, rows]
    _, collectives = compare(layer.ExtendStep, args, splits)
    assert not collectives
