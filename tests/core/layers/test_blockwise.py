"""Attention by blocks is attention: values and gradients, of each kind, with each set of kernels, sharded, in a model.
So is a TPU's fused kernel, which is interpreted here.

Letters: B batch, T time, M model, N head, K key dimension.
"""

import pytest
import tensorflow as tf
from equivalence import assert_same, compare, with_gradients
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from layer_testing import init, normal, single, wave

from lingvo_moe.core import kernels
from lingvo_moe.core.engine.lowering import lowering
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.engine.pjrt import PjrtEngine
from lingvo_moe.core.kernels import tensorflow, xla
from lingvo_moe.core.kernels.pallas import attention as fused_attention, calls, tpu
from lingvo_moe.core.layers import positions
from lingvo_moe.core.layers.attention import AUTO, MultiHeadAttention
from lingvo_moe.core.layers.extended_attention import ExtendedAttention
from lingvo_moe.core.layers.latent_attention import LatentAttention
from lingvo_moe.core.layers.masks import causal_segment_mask_of
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import Mesh

M, T = 8, 13
SPLIT = {"activation_split": {"B": "data", "N": "model"}, "weight_split": {"N": "model"}}
# Two texts, of 7 and 4 tokens, and padding.
SEGMENTS = [[1] * 7 + [2] * 4 + [0] * 2, [1] * T]
POSITIONS = [[*range(7), *range(4), 0, 0], [*range(T)]]
KINDS = {
    "plain": (MultiHeadAttention, {}),
    "grouped, window, sinks": (ExtendedAttention, {"num_kv_heads": 2, "window": 3, "sinks": True, "qk_norm": "head"}),
    "chunk, sinks": (ExtendedAttention, {"chunk": 5, "sinks": True}),
    "one head of keys, window longer than blocks": (ExtendedAttention, {"num_kv_heads": 1, "window": 11, "chunk": 12}),
    "latent": (LatentAttention, {"rank": 6, "turned_dim": 4, "value_dim": 5}),
}  # fmt: skip


def _layer(kind, **kwargs):
    cls, given = KINDS[kind]
    p = cls.Params().Set(name="atten", model_dim=M, num_heads=4, dim_per_head=4, block=4, **given)
    return p.Set(position=positions.Rotary.Params(), **kwargs).Instantiate()


def _theta(layer):
    theta = init(layer)
    if "sinks" in theta:
        theta.sinks = normal(5, 4)
    return theta


def _run(layer, by_blocks, own=xla):
    """(theta, x, segments, positions) -> the result where there are tokens."""

    def run(theta, x, segments, at):
        row = NestedMap(segments=segments, positions=at)
        mask = row if by_blocks else causal_segment_mask_of(row, row)
        with kernels.using(own):
            y = layer.FProp(theta, x, x, mask, positions=at)
        return tf.where(segments[..., tf.newaxis] > 0, y, 0.0)

    return with_gradients(run, wave)


def _args(layer):
    return [_theta(layer), normal(0, 2, T, M), tf.constant(SEGMENTS), tf.constant(POSITIONS)]


@pytest.mark.parametrize("own", [xla, tensorflow], ids=["xla", "tensorflow"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_attention_at_once(kind, own):
    layer = _layer(kind)
    got, want = (single(_run(layer, by, own), *_args(layer)) for by in (True, False))
    assert_same(got, want)


@pytest.mark.parametrize("kind", ["plain", "grouped, window, sinks"])
def test_sharded_over_rows_and_heads(kind):
    layer = _layer(kind, **SPLIT)
    _, collectives = compare(
        _run(layer, True), _args(layer), None, "data:2,model:2", _run(_layer(kind), False)
    )
    assert collectives["all-to-all"] == 0


def test_a_long_row_needs_a_hundredth_of_the_memory_of_its_probabilities():
    """A row of 32,768 tokens, forward and backward, a head on each of eight devices: compiled, not run."""
    layer = _layer("plain", num_heads=8, block=1024, **SPLIT)
    mesh, length = Mesh.parse("data:1,model:8"), 32_768
    rows = [TensorSpec((1, length, M), "float32"), *[TensorSpec((1, length), "int32")] * 2]
    specs = [layer.VariableSpecs(), *rows]
    program = lowering.lower(_run(layer, True), specs, mesh, results=lowering.AUTO)
    memory = PjrtEngine(mesh).Compile(program).Memory()
    assert memory["temporaries"] < 4 * length**2 / 100


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_of_the_fused_kernel(kind, monkeypatch):
    monkeypatch.setattr(calls, "INTERPRETED", True)
    layer = _layer(kind, block=AUTO, **SPLIT)  # along axes that one device has not
    got = single(_run(layer, True, tpu), *_args(layer))
    assert_same(got, single(_run(layer, False), *_args(layer)))


def test_the_fused_kernel_of_several_blocks(monkeypatch):
    """A window that ends within a block, over a border of texts."""
    monkeypatch.setattr(calls, "INTERPRETED", True)
    monkeypatch.setattr(fused_attention, "_BLOCK", 128)
    layer = _layer("grouped, window, sinks", block=AUTO, window=150)
    lengths = [200, 90, 10]
    at = tf.concat([tf.range(n) for n in lengths], 0)[tf.newaxis]
    args = [_theta(layer), normal(0, 1, 300, M), tf.repeat([[1, 2, 0]], lengths, axis=1), at]
    got = single(_run(layer, True, tpu), *args)
    assert_same(got, single(_run(layer, False), *args))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "chunk, sinks"])
def test_the_fused_kernel_sharded_over_rows_and_heads(kind, monkeypatch):
    """No device needs another's rows or heads. In the kernel's place are products, since XLA's partitioner refuses the
    loops of an interpreted one."""

    def products(mask, **_):
        return splash.make_masked_mha_reference(mask)

    monkeypatch.setattr(splash, "make_splash_mha", products)
    monkeypatch.setattr(calls, "INTERPRETED", True)
    layer = _layer(kind, block=AUTO, **SPLIT)
    fused = _run(layer, True, tpu)
    _, collectives = compare(fused, _args(layer), None, "data:2,model:2", _run(_layer(kind), False))
    assert collectives["all-to-all"] == 0
