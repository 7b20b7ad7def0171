"""The experts' products in the form for XLA: einsum's values and gradients, without transposed weights."""

import re

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.engine.pjrt import PjrtEngine
from lingvo_moe.core.moe.experts import Experts
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import Mesh

E, G, C, M, H = 3, 2, 4, 5, 7


@pytest.fixture(scope="module")
def compiled():
    layer = Experts.Params().Set(name="x", model_dim=M, hidden_dim=H, num_experts=E).Instantiate()

    def step(x, wi, wo):
        y = layer.FProp(NestedMap(wi=wi, wo=wo), x)
        return [y, *tf.gradients(tf.reduce_sum(y * tf.cos(y)), [x, wi, wo])]

    shapes = (E, G, C, M), (E, M, H), (E, H, M)
    return PjrtEngine(Mesh.parse("expert:1")).Build(
        step, [TensorSpec(s, "float32") for s in shapes]
    )


def test_values_and_gradients_are_plain_einsums(compiled):
    draw = np.random.default_rng(1).standard_normal
    x, wi, wo = (draw(spec.shape).astype(np.float32) for spec in compiled.program.signature.args)
    with tf.GradientTape() as tape:
        args = [tf.constant(a) for a in (x, wi, wo)]
        tape.watch(args)
        h = tf.nn.relu(tf.einsum("EGCM,EMH->EGCH", args[0], args[1]))
        y = tf.einsum("EGCH,EHM->EGCM", h, args[2])
        loss = tf.reduce_sum(y * tf.cos(y))
    for got, wanted in zip(compiled(x, wi, wo), [y, *tape.gradient(loss, args)], strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def test_no_product_transposes_weights(compiled):
    # With weights as the first operand, the rows' gradients have the shapes [E,M,N] and [E,H,N].
    made = set(re.findall(r"= f32\[([\d,]+)\]\S* dot\(", compiled.HloText()))
    rows = f"{E},{G * C},{H}", f"{E},{G * C},{M}"
    assert made == {*rows, f"{E},{M},{G * C}", f"{E},{H},{G * C}", f"{E},{M},{H}", f"{E},{H},{M}"}
