"""Programs on GPUs compute what they compute on the CPU: make test GPU=1, on a machine that has some."""

import jax
import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core import sharding
from lingvo_moe.core.engine.lowering.lowering import lower
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.engine.pjrt import PjrtEngine
from lingvo_moe.core.moe.layer import MoELayer
from lingvo_moe.core.sharding import Mesh


def _devices():
    try:
        found = jax.devices("gpu")
    except RuntimeError:
        pytest.skip("needs an NVIDIA GPU: make install GPU=1, then make test GPU=1")
    # As many as divide four experts.
    return found[: max(n for n in (1, 2, 4) if n <= len(found))]


def test_an_moe_layer_computes_the_same_as_on_a_cpu():
    devices = _devices()
    mesh = Mesh(("expert",), (len(devices),))
    params = MoELayer.Params().Set(name="moe", model_dim=16, hidden_dim=32, num_experts=4)
    splits = {"activation_split": {"E": "expert", "G": "expert"}, "weight_split": {"E": "expert"}}
    moe = params.Set(**splits).Instantiate()

    def step(theta, x):
        y, extras = moe.FProp(theta, x, tf.zeros(x.shape[:2]), seed=tf.constant([1, 2]))
        return sharding.replicate(y), extras.aux_loss

    specs = [moe.VariableSpecs(), TensorSpec((4, 8, 16), "float32", ("expert", None, None))]
    program = lower(step, specs, mesh, name="moe")
    draw = np.random.default_rng(0).standard_normal
    values = [
        specs[0].Transform(lambda s: draw(s.shape, np.float32)),
        draw(specs[1].shape, np.float32),
    ]
    engines = [PjrtEngine(mesh, used) for used in (jax.devices("cpu")[: mesh.size], devices)]
    expected, found = (engine.Get(engine.Compile(program)(*values)) for engine in engines)
    for a, b in zip(expected, found, strict=True):
        # TF32 has ten bits of mantissa, and a few tokens may choose another expert.
        assert np.mean(np.abs(a - b) > 0.02 * np.abs(a).max()) < 0.05
