"""The layer over eight devices: the same numbers, and exactly the communication of Algorithm 2."""

import toy_moe
from equivalence import compare


def test_values_gradients_and_collectives():
    layer = toy_moe.layer()
    args, splits = toy_moe.arguments(layer)
    _, collectives = compare(toy_moe.train(layer), args, splits)
    # Tokens to experts and outputs back, and the same for the gradients; the loss, the metrics and the
    # gating weights' gradient are summed. No weight of an expert is gathered.
    assert collectives["all-to-all"] == 4, dict(collectives)
    assert set(collectives) == {"all-to-all", "all-reduce"}, dict(collectives)


def test_inference_over_devices():
    layer = toy_moe.layer()
    args, splits = toy_moe.arguments(layer)

    def infer(theta, x, paddings):
        return layer.FProp(theta, x, paddings)[0]

    _, collectives = compare(infer, args[:3], splits[:3])
    # Rows there and back, and their numbers there.
    assert dict(collectives) == {"all-to-all": 3}
