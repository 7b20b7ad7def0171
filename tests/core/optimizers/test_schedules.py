"""Learning-rate schedules against formulas in plain Python, at the steps where they bend."""

import math

import numpy as np
import pytest
import tensorflow as tf
from refusals import refuses

from lingvo_moe.core.config.hyperparams import ParamError
from lingvo_moe.core.optimizers.registry import SCHEDULES
from lingvo_moe.core.optimizers.schedules import (
    Constant,
    InverseSqrt,
    Linear,
    SqrtDecay,
    Transformer,
    WarmupStableDecay,
)

STEPS = [0, 1, 4, 9, 10, 11, 19, 20, 25, 29, 30, 31, 100, 10**6]


def _values(params, steps) -> np.ndarray:
    schedule = params.Instantiate()
    values = [schedule.Value(tf.constant(step)) for step in steps]
    assert {v.dtype for v in values} == {tf.float32}
    return np.array(values)


def _rise(step, warmup_steps):
    return min((step + 1) / warmup_steps, 1.0) if warmup_steps else 1.0


@pytest.mark.parametrize("warmup_steps", [0, 10, 29])
def test_a_stable_rate_decays_in_the_last_part(warmup_steps):
    params = WarmupStableDecay.Params().Set(
        value=0.4, warmup_steps=warmup_steps, total_steps=30, decay_share=0.2, final_share=0.1
    )
    start = max(24, warmup_steps)

    def at(step):
        done = min(max(step - start, 0) / (30 - start), 1.0)
        return 0.4 * _rise(step, warmup_steps) * (0.1 + 0.9 * (1 - math.sqrt(done)))

    want = [at(step) for step in STEPS]
    np.testing.assert_allclose(_values(params, STEPS), want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
def test_a_decay_that_ends_with_the_run(name):
    params = SCHEDULES[name].Params().Set(value=0.4, warmup_steps=10)
    schedule, known = params.Instantiate(), params.Copy().Set(total_steps=30).Instantiate()
    assert schedule.ends_with_run and not known.ends_with_run
    for step in map(tf.constant, STEPS):
        want = known.Value(step)
        np.testing.assert_allclose(schedule.Value(step, tf.constant(30)), want, atol=1e-7)
        stable = 0.4 * _rise(int(step), 10)
        for unknown in (None, tf.constant(0)):
            np.testing.assert_allclose(schedule.Value(step, unknown), stable, rtol=1e-6)


@pytest.mark.parametrize("warmup_steps", [0, 10])
def test_constant(warmup_steps):
    params = Constant.Params().Set(value=0.3, warmup_steps=warmup_steps)
    want = [0.3 * _rise(step, warmup_steps) for step in STEPS]
    np.testing.assert_allclose(_values(params, STEPS), want, rtol=1e-6)


@pytest.mark.parametrize("warmup_steps, start", [(0, 0), (0, 20), (10, 0), (10, 10), (10, 20)])
def test_inverse_sqrt(warmup_steps, start):
    params = InverseSqrt.Params().Set(value=0.5, warmup_steps=warmup_steps, decay_start=start)
    begins = start or warmup_steps or 1
    want = [0.5 * _rise(t, warmup_steps) * math.sqrt(begins / max(t, begins)) for t in STEPS]
    np.testing.assert_allclose(_values(params, STEPS), want, rtol=1e-6)


def test_transformer_s_is_that_of_vaswani():
    params = Transformer.Params().Set(multiplier=2.0, warmup_steps=10, model_dim=64)
    want = [2 * 64**-0.5 * min((t + 1) ** -0.5, (t + 1) * 10**-1.5) for t in STEPS]
    np.testing.assert_allclose(_values(params, STEPS), want, rtol=1e-6)


def test_gshard_s_is_constant_and_then_decays():
    values = _values(SqrtDecay.Params(), [0, 5_000, 10_000, 40_000, 1_000_000])
    np.testing.assert_allclose(values, [0.01, 0.01, 0.01, 0.005, 0.001], rtol=1e-6)
    params = SqrtDecay.Params().Set(multiplier=2.0, constant_steps=100)
    np.testing.assert_allclose(_values(params, [0, 100, 400]), [0.2, 0.2, 0.1], rtol=1e-6)


@refuses(
    ParamError,
    (Linear.Params().Set(total_steps=9, warmup_steps=9), "total_steps=9: must be 0, the end"),
    (InverseSqrt.Params().Set(decay_start=3, warmup_steps=9), "decay_start=3: must be 0, or at"),
    (Transformer.Params(), "model_dim=0: must be an integer of at least 1"),
)
def test_schedules_that_cannot_be(params):
    params.Instantiate()


@pytest.mark.parametrize("max_steps, why", [
    (20, "the run ends at step 20, before the rate has decayed"),
    (40, "from that step to 40 the rate stays at 0.1"),
])  # fmt: skip
def test_a_decay_that_does_not_end_with_the_run(max_steps, why):
    schedule = Linear.Params().Set(value=0.2, total_steps=30, final_share=0.5).Instantiate()
    assert schedule.Mismatch(max_steps) == ("total_steps", 30, why, max_steps)


def test_no_decay_ends_with_a_run_that_ends_during_the_warm_up():
    found = Linear.Params().Set(total_steps=30, warmup_steps=10).Instantiate().Mismatch(10)
    assert found is not None and found.better is None


def test_schedules_that_suit_every_length_of_a_run():
    assert Linear.Params().Set(total_steps=30).Instantiate().Mismatch(30) is None
    assert Constant.Params().Instantiate().Mismatch(30) is None
