"""The layer over eight devices: the same numbers, and exactly the communication of Algorithm 2."""

import numpy as np
import pytest
import tensorflow as tf
import toy_moe
from toy_moe import MESH, E, M

from lingvo_moe.core.engine.collectives import parse_collectives
from lingvo_moe.core.engine.eager.testing import run_sharded, run_single
from lingvo_moe.core.moe.layer import MoELayer
from lingvo_moe.core.nested_map import NestedMap


def _close(got, want, **tolerance) -> None:
    assert [p for p, _ in got.FlattenItems()] == [p for p, _ in want.FlattenItems()]
    for (path, a), b in zip(got.FlattenItems(), want.Flatten()):
        np.testing.assert_allclose(a, b, err_msg=path, **tolerance)


def _train(layer: MoELayer):
    def train(theta, x, paddings, seed):
        weights = theta.Flatten()
        with tf.GradientTape() as tape:
            tape.watch([x, *weights])
            y, extras = layer.FProp(theta, x, paddings, seed=seed)
            loss = tf.reduce_sum(y * tf.sin(x)) + extras.aux_loss
        dx, *grads = tape.gradient(loss, [x, *weights])
        return NestedMap(y=y, extras=extras, dx=dx, grads=theta.Pack(grads))

    return train


@pytest.mark.parametrize(
    "params",
    [
        pytest.param({}, id="overflow"),
        pytest.param({"num_groups": 16, "num_experts": 8}, id="two groups a device"),
        pytest.param({"num_groups": 16, "capacity_factor": 16.0}, id="room for all"),
    ],
)
def test_values_gradients_and_collectives(params):
    layer = toy_moe.layer(**params)
    args, splits = toy_moe.arguments(layer)
    train = _train(layer)
    got, collectives = run_sharded(train, args, MESH, splits)
    _close(got, run_single(train, args), rtol=1e-4, atol=1e-5)
    # Tokens to experts and outputs back, and the same for the gradients; the loss, the metrics and the
    # gating weights' gradient are summed. No weight of an expert is gathered.
    assert collectives["all-to-all"] == 4, dict(collectives)
    assert set(collectives) == {"all-to-all", "all-reduce"}, dict(collectives)


def test_forward_crosses_twice_with_the_slots_alone():
    """Each device sends E C M numbers of its group each way, and no weights."""
    layer = toy_moe.layer()
    args, splits = toy_moe.arguments(layer)

    def forward(theta, x, paddings, seed):
        return layer.FProp(theta, x, paddings, seed=seed)[0]

    _, collectives = run_sharded(forward, args, MESH, splits)
    capacity = 2  # ceil(24 / 16)
    sent = [(c.kind, c.num_bytes) for c in parse_collectives(collectives.hlo)]
    assert sent == [("all-to-all", 4 * E * capacity * M)] * 2


def test_inference_over_devices():
    layer = toy_moe.layer()
    args, splits = toy_moe.arguments(layer)

    def infer(theta, x, paddings):
        return layer.FProp(theta, x, paddings)[0]

    got, collectives = run_sharded(infer, args[:3], MESH, splits[:3])
    np.testing.assert_allclose(got, run_single(infer, args[:3]), rtol=1e-4, atol=1e-6)
    # Rows there and back, and their numbers there.
    assert dict(collectives) == {"all-to-all": 3}
