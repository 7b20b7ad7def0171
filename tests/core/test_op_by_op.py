"""The forms for TensorFlow's own kernels are equal to those for XLA: values and gradients.

Letters: B batch, T target time, S source time, M model, N head, K key dimension, V vocabulary, L layer.
"""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core import registry
from lingvo_moe.core.base_layer import VariableSpec
from lingvo_moe.core.initializers import WeightInit
from lingvo_moe.core.layers.attention import MultiHeadAttention
from lingvo_moe.core.layers.normalization import LayerNorm
from lingvo_moe.core.layers.softmax import Softmax
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.op_by_op import fused, is_op_by_op, running_op_by_op
from lingvo_moe.core.optimizers.adafactor import Adafactor
from lingvo_moe.core.optimizers.clipping import global_norm
from lingvo_moe.core.optimizers.schedules import Constant
from lingvo_moe.core.randomness import dropout, make_seed
from lingvo_moe.core.sharding import single_device, use_mesh


def _normal(seed: int, *shape: int) -> tf.Tensor:
    return tf.constant(np.random.RandomState(seed).randn(*shape).astype("float32"))


def _both(fn: Any, *inputs: tf.Tensor) -> tuple[list, list]:
    """fn's tensors and, of the sum of their squares, the gradients; as XLA has them and op by op."""
    out = []
    for value in (False, True):
        with use_mesh(single_device()), running_op_by_op(value), tf.GradientTape() as tape:
            tape.watch(inputs)
            results = tf.nest.flatten(fn(*inputs))
            total = tf.add_n([tf.reduce_sum(r * r) for r in results])
        grads = tape.gradient(total, inputs)
        out.append([np.asarray(t) for t in [*results, *grads]])
    return out[0], out[1]


def _assert_close(expected: list, found: list, tol: float = 1e-5) -> None:
    assert len(expected) == len(found)
    for a, b in zip(expected, found):
        np.testing.assert_allclose(b, a, rtol=tol, atol=tol * max(1.0, float(np.abs(a).max())))


@pytest.mark.parametrize("cross", [False, True])
def test_attention(cross: bool) -> None:
    layer = MultiHeadAttention.Params().Set(name="a", model_dim=8, num_heads=2, dim_per_head=3)
    layer = layer.Set(atten_dropout_prob=0.3).Instantiate()
    mask = tf.constant(np.random.RandomState(1).rand(2, 5, 4 if cross else 5) < 0.7)
    mask |= tf.eye(*mask.shape[1:], dtype=tf.bool)
    weights = [
        0.5 * _normal(i, *spec.shape) for i, spec in enumerate(layer.VariableSpecs().Flatten())
    ]

    def run(x: tf.Tensor, source: tf.Tensor, *weights: tf.Tensor) -> tf.Tensor:
        theta = layer.VariableSpecs().Pack(list(weights))
        return layer.FProp(theta, x, source if cross else x, mask, seed=make_seed(3, 4)) + (
            0.0 * tf.reduce_sum(source)
        )

    _assert_close(*_both(run, _normal(7, 2, 5, 8), _normal(8, 2, 4, 8), *weights))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_softmax_losses(smoothing: float) -> None:
    """With logits far apart, so that the label's probability is 0 in float32 here and there."""
    layer = Softmax.Params().Set(name="s", vocab_size=11, model_dim=4, label_smoothing=smoothing)
    layer = layer.Instantiate()
    rng = np.random.RandomState(0)
    labels = tf.constant(rng.randint(0, 11, (2, 9)), tf.int32)
    weights = tf.constant(rng.rand(2, 9) < 0.8)

    def run(x: tf.Tensor, table: tf.Tensor) -> tuple:
        xent, nll, correct = layer.Losses(NestedMap(table=table), x, labels, weights)
        return xent, tf.stop_gradient(nll), tf.stop_gradient(correct)

    for scale in (1.0, 60.0):
        expected, found = _both(run, scale * _normal(1, 2, 9, 4), _normal(2, 11, 4))
        assert expected[2].sum() > 0
        _assert_close(expected, found)


def test_layer_norm() -> None:
    layer = LayerNorm.Params().Set(name="n", model_dim=6).Instantiate()

    def run(x: tf.Tensor, scale: tf.Tensor, bias: tf.Tensor) -> tf.Tensor:
        return layer.FProp(NestedMap(scale=scale, bias=bias), x)

    _assert_close(*_both(run, 3.0 + _normal(0, 2, 5, 6), _normal(1, 6), _normal(2, 6)))


def test_dropout_draws_the_same_numbers() -> None:
    expected, found = _both(
        lambda x: dropout(x, 0.4, make_seed(1, 2)), 1.0 + _normal(0, 20, 30) ** 2
    )
    assert 0.3 < np.mean(expected[0] == 0) < 0.5
    _assert_close(expected, found)


@pytest.mark.parametrize("stacked", [False, True])
def test_adafactor(stacked: bool) -> None:
    """Weights whose moment is factored over the last two dimensions, over others, and not at all."""
    shapes = {"wi": ("EMH", (3, 4, 6)), "q": ("MNK", (5, 2, 4)), "b": ("M", (5,))}
    specs = NestedMap()
    for name, (letters, shape) in shapes.items():
        split = (None,) * len(shape)
        spec = VariableSpec(name, shape, "float32", letters, WeightInit.Constant(0.0), split)
        specs[name] = spec.Stacked(2) if stacked else spec
    theta = specs.Pack([_normal(i, *spec.shape) for i, spec in enumerate(specs.Flatten())])
    for clip in (1.0, 0.0):
        p = Adafactor.Params().Set(min_dim_size_to_factor=4, clip_threshold=clip)
        optimizer = p.Set(learning_rate=Constant.Params().Set(value=0.1)).Instantiate()
        found = []
        for value in (False, True):
            with running_op_by_op(value):
                state, slots, metrics = theta, optimizer.InitSlots(specs, make_seed(0, 0)), None
                for step in range(3):
                    grads = theta.Transform(lambda w, s=step: tf.sin(40.0 * w + s))
                    state, slots, metrics = optimizer.Update(
                        state, grads, slots, tf.constant(step), specs
                    )
            norm = metrics.pop("grad_norm", global_norm(grads))
            results = tf.nest.flatten((state, slots, metrics, norm))
            found.append([t.numpy() for t in results])
        _assert_close(*found)


def test_fused_is_compiled_op_by_op_only_and_keeps_python_arguments() -> None:
    seen = []

    @fused
    def scaled(x: tf.Tensor, factor: float) -> tf.Tensor:
        seen.append((tf.executing_eagerly(), is_op_by_op()))
        return x * factor

    x = tf.constant([1.0, 2.0])
    assert scaled(x, 2.0).numpy().tolist() == [2.0, 4.0]
    with running_op_by_op():
        assert scaled(x, 3.0).numpy().tolist() == [3.0, 6.0]
        assert is_op_by_op()
    assert seen == [(True, False), (False, False)]


def test_training_steps_of_a_model() -> None:
    """Two steps with dropout on rows with padding, then one whose loss is not finite, which leaves the
    state as it was."""
    params = registry.GetParams("mt.M4Tiny", "")
    params.task.Set(repeat=False, num_experts=4, num_groups=2)
    params.task.optimizer.min_dim_size_to_factor = 8
    params.task.moe.dispatcher = "index"
    task, rng = params.task.Instantiate(), np.random.RandomState(0)
    row = {
        "ids": rng.randint(4, 300, (4, 8)).astype(np.int32),
        "labels": rng.randint(4, 300, (4, 8)).astype(np.int32),
        "segment_ids": np.tile(np.int32([1, 1, 1, 2, 2, 2, 2, 0]), (4, 1)),
        "segment_pos": np.tile(np.int32([0, 1, 2, 0, 1, 2, 3, 0]), (4, 1)),
    }
    batch = NestedMap(src=NestedMap(row), tgt=NestedMap(row)).Transform(tf.constant)
    found = []
    with use_mesh(single_device()):
        start = task.InitState(tf.constant(7))
        for value in (False, True):
            with running_op_by_op(value):
                state, metrics = start, None
                for _ in range(2):
                    state, metrics = task.TrainStep(state, batch)
            found.append([t.numpy() for t in [*state.Flatten(), *metrics.Flatten()]])
        bad = state.Transform(tf.identity)
        bad.theta.encoder.final_norm.scale *= np.nan
        with running_op_by_op():
            after = task.TrainStep(bad, batch)[0]
    _assert_close(*found, tol=1e-4)
    assert after.skipped == 1 and after.step == 3
    for (path, a), (_, b) in zip(bad.theta.FlattenItems(), after.theta.FlattenItems()):
        np.testing.assert_array_equal(a, b, path)
