"""A small image model sharded along the height of its images, trained for a few steps (appendix A.4).

Promised is that the sharding of the input spreads to the other layers and to the backward pass. It does, but
for one gradient that XLA gathers; where the results of the layers that change the height are annotated
too, halos and sums are all that is sent. The numbers are one device's either way.
"""

from functools import partial

import numpy as np
import pytest
import tensorflow as tf
from spmd_case import GRADIENT_TOLERANCE, assert_close, count_inner, floats, ints, largest_array

from lingvo_moe.analysis.programs.hlo.collective_list import parse_collectives
from lingvo_moe.core.engine.eager.testing import run_single
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.engine.pjrt import PjrtEngine
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.sharding.annotate import split

pytestmark = pytest.mark.slow  # in all

PARTS, STEPS, LEARNING_RATE = 4, 5, 0.1
MESH = Mesh.parse(f"d:{PARTS}")
BATCH, HEIGHT, WIDTH, CHANNELS, CLASSES = 4, 32, 8, 8, 5
IMAGES = floats(BATCH, HEIGHT, WIDTH, 3)
LABELS = ints(BATCH, below=CLASSES)


def _weights() -> list[np.ndarray]:
    shapes = [
        (3, 3, 3, CHANNELS),  # convolution
        (CHANNELS,),  # scale and offset of the normalisation
        (CHANNELS,),
        (3, 3, CHANNELS, CHANNELS),  # of stride 2
        (3, 3, CHANNELS, CHANNELS),  # transposed, of stride 2
        (HEIGHT // 2 * WIDTH // 2 * CHANNELS, CLASSES),  # dense
    ]
    return [floats(*s) / np.float32(max(np.prod(s[:-1]), 1)) ** np.float32(0.5) for s in shapes]


def _cut(x: tf.Tensor) -> tf.Tensor:
    return split(x, 1, PARTS)


def loss(weights: list[tf.Tensor], images: tf.Tensor, labels: tf.Tensor, every_height: bool):
    """Cross entropy. `every_height`: annotate, beside the input, what layers make that change it."""
    cut = _cut if every_height else tf.identity
    first, scale, offset, strided, transposed, dense = weights
    x = tf.nn.conv2d(_cut(images), first, 1, "SAME")
    mean, variance = tf.nn.moments(x, [0, 1, 2])
    x = tf.nn.relu(tf.nn.batch_normalization(x, mean, variance, offset, scale, 1e-3))
    x = skip = tf.nn.relu(cut(tf.nn.conv2d(x, strided, 2, "SAME")))
    x = cut(tf.nn.max_pool2d(x, 3, 2, "SAME"))
    x = skip + cut(tf.nn.conv2d_transpose(x, transposed, skip.shape, 2, "SAME"))
    logits = tf.reshape(x, [BATCH, -1]) @ dense
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


def step(every_height: bool, images: tf.Tensor, labels: tf.Tensor, *weights: tf.Tensor):
    """One step of gradient descent: (loss, *new weights)."""
    with tf.GradientTape() as tape:
        tape.watch(weights)
        value = loss(list(weights), images, labels, every_height)
    gradients = tape.gradient(value, weights)
    return value, *[w - LEARNING_RATE * g for w, g in zip(weights, gradients, strict=True)]


def _train(run) -> list[list[np.ndarray]]:
    """Returns the results of each step."""
    history = [[np.float32(0), *_weights()]]
    for _ in range(STEPS):
        history.append([np.asarray(t) for t in run(IMAGES, LABELS, *history[-1][1:])])
    return history[1:]


def _compiled(every_height: bool):
    specs = [TensorSpec(a.shape, a.dtype.name) for a in (IMAGES, LABELS, *_weights())]
    specs[0] = TensorSpec(IMAGES.shape, "float32", (None, "d", None, None))
    return PjrtEngine(MESH).Build(partial(step, every_height), specs, name="step")


@pytest.fixture(scope="module")
def one_device():
    return _train(lambda *a: run_single(partial(step, True), a, MESH, jit_compile=False))


@pytest.mark.parametrize(("every_height", "collectives"), [
    # The gather is in the transposed convolution's gradient, where nothing beyond says how to shard.
    (False, {"all-gather": 1, "all-reduce": 5, "collective-permute": 13}),
    (True, {"all-reduce": 5, "collective-permute": 14}),
], ids=["input_annotated", "heights_annotated"])  # fmt: skip
def test_training(every_height, collectives, one_device):
    compiled = _compiled(every_height)
    for n, (got, want) in enumerate(zip(_train(compiled), one_device, strict=True)):
        assert_close(f"step {n}", got, want, GRADIENT_TOLERANCE)
    assert one_device[-1][0] < one_device[0][0]
    hlo = compiled.HloText()
    assert count_inner(hlo) == collectives
    assert largest_array(hlo) < BATCH * HEIGHT * WIDTH * CHANNELS // 2
    halos = [c.shapes[0][1] for c in parse_collectives(hlo) if c.kind == "collective-permute"]
    assert max(rows for _, rows, _, _ in halos) <= 2
