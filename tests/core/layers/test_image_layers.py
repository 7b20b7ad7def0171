"""The layers of image models: formulas, operations counted, and images sharded along batch and rows."""

import numpy as np
import pytest
import tensorflow as tf
from equivalence import assert_same, compare, with_gradients
from layer_testing import init, normal, single, wave

from lingvo_moe.analysis.programs.hlo.collective_list import parse_collectives
from lingvo_moe.core.layers.batch_norm import BatchNorm
from lingvo_moe.core.layers.classifier import Classifier, in_top_k
from lingvo_moe.core.layers.convolution import Conv2D
from lingvo_moe.core.layers.elementwise import ActivationLayer, Dropout
from lingvo_moe.core.layers.pooling import GlobalAveragePool, Pool2D
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.randomness import make_seed

SHAPE, SEED = (2, 16, 6, 3), make_seed(0, 0)


def _conv(**kwargs):
    p = Conv2D.Params().Set(name="conv", input_channels=3, output_channels=4)
    return p.Set(**kwargs).Instantiate()


def _norm(**kwargs):
    return BatchNorm.Params().Set(name="norm", channels=3).Set(**kwargs).Instantiate()


def _pool(**kwargs):
    return Pool2D.Params().Set(name="pool").Set(**kwargs).Instantiate()


# --- convolution


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize("size, stride", [(1, 2), (3, 1), (7, 2)])
def test_convolution(size, stride, padding):
    layer = _conv(kernel_size=size, stride=stride, padding=padding, bias=True)
    theta, x = init(layer), normal(0, 2, 15, 9, 3)
    theta.b = normal(1, 4)
    y = single(layer.FProp, theta, x)
    np.testing.assert_allclose(y, _convolve(x, theta.w, stride, padding) + theta.b, atol=1e-4)
    meta = Conv2D.FPropMeta(layer.p, x.shape)
    assert meta.out_shapes == (tuple(y.shape),)
    assert meta.flops == 2 * y.shape.num_elements() * size * size * 3


def _convolve(x, w, stride, padding):
    """The sum over each window, written out."""
    x, w = np.asarray(x, "float64"), np.asarray(w, "float64")
    size = w.shape[0]
    if padding == "SAME":
        missing = [max((-(-n // stride) - 1) * stride + size - n, 0) for n in x.shape[1:3]]
        x = np.pad(x, [(0, 0), *[(m // 2, m - m // 2) for m in missing], (0, 0)])
    windows = np.lib.stride_tricks.sliding_window_view(x, (size, size), (1, 2))
    return np.einsum("byxihw,hwio->byxo", windows[:, ::stride, ::stride], w)


def test_convolution_starts_with_the_variance_that_a_rectifier_keeps():
    layer = _conv(input_channels=64, output_channels=64)
    assert float(tf.math.reduce_std(init(layer).w)) == pytest.approx(
        (2 / (9 * 64)) ** 0.5, rel=0.02
    )


def test_convolution_names_a_wrong_number_of_channels():
    with pytest.raises(ValueError, match="conv: an input of 5 channels, but input_channels=3"):
        Conv2D.FPropMeta(_conv().p, (1, 8, 8, 5))


# --- batch normalization


def test_batch_norm_in_training():
    layer = _norm(decay=0.75)
    theta, x = init(layer), normal(0, *SHAPE) * 3 + 7
    theta.scale, theta.bias = normal(1, 3), normal(2, 3)
    y, extras = single(layer.FProp, theta, x, training=True)
    wide = np.asarray(x, "float64")
    mean, variance = wide.mean((0, 1, 2)), wide.var((0, 1, 2))
    want = (wide - mean) / np.sqrt(variance + 1e-5) * theta.scale + theta.bias
    np.testing.assert_allclose(y, want, atol=1e-5)
    np.testing.assert_allclose(extras.updates.norm.moving_mean, 0.25 * mean, rtol=1e-5)
    np.testing.assert_allclose(
        extras.updates.norm.moving_variance, 0.75 + 0.25 * variance, rtol=1e-5
    )


def test_batch_norm_in_inference_takes_the_moving_averages():
    layer = _norm(initial_scale=0.5)
    theta, x = init(layer), normal(0, *SHAPE)
    theta.moving_mean, theta.moving_variance = normal(1, 3), tf.square(normal(2, 3))
    y, extras = single(layer.FProp, theta, x, training=False)
    want = (x - theta.moving_mean) / np.sqrt(theta.moving_variance + 1e-5) * 0.5
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-6)
    assert not extras
    trainable = {name for name, spec in layer.VariableSpecs().items() if spec.trainable}
    assert trainable == {"scale", "bias"}


def test_batch_norm_of_bfloat16_is_computed_in_float32():
    layer = _norm(fprop_dtype="bfloat16")
    x = tf.cast(normal(0, *SHAPE) + 100, tf.bfloat16)
    y, extras = single(layer.FProp, init(layer), x, training=True)
    assert y.dtype == tf.bfloat16
    assert extras.updates.norm.moving_mean.dtype == tf.float32
    wide = np.asarray(tf.cast(x, tf.float32))
    want = (wide - wide.mean((0, 1, 2))) / wide.std((0, 1, 2))
    np.testing.assert_allclose(tf.cast(y, tf.float32), want, atol=0.02)


# --- pooling


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize("window, stride", [(3, 2), (1, 2), (2, 3)])
@pytest.mark.parametrize("kind", ["max", "average"])
def test_pooling_equals_tensorflows(kind, window, stride, padding):
    layer = _pool(kind=kind, window=window, stride=stride, padding=padding)
    x = tf.nn.relu(normal(0, 2, 8, 7, 3))  # zeros: windows with several largest elements
    reference = {"max": tf.nn.max_pool2d, "average": tf.nn.avg_pool2d}[kind]

    got = single(with_gradients(lambda x: layer.FProp(NestedMap(), x), wave), x)
    want = with_gradients(lambda x: reference(x, window, stride, padding), wave)(x)
    assert_same(got, want)
    meta = Pool2D.FPropMeta(layer.p, x.shape)
    assert meta.out_shapes == (tuple(got.rest.shape),)
    assert meta.flops == got.rest.shape.num_elements() * window**2


def test_global_average_pool():
    layer = GlobalAveragePool.Params().Set(name="mean").Instantiate()
    x = normal(0, *SHAPE)
    y = single(layer.FProp, NestedMap(), x)
    np.testing.assert_allclose(y, np.mean(x, (1, 2)), atol=1e-6)
    meta = GlobalAveragePool.FPropMeta(layer.p, SHAPE)
    assert (meta.flops, meta.out_shapes) == (2 * 16 * 6 * 3, ((2, 3),))


# --- elementwise layers and the head


def test_elementwise_layers():
    x = normal(0, 4, 1000)
    relu = ActivationLayer.Params().Set(name="relu").Instantiate()
    np.testing.assert_array_equal(relu.FProp(NestedMap(), x), np.maximum(x, 0))
    assert ActivationLayer.FPropMeta(relu.p, (4, 5)).flops == 20
    dropout = Dropout.Params().Set(name="drop", rate=0.25).Instantiate()
    assert dropout.FProp(NestedMap(), x, None) is x
    y = dropout.FProp(NestedMap(), x, make_seed(1, 2)).numpy()
    assert np.mean(y == 0) == pytest.approx(0.25, abs=0.03)
    np.testing.assert_allclose(y[y != 0], x.numpy()[y != 0] / 0.75, rtol=1e-6)
    meta = Dropout.FPropMeta(dropout.p, (4, 5))
    assert (meta.flops, meta.out_shapes) == (200, ((4, 5),))


def test_classifier_loss():
    head = Classifier.Params().Set(name="head", num_classes=7, model_dim=5, label_smoothing=0.1)
    layer = head.Instantiate()
    theta, x, labels = init(layer), normal(0, 4, 5), tf.constant([0, 6, 3, 3])
    theta.b = normal(1, 7)
    logits = single(layer.FProp, theta, x)
    np.testing.assert_allclose(logits, x @ theta.w + theta.b, atol=1e-5)
    smoothed, plain = layer.Losses(logits, labels)
    target = tf.one_hot(labels, 7)
    for loss, wanted in ((smoothed, 0.9 * target + 0.1 / 7), (plain, target)):
        want = tf.nn.softmax_cross_entropy_with_logits(wanted, logits)
        np.testing.assert_allclose(loss, want, rtol=1e-5)
    meta = Classifier.FPropMeta(layer.p, (4, 5))
    assert (meta.flops, meta.out_shapes) == (2 * 4 * 5 * 7, ((4, 7),))


def test_in_top_k():
    logits = tf.round(normal(0, 50, 12) * 2)  # with equal scores
    labels = tf.constant(np.random.RandomState(0).randint(0, 12, 50), tf.int32)
    for k in (1, 5, 12):
        best = tf.math.top_k(logits, k).indices.numpy()
        want = [label in row for label, row in zip(labels.numpy(), best)]
        np.testing.assert_array_equal(in_top_k(logits, labels, k), want)
    nothing = tf.fill([1, 12], np.float32("nan"))
    assert float(in_top_k(nothing, tf.constant([0]), 5)[0]) == 0


# --- sharded


def _steps(**split):
    """A function of (thetas, images, labels): layers that keep, halve and leave the rows of images."""
    stem = _conv(stride=2, **split)
    norm = _norm(channels=4, **split)
    overlapping = _pool(window=3, stride=1, **split)  # which XLA's own max pooling gets wrong
    halving = _pool(window=3, kind="average", **split)
    shortcut = _conv(input_channels=4, kernel_size=1, stride=2, **split)
    mean = GlobalAveragePool.Params().Set(name="mean", **split).Instantiate()
    over_classes = {"activation_split": {"V": "rows"}, "weight_split": {"V": "rows"}}
    head = Classifier.Params().Set(name="head", num_classes=8, model_dim=4, **over_classes)
    head = head.Instantiate()
    layers = (stem, norm, shortcut, head)
    thetas = [
        layer.VariableSpecs().Filter(lambda s: s.trainable).Transform(lambda s: s.Init(SEED))
        for layer in layers
    ]
    averages = {"moving_mean": normal(5, 4), "moving_variance": tf.square(normal(6, 4))}

    def fn(thetas, images, labels):
        weights = NestedMap(thetas[1], **averages)
        x, extras = norm.FProp(weights, stem.FProp(thetas[0], images), training=True)
        x = overlapping.FProp(NestedMap(), tf.nn.relu(x))
        x = halving.FProp(NestedMap(), x) + shortcut.FProp(thetas[2], x)
        logits = head.FProp(thetas[3], mean.FProp(NestedMap(), x))
        loss, _ = head.Losses(logits, labels)
        rest = [logits, in_top_k(logits, labels, 2), extras.updates.norm]
        return tf.reduce_sum(loss), rest

    return fn, thetas, [layer.VariableSpecs().Filter(lambda s: s.trainable) for layer in layers]


def test_sharded_images_equal_one_device_with_halos_alone():
    fn, thetas, specs = _steps(activation_split={"B": "data", "Y": "rows"})
    x, labels = normal(0, 4, 32, 6, 3), tf.constant([0, 7, 3, 3])

    def run(x, labels, *thetas):
        return fn(thetas, x, labels)

    args, splits = [x, labels, *thetas], [("data", "rows", None, None), None, *specs]
    _, found = compare(with_gradients(run), args, splits, "data:2,rows:4", tol=3e-5)
    assert found["collective-permute"] > 0
    moved = [
        c
        for c in parse_collectives(found.hlo)
        if c.kind not in ("collective-permute", "all-reduce")
    ]
    head = 4 * 4 * 8  # bytes of the logits
    assert max((c.num_bytes for c in moved), default=0) <= head, moved
