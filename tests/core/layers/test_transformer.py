"""Layers and stacks: parts, dropout, bfloat16, sharded. tests/tasks/transformer has packed rows, padding and steps."""

import numpy as np
import tensorflow as tf
from equivalence import compare, with_gradients
from layer_testing import SPLITS, init, normal, self_aux, set_dropout, single, stack_params, wave

from lingvo_moe.core.layers import masks
from lingvo_moe.core.moe.layer import MoELayer
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.randomness import make_seed


def _moe_params(cross=True, dense=False, **kwargs):
    """A stack whose blocks are [MoE], or [dense, MoE], with dropout."""
    p = set_dropout(stack_params(cross), 0.2)
    p.block[1].ffn_tpl = MoELayer.Params().Set(hidden_dim=16, num_experts=8)
    return p.Set(block=p.block if dense else p.block[1:], **kwargs)


def _batch(rows=2):
    """Packed decoder rows (segments of 4 and 2 tokens and a padding) with their memory."""
    segments = np.tile(np.array([[1, 1, 1, 1, 2, 2, 0]], "int32"), [rows, 1])
    pos = np.tile(np.array([[0, 1, 2, 3, 0, 1, 0]], "int32"), [rows, 1])
    memory_segments = np.tile(np.array([[1, 1, 2, 2, 0]], "int32"), [rows, 1])
    aux = self_aux(segments, pos, causal=True)
    aux.memory = normal(1, rows, 5, 8)
    aux.cross_mask = masks.segment_mask(tf.constant(segments), tf.constant(memory_segments))
    return normal(0, rows, 7, 8), aux


def test_layer_is_its_parts():
    p = stack_params(cross=True).block[0].Copy().Set(name="layer", model_dim=8, **SPLITS)
    layer = p.Instantiate()
    theta, (x, aux) = init(layer), _batch()
    y, extras = single(layer.FProp, theta, x, aux)

    def parts(x):
        h = layer.self_norm.FProp(theta.self_norm, x)
        x += layer.self_atten.FProp(theta.self_atten, h, h, aux.self_mask)
        h = layer.cross_norm.FProp(theta.cross_norm, x)
        x += layer.cross_atten.FProp(theta.cross_atten, h, aux.memory, aux.cross_mask)
        h = layer.ffn_norm.FProp(theta.ffn_norm, x)
        return x + layer.ffn.FProp(theta.ffn, h, aux.paddings)[0]

    np.testing.assert_allclose(y, single(parts, x), atol=1e-6)
    assert extras == {}


def test_dropout_draws_differ_between_blocks_layers_and_places():
    """All weights are zero except those that show dropout, so that each branch adds its mask; all masks must differ."""
    p = set_dropout(stack_params(num_blocks=2), 0.5)
    stack = p.Instantiate()
    x = tf.ones([4, 50, 8])
    aux = self_aux(np.ones([4, 50], "int32"), np.zeros([4, 50], "int32"), causal=False)

    @tf.function(jit_compile=True, autograph=False)
    def run(theta):
        return single(stack.blocks.FProp, theta, x, aux, seed=make_seed(0, 1))[0]

    zeros, outs = init(stack).Transform(tf.zeros_like), []
    for block in range(2):
        for layer in range(2):
            flat = dict(zeros.FlattenItems())
            # Only this layer's feed-forward: relu(bias) passes through identity-like projections.
            name = f"blocks.body.layers[{layer}]"
            one = tf.one_hot(block, 2)
            flat[f"{name}.ffn_norm.bias"] += tf.einsum("L,M->LM", one, tf.ones([8]))
            flat[f"{name}.ffn.wi"] += tf.einsum("L,MH->LMH", one, tf.eye(8, 16))
            flat[f"{name}.ffn.wo"] += tf.einsum("L,HM->LHM", one, tf.eye(16, 8))
            body = run(zeros.Pack(list(flat.values())).blocks)
            outs.append((body - x).numpy().flatten())
    zero_share = [(out == 0).mean() for out in outs]
    np.testing.assert_allclose(zero_share, 0.75, atol=0.05)  # relu's and the residual's dropout
    assert np.abs(np.corrcoef(outs) - np.eye(4)).max() < 0.1


def test_bfloat16_is_close():
    x, aux = _batch()
    outs = []
    for dtype in (None, "bfloat16"):
        stack = stack_params(cross=True, fprop_dtype=dtype).Instantiate()
        cast = tf.as_dtype(dtype or "float32")
        memory = tf.cast(aux.memory, cast)

        def fn(theta, x, stack=stack, memory=memory):
            y, _ = stack.FProp(theta, x, NestedMap(aux, memory=memory))
            return wave(y), y

        outs.append(single(with_gradients(fn), init(stack), tf.cast(x, cast)))
    full, low = outs
    assert low.rest.dtype == tf.bfloat16
    np.testing.assert_allclose(tf.cast(low.rest, tf.float32), full.rest, atol=0.1)
    want = tf.concat([tf.reshape(g, [-1]) for g in full.grads], 0)
    got = tf.concat([tf.reshape(tf.cast(g, tf.float32), [-1]) for g in low.grads], 0)
    assert tf.norm(got - want) < 0.05 * tf.norm(want)


def test_sharded_stack():
    """Decoder blocks [MoE] with dropout and random routing, scanned, over eight devices."""
    p = _moe_params(num_blocks=2)
    p.block[0].ffn_tpl.num_groups = 8
    stack = p.Instantiate()
    x, aux = _batch(rows=8)

    def fn(theta, x, aux, seed):
        y, extras = stack.FProp(theta, x, aux, seed=seed)
        return wave(y) + tf.reduce_sum(extras.layer_0.aux_loss), [y, extras]

    args = [init(stack), x, aux, make_seed(1, 1)]
    splits = [stack.VariableSpecs(), ("expert", None, None), None, None]
    # Gradients of weights are sums of many terms in another order.
    _, collectives = compare(with_gradients(fn), args, splits, tol=1e-4)
    # Dispatch and combine, forward, recomputed and backward: once for all blocks.
    assert collectives["all-to-all"] == 6
