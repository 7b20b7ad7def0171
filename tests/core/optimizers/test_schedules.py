"""Learning-rate schedules at chosen steps."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core.hyperparams import ParamError
from lingvo_moe.core.optimizers.schedules import (
    Constant,
    ConstantThenSqrtDecay,
    SqrtDecay,
    WarmupThenCosine,
)


def _values(params, steps) -> np.ndarray:
    schedule = params.Instantiate()
    values = [schedule.Value(tf.constant(step)) for step in steps]
    assert {v.dtype for v in values} == {tf.float32}
    return np.array(values)


def test_constant():
    np.testing.assert_allclose(_values(Constant.Params().Set(value=0.3), [0, 10**6]), 0.3)


def test_sqrt_decay_is_the_paper_s_recipe_by_default():
    values = _values(SqrtDecay.Params(), [0, 5_000, 10_000, 40_000, 1_000_000])
    np.testing.assert_allclose(values, [0.01, 0.01, 0.01, 0.005, 0.001], rtol=1e-6)


def test_sqrt_decay_parameters():
    params = SqrtDecay.Params().Set(multiplier=2.0, warmup_steps=100)
    np.testing.assert_allclose(_values(params, [0, 100, 400]), [0.2, 0.2, 0.1], rtol=1e-6)


def test_constant_then_sqrt_decay():
    params = ConstantThenSqrtDecay.Params().Set(value=0.5, constant_steps=100)
    np.testing.assert_allclose(_values(params, [0, 100, 400]), [0.5, 0.5, 0.25], rtol=1e-6)
    params.rise_steps = 10
    np.testing.assert_allclose(
        _values(params, [0, 4, 9, 100, 400]), [0.05, 0.25, 0.5, 0.5, 0.25], rtol=1e-6
    )


def test_warmup_then_cosine():
    params = WarmupThenCosine.Params().Set(value=0.4, warmup_steps=10, total_steps=30)
    values = _values(params, [0, 4, 10, 20, 30, 10**6])
    np.testing.assert_allclose(values, [0.04, 0.2, 0.4, 0.2, 0, 0], rtol=1e-6, atol=1e-7)
    with pytest.raises(ParamError, match="total_steps=10: must be more than warmup_steps=10"):
        params.Set(total_steps=10).Instantiate()


@pytest.mark.parametrize("cls", [Constant, SqrtDecay, ConstantThenSqrtDecay, WarmupThenCosine])
def test_steps_may_be_traced(cls):
    schedule = cls.Params().Instantiate()
    traced = tf.function(schedule.Value)
    np.testing.assert_allclose(traced(tf.constant(7)), schedule.Value(tf.constant(7)))
