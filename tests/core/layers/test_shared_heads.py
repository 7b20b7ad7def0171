"""Heads that share keys and values, in training, in steps, with TensorFlow's kernels and sharded.

With as many heads of keys as queries this is plain attention; with fewer, plain attention whose keys and values are
repeated.

Letters: B batch, T query, S key, M model, N head, A head of keys and values, K key dimension.
"""

import functools

import numpy as np
import pytest
import tensorflow as tf
from equivalence import assert_same, compare, with_gradients
from layer_testing import SPLITS, init, normal, single, wave

from lingvo_moe.core import kernels
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.kernels import tensorflow, xla
from lingvo_moe.core.layers.attention import MultiHeadAttention
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.randomness import make_seed

M, N, K = 8, 8, 3


def _layer(kv_heads, **kwargs):
    p = MultiHeadAttention.Params().Set(name="atten", model_dim=M, num_heads=N, dim_per_head=K)
    return p.Set(num_kv_heads=kv_heads, **SPLITS).Set(**kwargs).Instantiate()


def _repeated(theta):
    """Returns weights of plain attention: each head has a copy of the keys and values that it shares."""
    times = N // theta.k.shape[1]
    return NestedMap(theta, **{name: tf.repeat(theta[name], times, 1) for name in "kv"})


def _mask(*shape):
    mask = np.random.RandomState(0).rand(*shape) < 0.6
    mask[..., 0] = True
    return tf.constant(mask)


@pytest.mark.parametrize("own", [xla, tensorflow], ids=["xla", "tensorflow"])
@pytest.mark.parametrize("kv_heads, cross", [(1, False), (2, True)])
def test_values_and_gradients_are_those_of_repeated_keys_and_values(kv_heads, cross, own):
    few = _layer(kv_heads, atten_dropout_prob=0.2)
    plain = _layer(0, atten_dropout_prob=0.2)
    theta = init(few)
    assert theta.k.shape == theta.v.shape == (M, kv_heads, K)
    assert few.VariableSpecs().k.letters == "MAK"
    source, mask = normal(1, 2, 4, M), _mask(2, 5, 4 if cross else 5)

    def run(layer, theta, x):
        return layer.FProp(theta, x, source if cross else x, mask, seed=make_seed(3, 4))

    x = normal(0, 2, 5, M)
    want = single(with_gradients(lambda t, x: run(plain, _repeated(t), x), wave), theta, x)
    with kernels.using(own):
        got = single(with_gradients(lambda t, x: run(few, t, x), wave), theta, x)
    assert_same(got, want)


def test_steps_of_a_beam_over_a_smaller_cache():
    """Two hypotheses; from step 2 both continue the first one."""
    kv_heads = 4
    few, plain = _layer(kv_heads), _layer(0)
    theta = init(few)
    whole = _repeated(theta)
    masks = np.zeros([3, 2, 6], bool)
    masks[0, 0, 0] = masks[0, 1, 1] = True
    masks[1] = masks[0] + np.eye(2, 6, 2)
    masks[2] = masks[1][[0, 0]] + np.eye(2, 6, 4)
    caches = [few.InitCache(3, 3, 2), plain.InitCache(3, 3, 2)]
    assert caches[0].k.shape == (3, kv_heads, 3, 2, K)
    past = []
    for t in range(3):
        x, mask = normal(t, 3, 2, M), tf.constant(np.stack([masks[t]] * 3))
        past.append(x[:, :1])
        want, caches[1] = single(plain.ExtendStep, whole, x, caches[1], tf.constant(t), mask)
        got, caches[0] = single(few.ExtendStep, theta, x, caches[0], tf.constant(t), mask)
        np.testing.assert_allclose(got, want, atol=1e-5)
        prefix = tf.concat(past, 1)
        all_of_it = single(few.FProp, theta, prefix, prefix, tf.ones([3, 1, t + 1], tf.bool))
        np.testing.assert_allclose(got[:, 0], all_of_it[:, -1], atol=1e-5)


def test_memory_of_shared_heads():
    layer = _layer(2)
    assert single(layer.PrecomputeMemory, init(layer), normal(1, 2, 5, M)).k.shape == (2, 5, 2, K)


def _sent(layer):
    """Runs a training step of a layer over eight devices and compares it with one; returns the collectives."""

    def fn(theta, x, mask):
        return layer.Shard(layer.FProp(theta, layer.Shard(x, "BTM"), x, mask), "BTM")

    args = [init(layer), normal(0, 8, 4, M), _mask(8, 4, 4)]
    specs = layer.VariableSpecs().Transform(lambda s: TensorSpec(s.shape, s.dtype, s.split))
    rows = ("data", None, None)
    return compare(with_gradients(fn, wave), args, [specs, rows, rows], "data:2,model:4")[1]


@functools.cache
def _plain_sends(letters):
    split = dict.fromkeys(letters, "model")
    return _sent(_layer(0, activation_split={"B": "data", **split}, weight_split=split))


@pytest.mark.parametrize("kv_heads, letters, gathers", [(1, "N", 0), (2, "N", 2), (4, "NA", 0)])
def test_cut_by_heads_it_sends_no_more_than_plain_attention(kv_heads, letters, gathers):
    """Two heads of keys over four devices: the gradients, of which two devices each have a part, are gathered."""
    split = dict.fromkeys(letters, "model")
    cut = {"activation_split": {"B": "data", **split}, "weight_split": split}
    few, plain = _sent(_layer(kv_heads, **cut)), _plain_sends(letters)
    specs = _layer(kv_heads, **cut).VariableSpecs()
    assert specs.q.split == (None, "model", None)
    assert specs.k.split == (None, "model" if "A" in letters else None, None)
    assert plain == {"all-reduce": 3}
    assert few["all-reduce"] <= 3 + bool(gathers)
    assert few["all-gather"] == gathers
    assert set(few) <= {"all-reduce", "all-gather"}


def test_flops_and_errors():
    meta = MultiHeadAttention.FPropMeta(_layer(2).p, (2, 4, M), (2, 5, M))
    projections = 2 * 2 * M * K * (2 * N * 4 + 2 * 2 * 5)
    assert meta.flops == projections + 2 * (2 * 2 * N * 4 * 5 * K)
    message = r"num_kv_heads=3 does not divide num_heads=8.*1, 2, 4, 8, or 0"
    with pytest.raises(ValueError, match=message):
        _layer(3)
    with pytest.raises(ValueError, match="num_kv_heads=-1"):
        _layer(-1)
    with pytest.raises(ValueError, match="num_heads=0: must be an integer of at least 1"):
        _layer(0, num_heads=0)


def test_a_step_cut_by_heads_sends_its_result_alone():
    kv_heads, axis = 4, "model"
    split = {"N": axis, "A": axis}
    layer = _layer(kv_heads, activation_split={"B": "data", **split}, weight_split=split)
    shape = (4, kv_heads, 2, 2, K)
    cache = NestedMap(k=normal(1, *shape), v=normal(2, *shape))
    mask = tf.constant(np.tile(np.array([[1, 0, 1, 0], [0, 1, 0, 1]], bool), [4, 1, 1]))
    args = [init(layer), normal(0, 4, 2, M), cache, tf.constant(1), mask]
    rows, by_row = ("data", None, None), ("data", axis, None, None, None)
    split = cache.Transform(lambda c: TensorSpec(c.shape, "float32", by_row))
    splits = [layer.VariableSpecs(), rows, split, None, rows]
    _, collectives = compare(layer.ExtendStep, args, splits, "data:2,model:4")
    assert collectives == {"all-reduce": 1}
