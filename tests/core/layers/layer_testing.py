"""Helpers for the tests of layers: small stacks and batches. tests/equivalence.py compares them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_moe.core.base_layer import BaseLayer
from lingvo_moe.core.layers import masks
from lingvo_moe.core.layers.attention import MultiHeadAttention
from lingvo_moe.core.layers.transformer import TransformerStack
from lingvo_moe.core.layers.transformer_layer import TransformerLayer
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.randomness import make_seed
from lingvo_moe.core.sharding import single_device, use_mesh

SPLITS = {
    "activation_split": {"G": "expert", "B": "expert", "E": "expert"},
    "weight_split": {"E": "expert"},
}


def normal(seed: int, *shape: int) -> tf.Tensor:
    """Returns float32 normal numbers from a fixed seed."""
    return tf.constant(np.random.RandomState(seed).randn(*shape).astype("float32"))


def init(layer: BaseLayer, seed: int = 0) -> NestedMap:
    """Returns the layer's initial theta."""
    return layer.InitTheta(make_seed(seed, 0))


def single(fn: Callable, *args: Any, **kwargs: Any) -> Any:
    """Runs fn eagerly on the mesh of one device."""
    with use_mesh(single_device()):
        return fn(*args, **kwargs)


def wave(y: tf.Tensor) -> tf.Tensor:
    """Returns a scalar whose gradient differs from element to element."""
    x = tf.cast(y, tf.float32)
    return tf.reduce_sum(tf.sin(x + tf.cast(tf.range(x.shape[-1]), tf.float32)))


def stack_params(cross: bool = False, **kwargs: Any) -> Any:
    """A tiny TransformerStack: two blocks of two dense layers, M = 8, N = 2, K = 4, H = 16."""
    layer = TransformerLayer.Params()
    layer.self_atten_tpl.num_heads = 2
    if cross:
        layer.cross_atten_tpl = MultiHeadAttention.Params().Set(num_heads=2)
    layer.ffn_tpl.hidden_dim = 16
    p = TransformerStack.Params().Set(name="stack", model_dim=8, num_blocks=2, **SPLITS)
    return p.Set(block=[layer, layer.Copy()]).Set(**kwargs)


def set_dropout(p: Any, rate: float) -> Any:
    """Sets every dropout rate of a stack to `rate`."""
    for layer in p.block:
        layer.residual_dropout_prob = rate
        layer.ffn_tpl.relu_dropout_prob = rate
        layer.self_atten_tpl.atten_dropout_prob = rate
        if layer.cross_atten_tpl is not None:
            layer.cross_atten_tpl.atten_dropout_prob = rate
    return p


def self_aux(segments: Any, pos: Any, causal: bool) -> NestedMap:
    """aux of a stack without cross-attention, from int [B, T] twice."""
    segments, pos = tf.constant(segments), tf.constant(pos)
    mask = masks.segment_mask(segments, segments)
    if causal:
        mask = masks.causal_segment_mask(segments, pos)
    return NestedMap(self_mask=mask, paddings=masks.paddings(segments))
