"""Optimizers and schedules against those of optax, an independent implementation."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorflow as tf
from optimizer_testing import run, spec

from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.optimizers.registry import OPTIMIZERS, SCHEDULES
from lingvo_moe.core.optimizers.schedules import Constant

RATE, STEPS, DECAY = 0.03, 4, 0.2


def _coupled(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """An optimizer with a decay that is added to the gradient."""
    return optax.chain(optax.add_decayed_weights(DECAY), optimizer)


_FACTORED = {"beta2": 1.0, "min_dim_size_to_factor": 4}
_BETAS = {"beta1": 0.5, "beta2": 0.98, "epsilon": 0.1}
_CASES = [
    ("adam", {}, lambda: optax.adam(RATE)),
    ("adam", {"weight_decay": DECAY}, lambda: _coupled(optax.adam(RATE))),
    ("adam", _BETAS, lambda: optax.adam(RATE, 0.5, 0.98, 0.1)),
    ("adam", {"beta1": 0.0, "beta2": 0.0}, lambda: optax.adam(RATE, 0.0, 0.0)),
    ("adamw", {"weight_decay": DECAY}, lambda: optax.adamw(RATE, weight_decay=DECAY)),
    ("adamw", {"weight_decay": 0.0}, lambda: optax.adam(RATE)),
    ("sgd", {"momentum": 0.0}, lambda: optax.sgd(RATE)),
    ("sgd", {"momentum": 0.9, "weight_decay": DECAY}, lambda: _coupled(optax.sgd(RATE, momentum=0.9))),
    ("sgd", {"momentum": 0.5, "nesterov": True}, lambda: optax.sgd(RATE, 0.5, nesterov=True)),
    ("adafactor", _FACTORED, lambda: optax.adafactor(RATE, min_dim_size_to_factor=4)),
    ("adafactor", {**_FACTORED, "multiply_by_parameter_scale": False, "min_dim_size_to_factor": 128},
     lambda: optax.adafactor(RATE, multiply_by_parameter_scale=False)),
]  # fmt: skip


@pytest.mark.parametrize("name, params, make", _CASES)
def test_the_weights_are_those_of_optax(name, params, make):
    rate = Constant.Params().Set(value=RATE)
    chosen = {"learning_rate": rate, "weight_decay": 0.0} | params
    optimizer = OPTIMIZERS[name].Params().Set(**chosen).Instantiate()
    weight, *grads = np.random.RandomState(0).randn(STEPS + 1, 6, 8).astype("float32")
    given = [NestedMap(w=tf.constant(grad)) for grad in grads]
    theta, _, _ = run(
        optimizer, NestedMap(w=spec((6, 8), "MH")), NestedMap(w=tf.constant(weight)), given
    )
    reference, want = make(), jnp.asarray(weight)
    state = reference.init(want)
    for grad in grads:
        updates, state = reference.update(jnp.asarray(grad), state, want)
        want = optax.apply_updates(want, updates)
    np.testing.assert_allclose(theta.w, want, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name, reference", [
    ("cosine", lambda: optax.cosine_decay_schedule(RATE, 90, alpha=0.1)),
    ("linear", lambda: optax.linear_schedule(RATE, 0.1 * RATE, 90)),
])  # fmt: skip
def test_after_the_warm_up_rates_are_those_of_optax(name, reference):
    params = SCHEDULES[name].Params()
    params.Set(value=RATE, warmup_steps=10, total_steps=100, final_share=0.1)
    schedule = params.Instantiate()
    warm_up = optax.linear_schedule(RATE / 10, RATE, 9)
    for step in (0, 3, 9, 10, 11, 55, 99, 100, 200):
        want = warm_up(step) if step < 10 else reference()(step - 10)
        np.testing.assert_allclose(schedule.Value(tf.constant(step)), want, rtol=1e-5, atol=1e-9)
