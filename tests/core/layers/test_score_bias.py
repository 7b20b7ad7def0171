"""Biases of scores: formulas in numpy, values and gradients of every kind of kernel, steps, sharded = unsharded.

Letters: B batch, T query, S key, M model, N head, K key dimension.
"""

import numpy as np
import pytest
import tensorflow as tf
from equivalence import assert_same, assert_steps, compare, with_gradients
from layer_testing import init, normal, single, stack_params, wave

from lingvo_moe.core import kernels
from lingvo_moe.core.config.hyperparams import ParamError
from lingvo_moe.core.kernels import tensorflow, xla
from lingvo_moe.core.kernels.pallas import tpu
from lingvo_moe.core.layers import masks
from lingvo_moe.core.layers.attention import AUTO, MultiHeadAttention
from lingvo_moe.core.layers.extended_attention import ExtendedAttention
from lingvo_moe.core.layers.latent_attention import LatentAttention
from lingvo_moe.core.layers.positions import Alibi, RelativeBuckets
from lingvo_moe.core.nested_map import NestedMap

M, N, K, T = 8, 6, 4, 13
# Two texts, of 7 and 4 tokens, and padding.
SEGMENTS = np.array([[1] * 7 + [2] * 4 + [0] * 2, [1] * T])
AT = np.array([[*range(7), *range(4), 0, 0], [*range(T)]])
POSITIONS = {
    "alibi": Alibi.Params(),
    "t5": RelativeBuckets.Params().Set(num_buckets=6, max_distance=9, shared=False),
}


def _layer(position, cls=MultiHeadAttention, **kwargs):
    p = cls.Params().Set(name="atten", model_dim=M, num_heads=N, dim_per_head=K, block=4)
    return p.Set(position=POSITIONS[position].Copy(), **kwargs).Instantiate()


def _bucket(distance, num, most, bidirectional=False):
    """The bucket of a query's position less a key's, as mesh_tensorflow's T5 computes it."""
    start = 0
    if bidirectional:
        num //= 2
        start, distance = (num, -distance) if distance < 0 else (0, distance)
    distance, single = max(distance, 0), num // 2
    if distance < single:
        return start + distance
    log = np.log(distance / single) / np.log(most / single) * (num - single)
    return start + min(single + int(log + 1e-9), num - 1)


def _numpy_bias(position, theta):
    """[B,N,T,S], of all positions in one row, and its gradient's sum over the table."""
    distance = AT[:, :, None] - AT[:, None]
    if position == "alibi":
        slopes = np.array(
            [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]
        )  # of N = 6: those of 4, then of 8
        return -np.abs(distance)[:, None] * slopes[:, None, None], None
    bucket = np.vectorize(lambda d: _bucket(d, 6, 9))(distance)
    return np.moveaxis(theta.position.table.numpy()[bucket], -1, 1), bucket


def _numpy(position, theta, x):
    """Attention's result where there are tokens, and the gradients of its `wave` by x's scores: those of the table."""
    q, k, v = (np.einsum("btm,mnk->btnk", x, theta[name]) for name in "qkv")
    bias, bucket = _numpy_bias(position, theta)
    same = (SEGMENTS[:, :, None] == SEGMENTS[:, None]) & (SEGMENTS[:, None] > 0)
    mask = same & (AT[:, :, None] >= AT[:, None])
    scores = np.einsum("btnk,bsnk->bnts", q, k) / np.sqrt(K) + bias
    powers = np.exp(scores) * mask[:, None]
    probs = powers / np.maximum(powers.sum(-1, keepdims=True), 1e-30)
    y = np.einsum("bnts,bsnk,nkm->btm", probs, v, theta.o) * (SEGMENTS > 0)[..., None]
    dy = np.cos(y + np.arange(M)) * (SEGMENTS > 0)[..., None]
    dprobs = np.einsum("btm,nkm,bsnk->bnts", dy, theta.o, v)
    dscores = probs * (dprobs - (probs * dprobs).sum(-1, keepdims=True))
    if bucket is None:
        return y, None
    return y, np.stack([(dscores * (bucket == w)[:, None]).sum((0, 2, 3)) for w in range(6)])


def _run(layer, by_blocks=False, ops=xla):
    def run(theta, x, segments, at):
        rows = NestedMap(segments=segments, positions=at)
        mask = rows if by_blocks else masks.causal_segment_mask_of(rows, rows)
        with kernels.using(ops):
            y = layer.FProp(theta, x, x, mask, positions=at)
        return tf.where(segments[..., tf.newaxis] > 0, y, 0.0)

    return with_gradients(run, wave)


def _args(layer):
    theta = init(layer)
    if layer.position.VariableSpecs().Flatten():
        theta.position.table = normal(5, 6, N)
    return [theta, normal(0, 2, T, M), tf.constant(SEGMENTS, tf.int32), tf.constant(AT, tf.int32)]


WAYS = {
    "xla": (False, xla),
    "tensorflow": (False, tensorflow),
    "blocks": (True, xla),
    "tensorflow's blocks": (True, tensorflow),
    "tpu": (True, tpu),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("position", POSITIONS)
def test_values_and_gradients_are_those_of_the_formula(position, way):
    layer = _layer(position, **({"block": AUTO} if way == "tpu" else {}))
    args = _args(layer)
    got = single(_run(layer, *WAYS[way]), *args)
    y, dtable = _numpy(position, *args[:2])
    assert_same(got.rest, y, tol=2e-5)
    if dtable is not None:
        (table,) = [g for g in got.grads if g.shape == dtable.shape]
        assert_same(table, dtable, tol=2e-5)


KINDS = {
    "heads that share keys": (MultiHeadAttention, {"num_kv_heads": 2}),
    "window and sinks": (ExtendedAttention, {"num_kv_heads": 2, "window": 3, "sinks": True}),
    "latent": (LatentAttention, {"rank": 6, "turned_dim": 2}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("position", POSITIONS)
def test_with_other_parts_all_kernels_and_steps_agree(position, kind):
    cls, params = KINDS[kind]
    layer = _layer(position, cls, **params)
    args = _args(layer)
    want = single(_run(layer), *args)
    for way in ("tensorflow", "blocks"):
        assert_same(single(_run(layer, *WAYS[way]), *args), want, tol=2e-5)
    theta, x, whole = args[0], args[1][1:], want.rest[1:]
    causal = tf.constant(np.tril(np.ones([1, T, T], bool)))
    for ops in (xla, tensorflow):
        with kernels.using(ops):
            step = lambda *more: single(layer.ExtendStep, theta, *more)  # noqa: E731
            assert_steps(step, x, single(layer.InitCache, 1, T), causal, whole, tol=2e-5)
            y, _ = step(x, single(layer.InitCache, 1, T), tf.range(T), causal)  # all steps at once
            assert_same(y, whole, tol=2e-5)
            cache = single(layer.InitCache, 1, T, 2)
            for t in range(3):  # two hypotheses, the second of which has other tokens
                both = tf.stack([x[:, t], -x[:, t]], 1)
                mask = tf.repeat(causal[:, t], 2, 1) & (tf.range(2 * T) % 2 == [[0], [1]])
                y, cache = step(both, cache, tf.constant(t), mask[tf.newaxis])
                assert_same(y[:, 0], whole[:, t], tol=2e-5)


@pytest.mark.parametrize("by_blocks", [False, True], ids=["whole", "blocks"])
@pytest.mark.parametrize("position", POSITIONS)
def test_sharded_over_rows_and_heads(position, by_blocks):
    """No scores are gathered: a device makes the bias of its own rows and heads."""
    split = {"activation_split": {"B": "data", "N": "model"}, "weight_split": {"N": "model"}}
    layer = _layer(position, **split)
    plain = _run(_layer(position), by_blocks)
    _, collectives = compare(_run(layer, by_blocks), _args(layer), None, "data:2,model:2", plain)
    assert collectives["all-to-all"] == 0


def test_buckets_are_those_of_the_formula():
    far = 200
    query, key = tf.fill([1, 1], far), tf.range(2 * far + 1)[tf.newaxis]
    for num, most, both in ((32, 128, False), (32, 128, True), (6, 9, False), (5, 40, False)):
        p = RelativeBuckets.Params().Set(num_buckets=num, max_distance=most, bidirectional=both)
        layer = p.Set(name="t5", num_heads=1, shared=False).Instantiate()
        table = NestedMap(table=tf.range(float(num))[:, tf.newaxis])
        got = single(layer.Bias, table, query, key)[0, 0, 0]
        assert got.numpy().tolist() == [
            _bucket(far - s, num, most, both) for s in range(2 * far + 1)
        ]
    for params in (
        {"num_buckets": 5, "bidirectional": True},
        {"num_buckets": 1},
        {"max_distance": 16},
    ):
        with pytest.raises(ParamError, match="must be"):
            RelativeBuckets.Params().Set(name="t5", **params).Instantiate()


def test_the_layers_of_a_stack_share_a_table_or_have_their_own():
    """Values and gradients are the same where all tables are; and scanned layers pass gradients to the shared one."""
    results = {}
    for shared in (True, False):
        p = stack_params()
        position = RelativeBuckets.Params().Set(num_buckets=4, max_distance=5, shared=shared)
        for layer in p.block:
            layer.self_atten_tpl.position = position.Copy()
        stack = p.Instantiate()
        theta, table = init(stack), normal(3, 4, 2)
        if shared:
            theta.position.table = table
        else:
            tables = [layer.self_atten.position for layer in theta.blocks.body.layers]
            assert "position" not in theta and all(t.table.shape == (2, 4, 2) for t in tables)
            for own in tables:
                own.table = tf.stack([table, table])
        rows = NestedMap(
            segments=tf.constant(SEGMENTS, tf.int32), positions=tf.constant(AT, tf.int32)
        )
        aux = NestedMap(
            self_mask=masks.causal_segment_mask_of(rows, rows), positions=rows.positions,
            paddings=masks.paddings(rows.segments),
        )  # fmt: skip
        run = with_gradients(lambda theta, x: stack.FProp(theta, x, aux)[0], wave)  # noqa: B023
        results[shared] = single(run, theta, normal(0, 2, T, M))
    assert_same(results[True].rest, results[False].rest)
    (one,) = [g for g in results[True].grads if g.shape == (4, 2)]
    each = [g for g in results[False].grads if g.shape == (2, 4, 2)]
    assert_same(one, sum(tf.reduce_sum(g, 0) for g in each), tol=1e-4)
