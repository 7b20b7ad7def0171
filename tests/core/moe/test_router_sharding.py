"""Learned routers over eight devices: the same numbers and gradients, and nothing is gathered."""

import numpy as np
import pytest
import tensorflow as tf
from equivalence import compare

from lingvo_moe.core.moe.layer import ROUTERS
from lingvo_moe.core.nested_map import NestedMap

G, S, M, E = 16, 10, 6, 12


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("top_k", {"k": 3, "jitter": 0.1, "z_loss_weight": 0.1, "balance_bias": 0.1}),
        ("noisy_top_k", {"k": 2}),
    ],
)
def test_values_gradients_and_collectives(name, params):
    p = (
        ROUTERS[name]
        .Params()
        .Set(name="router", model_dim=M, num_experts=E, activation_split={"G": "expert"}, **params)
    )
    router = p.Instantiate()
    rng = np.random.default_rng(0)
    theta = router.VariableSpecs().Transform(
        lambda spec: rng.normal(size=spec.shape).astype(np.float32) * 0.3
    )
    x = rng.normal(size=(G, S, M)).astype(np.float32)
    paddings = (rng.random((G, S)) < 0.2).astype(np.float32)

    def route(theta, x, paddings, seed):
        trained = [
            w for w, s in zip(theta.Flatten(), router.VariableSpecs().Flatten()) if s.trainable
        ]
        with tf.GradientTape() as tape:
            tape.watch([x, *trained])
            r = router.FProp(theta, x, paddings, 4, seed=seed)
            loss = r.aux_loss + tf.reduce_sum(tf.sin(r.gate * 3.0))
        grads = tape.gradient(loss, [x, *trained])
        parts = NestedMap(gate=r.gate, kept=r.kept, index=r.expert_index, position=r.position)
        return NestedMap(parts, grads=grads, metrics=r.metrics, updates=r.updates)

    args = [theta, x, paddings, np.array([3, 4], np.int32)]
    splits = [router.VariableSpecs(), ("expert", None, None), ("expert", None), None]
    _, collectives = compare(route, args, splits)
    # Sums over the batch: losses, metrics, the weights' gradients.
    assert set(collectives) == {"all-reduce"}, dict(collectives)
    # Only the best k are searched for. XLA easily falls back to sorting all experts: see moe/choice.py.
    assert "TopK" in collectives.hlo and " sort(" not in collectives.hlo
