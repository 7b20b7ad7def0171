"""Attention: the formula, masks, dropout, steps over a cache (also of a flat beam), sharded = unsharded."""

import numpy as np
import pytest
import tensorflow as tf
from equivalence import compare, with_gradients
from layer_testing import SPLITS, init, normal, single, wave

from lingvo_moe.core import kernels
from lingvo_moe.core.config.checks import ParamError
from lingvo_moe.core.kernels import tensorflow as tensorflow_kernels, xla
from lingvo_moe.core.layers import masks
from lingvo_moe.core.layers.attention import MultiHeadAttention
from lingvo_moe.core.layers.positions import Rotary
from lingvo_moe.core.layers.transformer_layer import TransformerLayer
from lingvo_moe.core.randomness import make_seed
from lingvo_moe.tasks.transformer.params import ATTENTIONS


def _layer(**kwargs):
    p = MultiHeadAttention.Params().Set(name="atten", model_dim=8, num_heads=2, dim_per_head=3)
    return p.Set(**SPLITS).Set(**kwargs).Instantiate()


def _numpy(theta, x, source, mask, scale=3**-0.5):
    q, k, v = (
        np.einsum("btm,mnk->btnk", a, theta[name]) + theta.get(f"{name}_bias", 0.0)
        for a, name in ((x, "q"), (source, "k"), (source, "v"))
    )
    logits = np.einsum("btnk,bsnk->bnts", q, k) * scale
    e = np.exp(logits) * np.asarray(mask)[:, None]
    probs = e / e.sum(-1, keepdims=True)
    return np.einsum("bnts,bsnk,nkm->btm", probs, v, theta.o) + theta.get("o_bias", 0.0)


@pytest.mark.parametrize("ops", [xla, tensorflow_kernels], ids=["xla", "tensorflow"])
def test_formula_with_masks_biases_and_a_scale_of_scores(ops):
    layer = _layer(biases=True, score_scale=1.5)
    theta, plain = init(layer), init(_layer())
    np.testing.assert_allclose(theta.q, plain.q / (1.5 * np.sqrt(3)), rtol=1e-5)
    theta = theta.Transform(lambda w: w + 0.3 * normal(w.shape.rank, *w.shape))
    x, source = normal(0, 2, 4, 8), normal(1, 2, 5, 8)
    mask = np.random.RandomState(0).rand(2, 4, 5) < 0.5
    mask[:, :, 0] = True
    for seen in (mask, mask[:, :1].astype("float32")):  # and one for all queries, as 0/1 numbers
        with kernels.using(ops):
            y = single(layer.FProp, theta, x, source, tf.constant(seen))
            plain_y = single(_layer().FProp, plain, x, source, tf.constant(seen))
        np.testing.assert_allclose(y, _numpy(theta, x, source, seen, 1.5), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(plain_y, _numpy(plain, x, source, seen), atol=1e-5)


def test_masked_positions_never_matter_and_empty_masks_are_finite():
    theta, layer = init(_layer()), _layer()
    segments = tf.constant([[1, 1, 2, 0]])
    mask = masks.segment_mask(segments, segments)
    x = normal(0, 1, 4, 8)
    loud = x + 1e3 * tf.cast(segments != 1, tf.float32)[..., tf.newaxis]
    y, z = (single(layer.FProp, theta, t, t, mask).numpy() for t in (x, loud))
    np.testing.assert_array_equal(y[0, :2], z[0, :2])
    assert np.isfinite(z).all()


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


# Every parameter of a registered attention that changes attention to a memory.
OF_MEMORY = {
    "multi_head": {"num_kv_heads": 1, "biases": True, "score_scale": 1.0},
    "extended": {"biases": True, "sinks": True, "qk_norm": "projection"},
    "extended by head": {"num_kv_heads": 1, "qk_norm": "unit", "use_positions": False},
    "latent": {"rank": 6, "query_rank": 5, "turned_dim": 4, "value_dim": 5},
}
# Those by which values depend on the positions of tokens.
BY_POSITION = {
    "multi_head": {"position": Rotary.Params()},
    "extended": {"window": 3, "chunk": 4, "temperature_length": 8},
    "latent": {"position": Rotary.Params()},
}


@pytest.mark.parametrize("ops", [xla, tensorflow_kernels], ids=["xla", "tensorflow"])
@pytest.mark.parametrize("name", OF_MEMORY)
def test_attention_to_a_memory_equals_the_forward_pass(name, ops):
    p = ATTENTIONS[name.split()[0]].Params().Set(name="atten", model_dim=8, num_heads=2)
    layer = p.Set(**OF_MEMORY[name]).Instantiate()
    # Biases and sinks begin at zero.
    theta = init(layer).Transform(lambda w: w + 0.5 * normal(w.shape.rank, *w.shape))
    x, memory = normal(0, 2, 3, 8), normal(1, 2, 5, 8)
    mask = tf.constant([[[1, 1, 1, 0, 0]], [[1, 1, 1, 1, 1]]])
    with kernels.using(ops):
        want = single(layer.FProp, theta, x, memory, mask)
        kv = single(layer.PrecomputeMemory, theta, memory)
        got = single(layer.AttendMemory, theta, x, kv, mask)
    assert kv.Transform(lambda x: x.shape.rank) == layer.MemoryLetters().Transform(len)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_cross_attention_is_refused_what_goes_by_positions():
    assert BY_POSITION.keys() == set(ATTENTIONS) == {name.split()[0] for name in OF_MEMORY}
    for name, params in BY_POSITION.items():
        for param, value in params.items():
            cross = ATTENTIONS[name].Params().Set(num_heads=2, **{param: value})
            p = TransformerLayer.Params().Set(name="layer", model_dim=8, cross_atten_tpl=cross)
            with pytest.raises(ParamError, match=f"layer.cross_atten.{param}=.*must not be set"):
                p.Instantiate()


def test_latent_attention_counts_the_tokens_of_a_memory():
    p = ATTENTIONS["latent"].Params().Set(model_dim=8, num_heads=2, **OF_MEMORY["latent"])
    queries, source = 5 * (8 + 2 * 8) + 2 * 5 * 8, 8 * (6 + 4) + 6 * 2 * (4 + 5)
    products = 2 * 3 * 7 * (8 + 5)
    flops = p.cls.FPropMeta(p, (2, 3, 8), (2, 7, 8)).flops
    assert flops == 2 * 2 * (3 * queries + 7 * source + products)


def test_errors():
    for cls in ATTENTIONS.values():
        p = cls.Params().Set(name="atten", model_dim=8, num_heads=3)
        with pytest.raises(ValueError, match="model_dim 8 does not divide into 3 heads"):
            p.Instantiate()
    p = ATTENTIONS["latent"].Params().Set(name="atten", model_dim=8, position=Rotary.Params())
    with pytest.raises(ValueError, match=r"a head has 3; .*its turned_dim"):
        p.Set(turned_dim=3).Instantiate()


def test_sharded():
    layer = _layer(atten_dropout_prob=0.2)

    def fn(theta, x, source, mask, seed):
        return layer.FProp(theta, x, source, mask, seed=seed)

    mask = tf.constant(np.random.RandomState(0).rand(8, 2, 3) < 0.7)
    args = [init(layer), normal(0, 8, 2, 8), normal(1, 8, 3, 8), mask, make_seed(1, 1)]
    rows = ("expert", None, None)
    _, collectives = compare(with_gradients(fn, wave), args, [None, rows, rows, rows, None])
    assert collectives["all-gather"] == collectives["all-to-all"] == 0
