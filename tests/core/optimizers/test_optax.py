"""Optimizers and schedules against those of optax, an independent implementation."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorflow as tf

from lingvo_moe.core.base_layer import VariableSpec
from lingvo_moe.core.initializers import WeightInit
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.optimizers.registry import OPTIMIZERS, SCHEDULES
from lingvo_moe.core.optimizers.schedules import Constant
from lingvo_moe.core.randomness import make_seed

RATE, STEPS = 0.03, 4
_FACTORED = {"beta2": 1.0, "min_dim_size_to_factor": 4}
_CASES = [
    ("adam", {}, lambda: optax.adam(RATE)),
    ("adamw", {"weight_decay": 0.2}, lambda: optax.adamw(RATE, weight_decay=0.2)),
    ("sgd", {"momentum": 0.5}, lambda: optax.sgd(RATE, momentum=0.5)),
    ("sgd", {"momentum": 0.5, "nesterov": True}, lambda: optax.sgd(RATE, 0.5, nesterov=True)),
    ("adafactor", _FACTORED, lambda: optax.adafactor(RATE, min_dim_size_to_factor=4)),
    (
        "adafactor",
        {**_FACTORED, "multiply_by_parameter_scale": False, "min_dim_size_to_factor": 128},
        lambda: optax.adafactor(RATE, multiply_by_parameter_scale=False),
    ),
]


@pytest.mark.parametrize("name, params, make", _CASES)
def test_the_weights_are_those_of_optax(name, params, make):
    chosen = {"weight_decay": 0.0} | params
    if name == "adafactor":
        chosen.pop("weight_decay")
    optimizer = OPTIMIZERS[name].Params().Set(learning_rate=Constant.Params().Set(value=RATE))
    optimizer = optimizer.Set(**chosen).Instantiate()
    specs = NestedMap(
        w=VariableSpec("w", (6, 8), "float32", "MH", WeightInit.Gaussian(), (None,) * 2)
    )
    weight, *grads = np.random.RandomState(0).randn(STEPS + 1, 6, 8).astype("float32")
    theta = NestedMap(w=tf.constant(weight))
    slots = optimizer.InitSlots(specs, make_seed(0, 0), theta)
    reference = make()
    want = jnp.asarray(weight)
    state = reference.init(want)
    for step, grad in enumerate(grads):
        given = NestedMap(w=tf.constant(grad))
        state_before = NestedMap(theta=theta, slots=slots, step=tf.constant(step))
        theta, slots, _ = optimizer.Update(state_before, given, specs)
        updates, state = reference.update(jnp.asarray(grad), state, want)
        want = optax.apply_updates(want, updates)
        np.testing.assert_allclose(theta.w, want, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    "name, reference",
    [
        ("cosine", lambda: optax.cosine_decay_schedule(RATE, 90, alpha=0.1)),
        ("linear", lambda: optax.linear_schedule(RATE, 0.1 * RATE, 90)),
    ],
)
def test_after_the_warm_up_rates_are_those_of_optax(name, reference):
    params = SCHEDULES[name].Params()
    params.Set(value=RATE, warmup_steps=10, total_steps=100, final_share=0.1)
    schedule = params.Instantiate()
    warm_up = optax.linear_schedule(RATE / 10, RATE, 9)
    for step in (0, 3, 9, 10, 11, 55, 99, 100, 200):
        want = warm_up(step) if step < 10 else reference()(step - 10)
        np.testing.assert_allclose(schedule.Value(tf.constant(step)), want, rtol=1e-5, atol=1e-9)
