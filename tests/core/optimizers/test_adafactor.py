"""Adafactor compared with NumPy, layer by layer, also with a state that is sharded over devices."""

import numpy as np
import pytest
import tensorflow as tf
from optimizer_testing import run, spec

from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.optimizers.adafactor import Adafactor
from lingvo_moe.core.optimizers.schedules import Constant

RATE = 0.1


def _optimizer(**params) -> Adafactor:
    p = Adafactor.Params().Set(
        learning_rate=Constant.Params().Set(value=RATE), min_dim_size_to_factor=4
    )
    return p.Set(**params).Instantiate()


def _reference(weight, grads, factored, rate=RATE, clip=1.0, beta2=0.99, scale=True):
    """Returns all updates of one variable, in float64, by the formulas of the paper."""
    weight, row, col, full = weight.astype(np.float64), 0.0, 0.0, 0.0
    for t, grad in enumerate(grads, start=1):
        decay = min(beta2, 1 - t**-0.8)
        square = grad.astype(np.float64) ** 2 + 1e-30
        if factored:
            row = decay * row + (1 - decay) * square.mean(-1)
            col = decay * col + (1 - decay) * square.mean(-2)
            v = row[..., :, None] * col[..., None, :] / row.mean(-1)[..., None, None]
        else:
            full = decay * full + (1 - decay) * square
            v = full
        update = grad / np.sqrt(v)
        if clip:
            update /= max(1.0, np.sqrt((update**2).mean()) / clip)
        size = max(1e-3, np.sqrt((weight**2).mean())) if scale else 1.0
        weight = weight - rate * size * update
    return weight


def _normals(seed, shape, count):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(np.float32) for _ in range(count)]


def _updated(optimizer, one, weight, grads):
    """The weight and the slots of a variable after an update by each of some gradients."""
    given = [NestedMap(w=tf.constant(grad)) for grad in grads]
    theta, slots, _ = run(optimizer, NestedMap(w=one), NestedMap(w=tf.constant(weight)), given)
    return theta.w, slots.w


@pytest.mark.parametrize(("shape", "factored", "params"), [
    ((), False, {}),
    ((6,), False, {}),
    ((6, 3), False, {"clip_threshold": 0.5}),
    ((6, 8), True, {}),
    ((6, 8), True, {"clip_threshold": 0.0}),
    ((6, 8), True, {"clip_threshold": 0.5}),
    ((6, 8), True, {"beta2": 0.5}),
    ((6, 8), True, {"multiply_by_parameter_scale": False}),
])  # fmt: skip
def test_equals_numpy(shape, factored, params):
    weight, *grads = _normals(1, shape, 5)
    found, slots = _updated(_optimizer(**params), spec(shape), weight, grads)
    assert sorted(slots) == (["col", "row"] if factored else ["full"])
    want = _reference(
        weight,
        grads,
        factored,
        clip=params.get("clip_threshold", 1.0),
        beta2=params.get("beta2", 0.99),
        scale=params.get("multiply_by_parameter_scale", True),
    )
    np.testing.assert_allclose(found, want, rtol=2e-5, atol=1e-6)


def test_heads_are_factored_one_by_one():
    """A query MNK is factored over its two large dimensions, M and K."""
    weight, grad = _normals(4, (6, 3, 5), 2)
    grad[:, 1] *= 100
    optimizer = _optimizer(clip_threshold=0.0)
    found, slots = _updated(optimizer, spec((6, 3, 5), "MNK"), weight, [grad])
    assert (slots.row.shape, slots.col.shape) == ((6, 3), (3, 5))
    size = np.sqrt((weight**2).mean())
    for n in range(3):
        alone = _reference(weight[:, n], [grad[:, n]], True, clip=0, scale=False, rate=RATE * size)
        np.testing.assert_allclose(found[:, n], alone, rtol=3e-5)


def test_an_expert_without_tokens_stays_as_it_is():
    weight, grad = _normals(3, (2, 4, 6), 2)
    grad[0] = 0
    found, _ = _updated(_optimizer(), spec((2, 4, 6)), weight, [grad] * 3)
    np.testing.assert_array_equal(found[0], weight[0])
    assert np.all(np.isfinite(found[1])) and np.all(found[1] != weight[1])


@pytest.mark.parametrize("shape", [(5,), (4, 6), (3, 4, 6)])
def test_stacked_layers_learn_as_separate_ones(shape):
    layers = 3
    weight, *grads = _normals(4, (layers, *shape), 4)
    for g in grads:
        g[1] *= 50  # a layer with large gradients must not clip its neighbours
    one = spec(shape)
    stacked, slots = _updated(_optimizer(), one.Stacked(layers), weight, grads)
    names = [f"w{i}" for i in range(layers)]
    separate, separate_slots, _ = run(
        _optimizer(),
        NestedMap(dict.fromkeys(names, one)),
        NestedMap({n: tf.constant(weight[i]) for i, n in enumerate(names)}),
        [NestedMap({n: tf.constant(g[i]) for i, n in enumerate(names)}) for g in grads],
    )
    for i, n in enumerate(names):
        np.testing.assert_allclose(stacked[i], separate[n], rtol=1e-6, atol=1e-7)
        for slot, value in separate_slots[n].items():
            np.testing.assert_allclose(slots[slot][i], value, rtol=1e-6, atol=1e-7)


def test_a_stack_is_not_a_matrix():
    """[L,M] holds L vectors; factoring would mix layers."""
    slots = _optimizer().SlotSpecs(NestedMap(w=spec((8,)).Stacked(8)))
    assert sorted(slots.w) == ["full"]


def test_slots_are_float32_and_cut_as_their_variable():
    slots = _optimizer().SlotSpecs(
        NestedMap(moe=NestedMap(wi=spec((8, 16, 32), "EMH", "moe.wi", "bfloat16").Stacked(2)))
    )
    row, col = slots.moe.wi.row, slots.moe.wi.col
    assert (row.path, row.shape, row.letters) == ("moe.wi.row", (2, 8, 16), "LEM")
    assert (col.path, col.shape, col.letters) == ("moe.wi.col", (2, 8, 32), "LEH")
    assert row.split == col.split == (None, "expert", None)
    assert row.dtype == col.dtype == "float32"
    assert row.stack_dims == 1


def test_bfloat16_weights():
    weight, grad = (tf.cast(x, tf.bfloat16) for x in _normals(5, (4, 6), 2))
    found, slots = _updated(_optimizer(), spec((4, 6), dtype="bfloat16"), weight, [grad])
    assert found.dtype == tf.bfloat16
    assert {s.dtype for s in slots.Flatten()} == {tf.float32}
    wide = [tf.cast(x, tf.float32).numpy() for x in (weight, grad)]
    exact = _reference(wide[0], wide[1:], True)
    np.testing.assert_allclose(tf.cast(found, tf.float32), exact, rtol=1e-2)


def test_metrics_and_sparse_gradients():
    weight = tf.constant(_normals(6, (5, 4), 1)[0])
    sparse = tf.IndexedSlices(tf.ones([2, 4]), tf.constant([1, 1]), tf.constant([5, 4]))
    specs = NestedMap(w=spec((5, 4)))
    optimizer = _optimizer(min_dim_size_to_factor=128)
    theta, _, metrics = run(optimizer, specs, NestedMap(w=weight), [NestedMap(w=sparse)])
    dense = np.zeros((5, 4), np.float32)
    dense[1] = 2
    want, _, _ = run(optimizer, specs, NestedMap(w=weight), [NestedMap(w=tf.constant(dense))])
    np.testing.assert_array_equal(theta.w, want.w)
    np.testing.assert_allclose(metrics.learning_rate, RATE)
    np.testing.assert_allclose(metrics.update_norm, tf.norm(weight - theta.w), rtol=1e-5)


def test_a_variable_without_a_gradient_is_named():
    specs = NestedMap(w=spec((2,), name="decoder.w"))
    with pytest.raises(ValueError, match=r"no gradient for decoder\.w"):
        run(_optimizer(), specs, NestedMap(w=tf.zeros([2])), [NestedMap(w=None)])
