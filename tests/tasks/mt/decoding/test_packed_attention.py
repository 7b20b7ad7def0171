"""Attention over packed weights equals the layer: in a pass, in steps of a beam, and over a memory.

Letters: B batch, T query, S key, M model, N head, A head of keys and values, K key dimension.
"""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.kernels import tensorflow
from lingvo_moe.core.kernels.packed_weights import PackAs
from lingvo_moe.core.layers.attention import MultiHeadAttention
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.randomness import make_seed
from lingvo_moe.core.sharding import single_device, use_mesh
from tests.processes import run_python

M, N, K = 8, 8, 3
DRAW = np.random.default_rng(0)


def _layer(kv_heads: int, cls: type = MultiHeadAttention) -> tuple[MultiHeadAttention, NestedMap]:
    p = cls.Params().Set(name="atten", model_dim=M, num_heads=N, dim_per_head=K)
    layer = p.Set(num_kv_heads=kv_heads, biases=True, score_scale=0.7).Instantiate()
    theta = layer.InitTheta(make_seed(0, 0))  # whose biases are 0
    return layer, theta.Transform(lambda w: w + 0.1 * _normal(*w.shape))


def _normal(*shape: int) -> tf.Tensor:
    return tf.constant(DRAW.normal(size=shape), tf.float32)


def _mask(*shape: int) -> tf.Tensor:
    mask = DRAW.random(shape) < 0.6
    mask[..., 0] = True
    return tf.constant(mask)


@pytest.mark.parametrize("kv_heads", [0, 1, 4])
def test_steps_of_a_beam(kv_heads):
    """Two hypotheses, which from step 2 both continue the first one; compared with one pass."""
    layer, theta = _layer(kv_heads)
    weights = layer.PackWeights(theta, PackAs())
    masks = np.zeros([3, 2, 6], bool)
    masks[0, 0, 0] = masks[0, 1, 1] = True
    masks[1] = masks[0] + np.eye(2, 6, 2)
    masks[2] = masks[1][[0, 0]] + np.eye(2, 6, 4)
    with use_mesh(single_device()):
        plain = layer.InitCache(3, 3, 2)
        with kernels.using(tensorflow):
            cache = layer.InitCache(3, 3, 2)
        assert cache.k.shape == (kv_heads or N, 3, 3, 2 * K)
        past = []
        for t in range(3):
            x, mask = _normal(3, 2, M), tf.constant(np.stack([masks[t]] * 3))
            past.append(x[:, :1])
            want, plain = layer.ExtendStep(theta, x, plain, tf.constant(t), mask)
            with kernels.using(tensorflow):
                got, cache = layer.ExtendStep(weights, x, cache, tf.constant(t), mask)
            np.testing.assert_allclose(got, want, atol=1e-5)
        x, mask = tf.concat(past, 1), _mask(3, 3, 3)
        with kernels.using(tensorflow):
            got = layer.FProp(weights, x, x, mask)
        np.testing.assert_allclose(got, layer.FProp(theta, x, x, mask), atol=1e-5)


_ROWS = """
import numpy as np, tensorflow as tf
from lingvo_moe.core import kernels
from lingvo_moe.core.kernels import tensorflow
from lingvo_moe.core.kernels.packed_weights import PackAs
from lingvo_moe.core.moe.layer import MoELayer
from lingvo_moe.core.moe.routers.top_k import TopKRouter
from lingvo_moe.core.randomness import make_seed
from lingvo_moe.core.sharding import single_device, use_mesh

draw = tf.random.stateless_normal

def check(pack, dim, columns):
    weight = draw([dim, columns], [1, 2])
    packed, heads = pack.Matrix(weight), pack.Heads(draw([dim, 2, 20], [3, 4]))
    rows = draw([20, dim], [5, 6])

    def products(x):
        return packed.Product(x), heads.Project(x[tf.newaxis])[0][:, 0]

    spec = [tf.TensorSpec([None, dim])]
    for run in (products, tf.function(products, input_signature=spec, autograph=False)):
        want, of_heads = run(rows)
        np.testing.assert_allclose(want, rows @ weight, atol=1e-3)
        for number in range(1 if packed.rows_alike else 4, 20):
            got, got_heads = run(rows[:number])
            about = f"{pack} {dim} {columns} {number}"
            np.testing.assert_array_equal(got, want[:number], err_msg=about)
            np.testing.assert_array_equal(got_heads, of_heads[:, :number], err_msg=about)

def check_experts(pack):
    sizes = {"model_dim": 520, "hidden_dim": 600, "num_experts": 8}
    router = TopKRouter.Params().Set(k=2)
    layer = MoELayer.Params().Set(name="moe", router=router, **sizes).Instantiate()
    with use_mesh(single_device()), kernels.using(tensorflow):
        theta = layer.PackWeights(layer.InitTheta(make_seed(0, 0)), pack)
        x = draw([1, 9, 520], [7, 8])
        want = layer.FProp(theta, x, tf.zeros([1, 9]))[0]
        alike = theta.experts.wo.rows_alike and theta.router.wg.rows_alike
        for number in range(1 if alike else 4, 9):
            got = layer.FProp(theta, x[:, :number], tf.zeros([1, number]))[0]
            np.testing.assert_array_equal(got, want[:, :number], err_msg=f"{pack} {number}")

for beam_size in (1, 4):
    for dim, columns in ((64, 97), (256, 600), (512, 512), (601, 24), (1024, 97)):
        check(PackAs(beam_size=beam_size), dim, columns)
    check_experts(PackAs(beam_size=beam_size))
"""


@pytest.mark.parametrize("threads", ["1", "3"])
def test_a_row_rounds_the_same_in_every_batch(threads):
    """Products by packed weights, and experts, of up to 20 rows, static and open, by oneDNN as in our commands."""
    env = {"TF_ENABLE_ONEDNN_OPTS": "1", "TF_NUM_INTRAOP_THREADS": threads}
    run = run_python("-c", _ROWS, env=env)
    assert run.returncode == 0, run.stderr
