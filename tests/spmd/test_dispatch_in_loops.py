"""Dispatchers in loops over layers: the numbers of one device; `remat` keeps what would be sent and computed again."""

import pytest
import tensorflow as tf
import toy_moe
from toy_moe import M, assert_close, eagerly

from lingvo_moe.analysis.programs.hlo.collective_list import parse_collectives
from lingvo_moe.core.engine.eager.testing import run_sharded
from lingvo_moe.core.layers import masks
from lingvo_moe.core.layers.transformer import TransformerStack
from lingvo_moe.core.layers.transformer_layer import TransformerLayer
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.randomness import make_seed
from lingvo_moe.core.sharding import Mesh, single_device, use_mesh


def _stack(dispatcher, remat=()) -> TransformerStack:
    """A loop over two layers of attention and experts, with dropout."""
    moe = toy_moe.layer(dispatcher=dispatcher, **{"experts.relu_dropout_prob": 0.2}).p.Copy()
    layer = TransformerLayer.Params().Set(ffn_tpl=moe.Set(weight_split=None, activation_split=None))
    layer.self_atten_tpl.num_heads = 2
    p = TransformerStack.Params().Set(name="stack", model_dim=M, num_blocks=2, block=[layer])
    return p.Set(remat=remat, **toy_moe.SPLITS).Instantiate()


def _train(stack: TransformerStack):
    def train(theta, x):
        weights = theta.Flatten()
        ones = tf.ones_like(x[:, :, 0])
        aux = NestedMap(self_mask=masks.segment_mask(ones, ones), paddings=1 - ones)
        with tf.GradientTape() as tape:
            tape.watch([x, *weights])
            y, _ = stack.FProp(theta, x, aux, seed=tf.constant([3, 4]))
            loss = tf.reduce_sum(y * tf.sin(x))
        return NestedMap(loss=loss, grads=tape.gradient(loss, [x, *weights]))

    return train


@pytest.mark.slow
@pytest.mark.parametrize(
    # Two products forward, and where they have the experts' names each one's two gradients; again two more.
    ("dispatcher", "products"),
    [("index", 6), ("dropless", 2)],
)
def test_rows_that_are_kept_are_neither_sent_nor_computed_again(dispatcher, products):
    stack = _stack(dispatcher, ("dispatched", "experts_hidden", "returned"))
    _, x, *_ = toy_moe.arguments(toy_moe.layer())[0]
    with use_mesh(single_device()):
        args = [stack.InitTheta(make_seed(0, 0)), x]
    splits = [stack.VariableSpecs(), toy_moe.ROWS]
    got, collectives = run_sharded(_train(stack), args, Mesh.parse("expert:4"), splits)
    assert_close(got, eagerly(_train(_stack(dispatcher)), args))
    assert set(collectives) == {"all-to-all", "all-reduce"}
    found = parse_collectives(collectives.hlo)
    # There and back, in the forward and in the backward pass; two more where all is computed again.
    assert sum(c.kind == "all-to-all" and c.shapes[0][0] == "f32" for c in found) == 4
    lines = collectives.hlo.splitlines()
    assert sum(" dot(" in line and "/experts" in line for line in lines) == products
