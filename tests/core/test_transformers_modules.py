"""Attention and experts give what modules of the `transformers` library gave for the same weights, gradients too.

benchmarks/peers/record_transformers.py made the arrays in testdata/.
"""

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from equivalence import assert_same, assert_steps

from lingvo_moe.core import kernels
from lingvo_moe.core.kernels import tensorflow as tensorflow_kernels, xla
from lingvo_moe.core.layers import masks, positions
from lingvo_moe.core.layers.attention import MultiHeadAttention
from lingvo_moe.core.layers.extended_attention import ExtendedAttention
from lingvo_moe.core.layers.latent_attention import LatentAttention
from lingvo_moe.core.moe.layer import MoELayer
from lingvo_moe.core.moe.routers.top_k import TopKRouter
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.randomness import make_seed
from lingvo_moe.core.sharding import single_device, use_mesh

TESTDATA = Path(__file__).parent / "testdata"


def _recorded(name):
    """x, y, upstream and dx; theta and its gradients as trees."""
    found = NestedMap()
    with np.load(TESTDATA / f"{name}.npz") as arrays:
        for path, value in arrays.items():
            found.Set(path, tf.constant(value))
    return found


def _rotary(cls=positions.Rotary, **kwargs):
    return cls.Params().Set(max_timescale=100.0, **kwargs)


def _attention(cls, **kwargs):
    p = cls.Params().Set(name="atten", model_dim=8, num_heads=4, dim_per_head=4)
    return p.Set(position=_rotary()).Set(**kwargs)


def _yarn(**kwargs):
    return _rotary(positions.YarnRotary, factor=4.0, original_length=16, **kwargs)


def _extended(**kwargs):
    return _attention(ExtendedAttention, num_kv_heads=2, **kwargs)


def _latent(**kwargs):
    position = _yarn(mscale_all=0.707)
    return _attention(
        LatentAttention, rank=6, turned_dim=4, value_dim=5, position=position, **kwargs
    )


ATTENTIONS = {
    "llama": _attention(MultiHeadAttention, num_kv_heads=2,
        position=_rotary(positions.Llama3Rotary, factor=4.0, original_length=16)),
    "qwen3": _extended(qk_norm="head"),
    "olmoe": _extended(qk_norm="projection", norm_epsilon=1e-5, model_dim=16),
    "gpt_oss": _extended(biases=True, sinks=True, window=3, position=_yarn(whole_pairs=False)),
    "llama4": _extended(qk_norm="unit", norm_epsilon=1e-5, chunk=4),
    "llama4_nope": _extended(use_positions=False, temperature_length=2),
    "deepseek_v3": _latent(query_rank=5),
    "deepseek_v2_lite": _latent(),
}  # fmt: skip


def _differentiated(run, recorded):
    """y, dx and the gradients of theta."""
    leaves = recorded.theta.Flatten()
    with use_mesh(single_device()), tf.GradientTape() as tape:
        tape.watch([recorded.x, *leaves])
        y = run(recorded.theta, recorded.x)
        loss = tf.reduce_sum(y * recorded.upstream)
    grads = tape.gradient(loss, [recorded.x, *leaves], unconnected_gradients="zero")
    return NestedMap(y=y, dx=grads[0], grad=recorded.theta.Pack(grads[1:]))


@pytest.mark.parametrize("ops", [xla, tensorflow_kernels], ids=["xla", "tensorflow"])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_its_gradients_and_its_steps(name, ops):
    recorded, layer = _recorded(name), ATTENTIONS[name].Instantiate()
    batch, time, _ = recorded.x.shape
    at = tf.tile(tf.range(time)[tf.newaxis], [batch, 1])
    mask = masks.causal_segment_mask(tf.ones_like(at), at)
    with kernels.using(ops):
        got = _differentiated(
            lambda theta, x: layer.FProp(theta, x, x, mask, positions=at), recorded
        )
        want = NestedMap({name: recorded[name] for name in got})
        assert_same(got, want, floor=1.0)
        with use_mesh(single_device()):
            step = lambda *args: layer.ExtendStep(recorded.theta, *args)  # noqa: E731
            cache = layer.InitCache(batch, time)
            assert_steps(step, recorded.x, cache, mask, recorded.y, floor=1.0)
            cache = layer.InitCache(batch, time)
            for at in (slice(0, 4), slice(4, time)):  # several steps at once
                y, cache = step(recorded.x[:, at], cache, tf.range(time)[at], mask[:, at])
                assert_same(y, recorded.y[:, at], floor=1.0)


def _moe(activation="swiglu", shared=0, biases=False, gate_inputs=False, **router):
    p = MoELayer.Params().Set(name="moe", model_dim=8, hidden_dim=6, num_experts=8)
    p.experts.Set(activation=activation, biases=biases)
    p.Set(capacity_factor=8.0, num_shared_experts=shared, gate_inputs=gate_inputs)
    return p.Set(router=TopKRouter.Params().Set(**{"k": 3, **router}))


MIXTURES = {
    "moe_mixtral": _moe(),
    "moe_olmoe": _moe(normalize_gates="never"),
    "moe_gpt_oss": _moe("clamped_swiglu", biases=True, logit_bias=True),
    "moe_deepseek_v3": _moe(shared=2, gate="sigmoid", gate_scale=2.5, balance_bias=0.001, expert_groups=4,
        groups_per_token=2),
    "moe_llama4": _moe(shared=1, gate_inputs=True, k=1, gate="sigmoid"),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_on_slots_and_on_rows_and_their_gradients(name):
    recorded, layer = _recorded(name), MIXTURES[name].Instantiate()
    paddings = tf.zeros(recorded.x.shape[:2])
    want = NestedMap({name: recorded[name] for name in ("y", "dx", "grad")})
    # In training slots, of which there are enough; in inference rows.
    for seed, ops in ((make_seed(0, 0), xla), (make_seed(0, 0), tensorflow_kernels), (None, xla)):
        with kernels.using(ops):
            got = _differentiated(
                lambda theta, x, seed=seed: layer.FProp(theta, x, paddings, seed=seed)[0], recorded
            )
        assert_same(got, want, floor=1.0)
