"""Inference by TensorFlow's own kernels: experts in panels, and routers that are asked for choices alone."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core.moe import experts_in_panels
from lingvo_moe.core.moe.choices_alone import choices_alone
from lingvo_moe.core.moe.routers.registry import ROUTERS
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.op_by_op import running_op_by_op
from lingvo_moe.core.randomness import make_seed
from lingvo_moe.core.sharding import single_device, use_mesh

N, E, K, M, H = 12, 6, 2, 24, 80
DRAW = np.random.default_rng(0)
WI, WO = (DRAW.normal(size=s).astype(np.float32) for s in ((E, M, H), (E, H, M)))
X = DRAW.normal(size=(N, M)).astype(np.float32)
# Experts 4 and 5 have no row, expert 3 has one, expert 2 three, the others many.
EXPERT = np.array([[0, 1]] * 8 + [[2, 0], [2, 1], [2, 3], [0, 1]], np.int32)
GATE = DRAW.random((N, K)).astype(np.float32)


def _run(rows, kept=None, wi=WI):
    theta = experts_in_panels.in_panels(NestedMap(wi=tf.constant(wi), wo=tf.constant(WO)))
    kept = np.ones((N, K), np.float32) if kept is None else kept
    args = (tf.constant(x[rows]) for x in (X, EXPERT, kept, GATE))
    return experts_in_panels.feed_forward_of_chosen(*args, theta, H).numpy()


def test_each_token_has_the_sum_of_its_experts():
    kept = np.ones((N, K), np.float32)
    kept[3], kept[9, 0] = 0, 0
    hidden = np.maximum(np.einsum("nm,nkmh->nkh", X, WI[EXPERT]), 0)
    want = np.einsum("nkh,nkhm,nk->nm", hidden, WO[EXPERT], GATE * kept)
    np.testing.assert_allclose(_run(range(N), kept), want, rtol=1e-3, atol=1e-3)


def test_a_token_is_the_same_to_the_bit_whatever_is_beside_it():
    together = _run(range(N))
    for rows in ([10], [0], [8, 9], [7, 10, 11], [11, 3, 0, 1, 2]):
        np.testing.assert_array_equal(_run(rows), together[rows])


def test_experts_that_nobody_chose_are_not_read():
    wi = WI.copy()
    wi[4] = np.nan
    np.testing.assert_array_equal(_run(range(N), wi=wi), _run(range(N)))
    assert _run([]).shape == (0, M)


@pytest.mark.parametrize("name", sorted(ROUTERS))
def test_choices_alone_are_the_choices(name):
    p = ROUTERS[name].Params().Set(name="r", model_dim=M, num_experts=E)
    router = (p.Set(vocab_size=9) if "vocab_size" in p else p).Instantiate()
    x, paddings = tf.constant(X[np.newaxis]), tf.constant([[0.0] * 10 + [1.0] * 2])
    context = NestedMap({need: tf.ones([1, N], tf.int32) for need in type(router).Needs(router.p)})
    with use_mesh(single_device()), running_op_by_op():
        theta = router.InitTheta(make_seed(0, 0))
        whole = router.FProp(theta, x, paddings, None, context=context)
        with choices_alone():
            bare = router.FProp(theta, x, paddings, None, context=context)
    assert whole.metrics and not bare.metrics
    for field in ("expert_index", "gate", "kept"):
        np.testing.assert_array_equal(getattr(bare, field), getattr(whole, field))
