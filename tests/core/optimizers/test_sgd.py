"""Sgd compared with the formulas in NumPy."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core.base_layer import VariableSpec
from lingvo_moe.core.config.hyperparams import ParamError
from lingvo_moe.core.initializers import WeightInit
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.optimizers.schedules import Constant
from lingvo_moe.core.optimizers.sgd import Sgd
from lingvo_moe.core.randomness import make_seed

RATE, DECAY = 0.25, 0.125


def _spec(name, shape, letters, stack_dims=0):
    split = ("expert",) + (None,) * (len(shape) - 1)
    init = WeightInit.Gaussian()
    return VariableSpec(name, shape, "float32", letters, init, split, stack_dims=stack_dims)


@pytest.mark.parametrize("momentum, nesterov", [(0.0, False), (0.5, False), (0.5, True)])
def test_three_steps(momentum, nesterov):
    rate = Constant.Params().Set(value=RATE)
    optimizer = Sgd.Params().Set(
        learning_rate=rate, momentum=momentum, nesterov=nesterov, weight_decay=DECAY
    )
    optimizer = optimizer.Instantiate()
    specs = NestedMap(kernel=_spec("kernel", (4, 3), "IO"), scales=_spec("scales", (2, 3), "LO", 1))
    theta = specs.Transform(lambda s: s.Init(make_seed(0, 0)))
    want = theta.Transform(lambda w: w.numpy().astype("float64"))
    velocity = {"kernel": 0.0, "scales": 0.0}
    slots = optimizer.InitSlots(specs, make_seed(0, 0), theta)
    rng = np.random.RandomState(0)
    for step in range(3):
        grads = specs.Transform(lambda s: tf.constant(rng.randn(*s.shape), tf.float32))
        state = NestedMap(theta=theta, slots=slots, step=tf.constant(step))
        theta, slots, _ = optimizer.Update(state, grads, specs)
        for name, grad in grads.items():
            # The scales of stacked layers are vectors, which do not decay.
            grad = grad.numpy() + (DECAY * want[name] if name == "kernel" else 0.0)
            velocity[name] = momentum * velocity[name] + grad
            ahead = momentum * velocity[name] + grad if nesterov else velocity[name]
            want[name] = want[name] - RATE * ahead
    for name in want:
        np.testing.assert_allclose(theta[name], want[name], atol=1e-6)
    spec = optimizer.SlotSpecs(specs).kernel.get("velocity")
    assert (spec is not None) == bool(momentum)
    assert spec is None or (spec.shape, spec.split) == ((4, 3), ("expert", None))


def test_looking_ahead_without_momentum_is_refused():
    with pytest.raises(ParamError, match="nesterov=True: has no effect without momentum"):
        Sgd.Params().Set(momentum=0.0, nesterov=True).Instantiate()
