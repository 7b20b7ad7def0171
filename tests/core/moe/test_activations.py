"""Every activation by its formula: in a dense layer, and in experts on slots and on rows.

Letters: N tokens, E expert, M model, H hidden.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.kernels import tensorflow, xla
from lingvo_moe.core.layers.feed_forward import ACTIVATIONS, FeedForward
from lingvo_moe.core.moe.layer import MoELayer
from lingvo_moe.core.moe.routers.soft import SoftRouter
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.randomness import make_seed
from lingvo_moe.core.sharding import single_device, use_mesh

N, E, M, H = 6, 3, 5, 7


def _gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


FORMULAS: dict[str, Callable] = {
    "identity": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "relu6": lambda x: np.clip(x, 0, 6),
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
    "gelu": _gelu,
    "silu": lambda x: x * _sigmoid(x),
    "geglu": lambda gate, x: _gelu(gate) * x,
    "swiglu": lambda gate, x: gate * _sigmoid(gate) * x,
    "clamped_swiglu": lambda gate, x: (
        np.minimum(gate, 7) * _sigmoid(1.702 * np.minimum(gate, 7)) * (np.clip(x, -7, 7) + 1)
    ),
}


def _weights(seed: int, *experts: int, gated: bool) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"wi": (M, H), "wo": (H, M), **({"wi_gate": (M, H)} if gated else {})}
    return {name: rng.normal(size=(*experts, *s)).astype(np.float32) for name, s in shapes.items()}


def _by_hand(name: str, x: np.ndarray, w: dict[str, np.ndarray]) -> np.ndarray:
    return FORMULAS[name](*(x @ w[each] for each in ACTIVATIONS[name].weights)) @ w["wo"]


@pytest.mark.parametrize("ops", [xla, tensorflow], ids=["xla", "tensorflow"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_dense_layers_and_experts_compute_the_formula(name, ops):
    gated = ACTIVATIONS[name].gated
    x = 3 * np.random.default_rng(0).normal(size=(2, N // 2, M)).astype("float32")
    zeros, seed = tf.zeros([2, N // 2]), make_seed(1, 2)
    dims = {"model_dim": M, "hidden_dim": H}
    dense = FeedForward.Params().Set(name="ffn", activation=name, **dims).Instantiate()
    moe = MoELayer.Params().Set(name="moe", num_experts=E, router=SoftRouter.Params(), **dims)
    moe.experts.activation = name
    with use_mesh(single_device()), kernels.using(ops):
        weights = _weights(1, gated=gated)
        assert {k: v.shape for k, v in weights.items()} == {
            k: tuple(spec.shape) for k, spec in dense.VariableSpecs().items()
        }
        y, _ = dense.FProp(NestedMap(weights), tf.constant(x), zeros)
        np.testing.assert_allclose(y, _by_hand(name, x, weights), rtol=1e-4, atol=1e-4)
        weights = _weights(2, E, gated=gated)
        router = NestedMap(wg=tf.constant(np.random.default_rng(3).normal(size=(M, E)), tf.float32))
        gates = tf.nn.softmax(x @ router.wg).numpy()
        each = [_by_hand(name, x, {k: v[e] for k, v in weights.items()}) for e in range(E)]
        want = sum(gates[..., e, None] * each[e] for e in range(E))
        for dispatcher in ("einsum", "dropless"):
            layer = moe.Set(dispatcher=dispatcher).Instantiate()
            y, _ = layer.FProp(NestedMap(router=router, experts=NestedMap(weights)), x, zeros, seed)
            np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)
