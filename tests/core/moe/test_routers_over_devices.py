"""Routers and the routing levels over eight devices: the same numbers; tokens and gates move only in slots.

Letters: G group, S token in group, E expert, M model.
"""

import numpy as np
import pytest
import tensorflow as tf
from equivalence import compare

from lingvo_moe.core.moe.layer import ROUTERS
from lingvo_moe.core.moe.routers.base import Router
from lingvo_moe.core.nested_map import NestedMap

G, S, M, E, C = 8, 10, 6, 8, 4
TOP2 = {"second_expert_policy": "all"}
ROUTED = {
    "top_k": ("top_k", {"k": 3, "jitter": 0.1, "z_loss_weight": 0.1, "balance_bias": 0.1}),
    "noisy_top_k": ("noisy_top_k", {"k": 2}),
    "expert_choice": ("expert_choice", {}),
    "lsh": ("lsh", {"k": 2}),
    "hash": ("hash", {"k": 2, "vocab_size": 50}),
    "sentence": ("top2", {"level": "sentence", **TOP2}),
    "prioritized": ("top2", {"prioritize_by_gate": True, **TOP2}),
    "id": ("top2", {"level": "id", "vocab_size": 50, **TOP2}),
    "task": ("top2", {"level": "task", "num_tasks": 3, **TOP2}),
}


def _routers() -> dict[str, Router]:
    """The routers by name, all in one program, which is compiled once."""
    dims = {"model_dim": M, "num_experts": E, "activation_split": {"G": "expert"}}
    return {
        key: ROUTERS[name].Params().Set(name=key, **dims, **params).Instantiate()
        for key, (name, params) in ROUTED.items()
    }


@pytest.mark.slow
def test_values_gradients_and_nothing_gathered():
    routers = _routers()
    specs = NestedMap({key: router.VariableSpecs() for key, router in routers.items()})
    rng = np.random.default_rng(0)
    theta = specs.Transform(lambda s: rng.normal(size=s.shape).astype(np.float32) * 0.3)

    def route(theta, x, paddings, seed, ids, segment_ids, task_ids):
        context = NestedMap(ids=ids, segment_ids=segment_ids, task_ids=task_ids)
        out, loss = NestedMap(), tf.constant(0.0)
        weights = [w for w, s in theta.Zip(specs) if s.trainable]
        with tf.GradientTape() as tape:
            tape.watch([x, *weights])
            for key, router in routers.items():
                r = router.FProp(theta[key], x, paddings, C, seed=seed, context=context)
                parts = NestedMap(gate=r.gate, kept=r.kept, index=r.expert_index)
                more = NestedMap(metrics=r.metrics, updates=r.updates)
                out[key] = NestedMap(parts, position=r.position, **more)
                loss += r.aux_loss + tf.reduce_sum(tf.sin(3.0 * r.gate))
        dx, *grads = tape.gradient(loss, [x, *weights])
        return NestedMap(out, dx=dx, grads=grads)

    segments = np.sort(rng.integers(1, 4, (G, S)), 1)
    x = rng.normal(size=(G, S, M)).astype(np.float32)
    paddings = (rng.random((G, S)) < 0.2).astype(np.float32)
    context = [v.astype(np.int32) for v in (rng.integers(0, 50, (G, S)), segments, segments % 3)]
    args = [theta, x, paddings, np.array([3, 4], np.int32), *context]
    rows = ("expert", None)
    splits = [specs, ("expert", None, None), rows, None, rows, rows, rows]
    got, collectives = compare(route, args, splits)
    # Sums over the batch: metrics, and the gradients of gating networks and task embeddings.
    assert set(collectives) == {"all-reduce"}, dict(collectives)
    assert all(np.abs(g).max() > 1e-3 for g in got.grads)
    # Only the best k are searched for, where XLA easily falls back to sorting all experts.
    sorts = [line for line in collectives.hlo.splitlines() if " sort(" in line]
    assert "TopK" in collectives.hlo and all("/prioritized/" in line for line in sorts)
