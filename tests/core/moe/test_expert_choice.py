"""Expert choice: cases by hand, loops, ties and padding, gradients, inference.

Letters: G group, S token in group, E expert, M model, C capacity slot.
"""

import moe_reference
import numpy as np
import tensorflow as tf
from hypothesis import given, settings, strategies as st
from router_testing import SEED, check, route, router

from lingvo_moe.core.nested_map import NestedMap


def _logits(gates) -> np.ndarray:
    return np.log(np.array(gates, np.float32))


def _route(logits_GSE, paddings_GS, capacity, **params):
    """Routes with the identity as gating network: tokens are their own logits."""
    E = logits_GSE.shape[-1]
    layer = router("expert_choice", E, E, **params)
    theta = NestedMap(wg=tf.eye(E))
    return route(layer, logits_GSE, paddings_GS, capacity, theta=theta, seed=SEED)


def _brute_force(gates_GSE, real_GS, capacity):
    kept = np.zeros_like(gates_GSE)
    for g, e in np.ndindex(gates_GSE.shape[0], gates_GSE.shape[2]):
        real = [s for s in range(gates_GSE.shape[1]) if real_GS[g, s]]
        for s in sorted(real, key=lambda s: (-gates_GSE[g, s, e], s))[:capacity]:
            kept[g, s, e] = 1
    return kept


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 7), st.sampled_from([2, 3, 5]), st.booleans())
def test_equals_sorting_each_experts_tokens(seed, capacity, num_experts, coarse):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(2, 7, num_experts)).astype(np.float32)
    if coarse:  # ties
        logits = np.round(logits)
    paddings = (rng.random((2, 7)) < 0.3).astype(np.float32)
    routing = _route(logits, paddings, capacity)
    check(routing, paddings)
    gates = tf.nn.softmax(logits).numpy()
    want = _brute_force(gates, 1 - paddings, capacity)
    np.testing.assert_array_equal(routing.kept, want)
    np.testing.assert_array_equal(routing.expert_index[0, 0], np.arange(num_experts))
    in_order = np.cumsum(want, 1) - 1
    np.testing.assert_array_equal(routing.position.numpy()[want > 0], in_order[want > 0])
    assert routing.aux_loss == 0
    np.testing.assert_allclose(routing.gate, gates * want, rtol=1e-6)


def test_in_inference_tokens_choose_alone():
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(2, 5, 4)).astype(np.float32)
    paddings = np.zeros((2, 5))
    paddings[1, 3:] = 1
    together = _route(logits, paddings, None, inference_k=3)
    check(together, paddings)
    order = np.argsort(-logits, -1)[..., :3]
    np.testing.assert_array_equal(together.expert_index, order)
    gates = np.take_along_axis(moe_reference.softmax(logits), order, -1)
    np.testing.assert_allclose(together.gate, gates * (1 - paddings)[..., None], rtol=1e-5)
    alone = _route(logits[1:, 2:3], paddings[1:, 2:3], None, inference_k=3)
    np.testing.assert_allclose(alone.gate[0, 0], together.gate[1, 2], rtol=1e-6)
