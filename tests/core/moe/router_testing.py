"""Helpers for the tests of routers: making one, its routing as NumPy, and what every routing must satisfy.

Letters: G group, S token in group, k choice rank, E expert, M model.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_moe.core.moe.layer import ROUTERS
from lingvo_moe.core.moe.routers.base import LearnedRouter, Router, Routing, real_tokens
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.randomness import make_seed
from lingvo_moe.core.sharding import single_device, use_mesh

SEED = make_seed(3, 4)


def router(name: str, model_dim: int, num_experts: int, **params: Any) -> Router:
    p = ROUTERS[name].Params().Set(name="router", model_dim=model_dim, num_experts=num_experts)
    return p.Set(**params).Instantiate()


def route(
    layer: Router, x_GSM: Any, paddings_GS: Any, capacity: int | None, **kwargs: Any
) -> Routing:
    """FProp on one device, with weights of a fixed seed unless `theta` is given."""
    with use_mesh(single_device()):
        theta = kwargs.pop("theta", None)
        theta = layer.InitTheta(make_seed(1, 0)) if theta is None else theta
        context = kwargs.pop("context", None)
        if context is not None:
            context = NestedMap({k: tf.constant(v, tf.int32) for k, v in context.items()})
        x, paddings = tf.constant(x_GSM, tf.float32), tf.constant(paddings_GS, tf.float32)
        return layer.FProp(theta, x, paddings, capacity, context=context, **kwargs)


def route_logits(
    layer: LearnedRouter,
    logits_GSE: Any,
    paddings_GS: Any = None,
    capacity: int | None = None,
    seed: tf.Tensor | None = None,
    *more: Any,
) -> Routing:
    """The routing by the gating network's logits; `more` are the router's own arguments of ChooseByLogits."""
    logits_GSE = tf.convert_to_tensor(logits_GSE, tf.float32)
    paddings_GS = np.zeros(logits_GSE.shape[:2]) if paddings_GS is None else paddings_GS
    with use_mesh(single_device()):
        real_GS = real_tokens(tf.constant(paddings_GS))
        return layer.Seat(
            layer.ChooseByLogits(logits_GSE, real_GS, capacity, seed, *more), capacity
        )


def check(routing: Routing, paddings_GS: Any) -> None:
    """Checks what dispatchers rely on; see `Routing`."""
    index, gate, is_kept = (v.numpy() for v in (routing.expert_index, routing.gate, routing.kept))
    real = 1 - np.asarray(paddings_GS)
    assert index.dtype == np.int32 and gate.dtype == is_kept.dtype == np.float32
    assert ((index >= 0) & (index < routing.num_experts)).all()
    assert set(np.unique(is_kept)) <= {0.0, 1.0}
    assert not is_kept[real == 0].any(), "padding is routed"
    assert not gate[is_kept == 0].any()
    for row in index.reshape(-1, index.shape[-1]):
        assert len(set(row.tolist())) == row.size, "a token's experts must differ"
    if routing.capacity is None:
        assert (is_kept == real[..., None]).all()
        return
    position = routing.position.numpy()
    for g in range(index.shape[0]):
        at = is_kept[g] > 0
        seats = list(zip(index[g][at].tolist(), position[g][at].tolist()))
        assert len(set(seats)) == len(seats), "two in one slot"
        assert all(0 <= seat < routing.capacity for _, seat in seats)
