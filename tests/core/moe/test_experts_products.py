"""The experts' products in the form for XLA are computed without transposed weights."""

import re

import tensorflow as tf

from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.engine.pjrt import PjrtEngine
from lingvo_moe.core.moe.experts import Experts
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import Mesh

E, G, C, M, H = 3, 2, 4, 5, 7


def test_no_product_transposes_weights():
    layer = Experts.Params().Set(name="x", model_dim=M, hidden_dim=H, num_experts=E).Instantiate()

    def step(x, wi, wo):
        y = layer.FProp(NestedMap(wi=wi, wo=wo), x)
        return [y, *tf.gradients(tf.reduce_sum(y * tf.cos(y)), [x, wi, wo])]

    specs = [TensorSpec(s, "float32") for s in ((E, G, C, M), (E, M, H), (E, H, M))]
    text = PjrtEngine(Mesh.parse("expert:1")).Build(step, specs).HloText()
    # With weights as the first operand, the rows' gradients have the shapes [E,M,N] and [E,H,N].
    made = set(re.findall(r"= f32\[([\d,]+)\]\S* dot\(", text))
    rows = f"{E},{G * C},{H}", f"{E},{G * C},{M}"
    assert made == {*rows, f"{E},{M},{G * C}", f"{E},{H},{G * C}", f"{E},{M},{H}", f"{E},{H},{M}"}
