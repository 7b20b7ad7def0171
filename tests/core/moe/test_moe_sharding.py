"""The layer over eight devices: the same numbers, and exactly the communication of Algorithm 2."""

import toy_moe
from equivalence import compare
from toy_moe import MESH, E, M

from lingvo_moe.analysis.programs.hlo.collective_list import parse_collectives
from lingvo_moe.core.engine.eager.testing import run_sharded


def test_values_gradients_and_collectives():
    layer = toy_moe.layer()
    args, splits = toy_moe.arguments(layer)
    _, collectives = compare(toy_moe.train(layer), args, splits)
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

    _, collectives = compare(infer, args[:3], splits[:3])
    # Rows there and back, and their numbers there.
    assert dict(collectives) == {"all-to-all": 3}
