"""Adam and AdamW against the formulas of their papers in NumPy, in float64."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core.base_layer import VariableSpec
from lingvo_moe.core.initializers import WeightInit
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.optimizers.adam import Adam, AdamW
from lingvo_moe.core.optimizers.schedules import Constant
from lingvo_moe.core.randomness import make_seed

RATE, STEPS = 0.01, 5


def _spec(shape, dtype="float32"):
    letters, split = "MH"[: len(shape)], (None, "expert")[: len(shape)]
    return VariableSpec("w", shape, dtype, letters, WeightInit.Gaussian(), split)


def _reference(weight, grads, beta1, beta2, epsilon, coupled, decoupled):
    """The weight after all steps, by algorithm 2 of Loshchilov and Hutter: its two kinds of decay."""
    w, m, v = weight.astype(np.float64), 0.0, 0.0
    for t, g in enumerate(grads, start=1):
        g = g + coupled * w
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
        w = w - RATE * (m_hat / (np.sqrt(v_hat) + epsilon) + decoupled * w)
    return w


def _run(cls, shape, **params):
    optimizer = cls.Params().Set(learning_rate=Constant.Params().Set(value=RATE), **params)
    optimizer, specs = optimizer.Instantiate(), NestedMap(w=_spec(shape))
    rng = np.random.default_rng(1)
    weight, *grads = (rng.normal(size=shape) for _ in range(STEPS + 1))
    theta = NestedMap(w=tf.constant(weight, tf.float32))
    slots = optimizer.InitSlots(specs, make_seed(0, 0), theta)
    for t, grad in enumerate(grads):
        grad = NestedMap(w=tf.constant(grad, tf.float32))
        state = NestedMap(theta=theta, slots=slots, step=tf.constant(t))
        theta, slots, _ = optimizer.Update(state, grad, specs)
    return theta.w, slots.w, weight, grads


@pytest.mark.parametrize("shape", [(7,), (4, 6)])
@pytest.mark.parametrize("cls", [Adam, AdamW])
@pytest.mark.parametrize("betas", [(0.9, 0.999, 1e-8), (0.0, 0.98, 1e-8), (0.5, 0.0, 0.1)], ids=str)
def test_equals_numpy(cls, betas, shape):
    beta1, beta2, epsilon = betas
    params = {"beta1": beta1, "beta2": beta2, "epsilon": epsilon, "weight_decay": 0.3}
    got, slots, weight, grads = _run(cls, shape, **params)
    decay = 0.3 if len(shape) > 1 else 0.0  # vectors do not decay
    kinds = (
        {"coupled": decay, "decoupled": 0.0}
        if cls is Adam
        else {"coupled": 0.0, "decoupled": decay}
    )
    np.testing.assert_allclose(
        got, _reference(weight, grads, *betas, **kinds), rtol=2e-5, atol=1e-6
    )
    assert sorted(slots) == (["mean", "square"] if beta1 else ["square"])


def test_they_differ_by_the_decay_alone():
    assert Adam.Params().weight_decay == 0.0 and AdamW.Params().weight_decay == 0.01
    np.testing.assert_array_equal(_run(Adam, (4, 6))[0], _run(AdamW, (4, 6), weight_decay=0.0)[0])


def test_slots_are_float32_and_sharded_like_the_weight():
    slots = Adam.Params().Instantiate().SlotSpecs(NestedMap(w=_spec((4, 6), "bfloat16").Stacked(3)))
    for name in ("mean", "square"):
        slot = slots.w[name]
        assert (slot.path, slot.shape, slot.letters) == (f"w.{name}", (3, 4, 6), "LMH")
        assert (slot.dtype, slot.split) == ("float32", (None, None, "expert"))


@pytest.mark.parametrize("name, value", [("beta1", 1.0), ("beta2", -0.1), ("epsilon", 0.0)])
def test_ranges(name, value):
    with pytest.raises(ValueError, match=f"{name}=.*: must be a"):
        Adam.Params().Set(**{name: value})
