"""LayerNorm and RmsNorm: the formula, float32 inside."""

import numpy as np
import tensorflow as tf
from layer_testing import SPLITS, init, normal, single

from lingvo_moe.core.layers.normalization import LayerNorm, RmsNorm
from lingvo_moe.core.nested_map import NestedMap


def _layer(**kwargs):
    return LayerNorm.Params().Set(name="norm", model_dim=8, **SPLITS).Set(**kwargs).Instantiate()


def _theta():
    return NestedMap(scale=normal(1, 8), bias=normal(2, 8))


def _numpy(x, theta, epsilon=1e-6):
    x = np.asarray(x, "float64")
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt(x.var(-1, keepdims=True) + epsilon) * theta.scale + theta.bias


def test_formula():
    x, theta = normal(0, 3, 5, 8) * 3 + 7, _theta()
    y = single(_layer().FProp, theta, x)
    np.testing.assert_allclose(y, _numpy(x, theta), atol=1e-5)
    start = init(_layer())
    np.testing.assert_array_equal([start.scale[0], start.bias[0]], [1, 0])


def test_rms_formula():
    x, scale = normal(0, 3, 5, 8) * 3 + 7, normal(1, 8)
    layer = RmsNorm.Params().Set(name="norm", model_dim=8, epsilon=0.1).Instantiate()
    assert list(layer.VariableSpecs()) == ["scale"]
    want = x.numpy() / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + 0.1) * scale
    y = single(layer.FProp, NestedMap(scale=scale), x)
    np.testing.assert_allclose(y, want, atol=1e-5)


def test_bfloat16_activations_are_normalized_in_float32():
    x, theta = tf.cast(normal(0, 3, 5, 8) + 100, tf.bfloat16), _theta()
    y = single(_layer(fprop_dtype="bfloat16").FProp, theta, x)
    assert y.dtype == tf.bfloat16
    np.testing.assert_allclose(tf.cast(y, tf.float32), _numpy(x, theta), atol=0.03)
