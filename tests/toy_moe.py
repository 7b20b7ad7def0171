"""A small MoE layer on eight devices, whose groups and experts are sharded, for tests of what it communicates.

Letters: B batch, T time, M model, H hidden, E expert.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from equivalence import with_gradients

from lingvo_moe.analysis.plans import tables
from lingvo_moe.analysis.plans.machines.machine import parse_machine
from lingvo_moe.analysis.plans.work.costs import costs
from lingvo_moe.analysis.programs.aot import aot
from lingvo_moe.analysis.programs.hlo.module import parse_module
from lingvo_moe.analysis.programs.hlo.parts import Layers
from lingvo_moe.core.engine.lowering.lowering import lower
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.moe.layer import MoELayer
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.randomness import make_seed
from lingvo_moe.core.sharding import Mesh, single_device, use_mesh

B, T, M, H, E = 16, 12, 8, 24, 16
MESH = Mesh.parse("expert:8")
ROWS = ("expert", None, None)
SPLITS = {
    "activation_split": {"B": "expert", "G": "expert", "E": "expert"},
    "weight_split": {"E": "expert"},
}


def layer(**params) -> MoELayer:
    """A layer with eight groups; `params` override the others."""
    p = MoELayer.Params().Set(
        name="moe",
        model_dim=M,
        hidden_dim=H,
        num_experts=E,
        num_groups=8,
        capacity_factor=1.0,
        min_capacity=1,
        **SPLITS,
    )
    return p.Set(**params).Instantiate()


def train(moe: MoELayer) -> Callable:
    """Returns a function of `arguments` that gives the layer's results, and the gradients of theta and inputs."""

    def run(theta, x, paddings, seed):
        def loss(theta, x):
            y, extras = moe.FProp(theta, x, paddings, seed=seed)
            return tf.reduce_sum(y * tf.sin(x)) + extras.aux_loss, (y, extras)

        return with_gradients(loss)(theta, x)

    return run


def eagerly(fn: Callable, args: list) -> Any:
    """The reference, without a compiler."""
    with use_mesh(single_device()):
        return fn(*[tf.nest.map_structure(tf.constant, arg) for arg in args])


def differentiated(moe: MoELayer, metrics: bool = True) -> Callable[..., NestedMap]:
    """Returns a function of `arguments` that gives the layer's results, if need be without metrics, and gradients."""

    def run(theta, x, paddings, seed):
        weights = theta.Flatten()
        with tf.GradientTape() as tape:
            tape.watch([x, *weights])
            y, extras = moe.FProp(theta, x, paddings, seed=seed)
            loss = tf.reduce_sum(tf.cast(y, x.dtype) * tf.sin(x)) + extras.aux_loss
        dx, *grads = tape.gradient(loss, [x, *weights])
        extras = extras if metrics else extras.aux_loss
        return NestedMap(y=y, extras=extras, dx=dx, grads=theta.Pack(grads))

    return run


def assert_close(got: NestedMap, want: NestedMap, values: float = 1e-5) -> None:
    """Asserts that values and gradients are equal up to a share of the tensor's largest number, 1e-4 for gradients."""
    for (path, a), b in zip(got.FlattenItems(), want.Flatten(), strict=True):
        scale = max(float(np.abs(b).max()), 1e-3)
        tolerance = 1e-4 if path.startswith(("dx", "grads")) else values
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale, err_msg=path)


def arguments(moe: MoELayer) -> tuple[list, list]:
    """Theta, inputs [B,T,M], paddings [B,T] and a seed; and their shardings in training."""
    with use_mesh(single_device()):
        theta = moe.InitTheta(make_seed(0, 0))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(B, T, M)).astype(np.float32)
    paddings = (rng.random((B, T)) < 0.2).astype(np.float32)
    seed = np.array([3, 4], np.int32)
    return [theta, x, paddings, seed], [moe.VariableSpecs(), ROWS, ROWS[:2], None]


def planned_collectives(topology: str) -> list[dict]:
    """The collectives of the layer's forward pass, as a plan for eight devices of a machine has them."""
    moe = layer()

    def forward(theta, x, paddings):
        return moe.FProp(theta, x, paddings)[0]

    rows = [TensorSpec((B, T, M), "float32", ROWS), TensorSpec((B, T), "float32", ROWS[:2])]
    compiled = aot.compile_for_topology(
        lower(forward, [moe.VariableSpecs(), *rows], MESH), topology
    )
    found = costs(parse_module(compiled.hlo_text), Layers(moe.DeclaredParts()))
    return tables.collectives(found, parse_machine(topology))
