"""The experts' products for TensorFlow's own kernels are those for XLA, gradients too."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core import sharding
from lingvo_moe.core.moe.experts import Experts
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.op_by_op import running_op_by_op

E, G, M, H = 3, 2, 5, 6


def _run(op_by_op, args):
    layer = Experts.Params().Set(name="x", model_dim=M, hidden_dim=H, num_experts=E).Instantiate()

    @tf.function(autograph=False, jit_compile=not op_by_op)
    def step(x, wi, wo):
        with sharding.use_mesh(sharding.single_device()), running_op_by_op(op_by_op):
            y = layer.FProp(NestedMap(wi=wi, wo=wo), x)
        return y, *tf.gradients(tf.reduce_sum(y * tf.cos(y)), [x, wi, wo])

    return step(*args), step.get_concrete_function(*args).graph


@pytest.mark.parametrize("slots", [4, 100])
def test_batched_products_are_the_einsums(slots):
    draw = np.random.default_rng(1).standard_normal
    shapes = (E, G, slots, M), (E, M, H), (E, H, M)
    args = [tf.constant(0.3 * draw(shape), tf.float32) for shape in shapes]
    got, graph = _run(True, args)
    wanted, _ = _run(False, args)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    # No weight, nor its gradient, is transposed for itself; few rows go expert by expert.
    kinds = {op.type for op in graph.get_operations()}
    assert "BatchMatMulV2" in kinds and "Einsum" not in kinds
    few = slots == 4
    assert ("Transpose" in kinds) == few and ("MatMul" in kinds) == few
