"""FeedForward: biases, dropout, sharded = unsharded. tests/core/moe/test_activations.py has its formulas."""

import numpy as np
import tensorflow as tf
from equivalence import compare, with_gradients
from layer_testing import SPLITS, init, normal, single, wave

from lingvo_moe.core import kernels
from lingvo_moe.core.kernels import tensorflow
from lingvo_moe.core.kernels.packed_weights import PackAs
from lingvo_moe.core.layers.feed_forward import FeedForward
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.randomness import make_seed


def _layer(**kwargs):
    p = FeedForward.Params().Set(name="ffn", model_dim=4, hidden_dim=6, **SPLITS)
    return p.Set(**kwargs).Instantiate()


def test_biases_are_added_to_both_products_of_packed_weights_too():
    layer = _layer(use_bias=True, activation="gelu")
    theta = init(layer).Transform(lambda w: normal(w.shape.rank, *w.shape))
    x = normal(0, 2, 3, 4)
    hidden = tf.nn.gelu(x @ theta.wi + theta.wi_bias).numpy()
    with kernels.using(tensorflow):
        for weights in (theta, layer.PackWeights(theta, PackAs())):
            y, _ = single(layer.FProp, weights, x, tf.zeros([2, 3]))
            np.testing.assert_allclose(y, hidden @ theta.wo + theta.wo_bias, rtol=1e-4, atol=1e-5)


def test_dropout_in_training_only():
    """Through identity projections, the output is what dropout leaves of the input."""
    n = 200
    theta = NestedMap(wi=tf.eye(n), wo=tf.eye(n))
    layer = _layer(model_dim=n, hidden_dim=n, relu_dropout_prob=0.25)
    x, zeros = tf.ones([10, 20, n]), tf.zeros([10, 20])
    np.testing.assert_array_equal(single(layer.FProp, theta, x, zeros)[0], x)
    drawn = [
        single(layer.FProp, theta, x, zeros, seed=make_seed(0, step))[0].numpy()
        for step in (1, 2, 1)
    ]
    np.testing.assert_array_equal(drawn[0], drawn[2])
    np.testing.assert_allclose(np.unique(drawn[0]), [0, 4 / 3], rtol=1e-6)
    np.testing.assert_allclose((drawn[0] == 0).mean(), 0.25, atol=0.01)
    correlation = np.corrcoef(drawn[0].flatten(), drawn[1].flatten())[0, 1]
    assert abs(correlation) < 0.02  # steps are independent


def test_sharded_with_dropout():
    layer = _layer(relu_dropout_prob=0.5)

    def fn(theta, x, seed):
        return layer.FProp(theta, x, tf.zeros([8, 2]), seed=seed)[0]

    args = [init(layer), normal(0, 8, 2, 4), make_seed(1, 1)]
    compare(with_gradients(fn, wave), args, [None, ("expert", None, None), None])
