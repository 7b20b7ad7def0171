"""What a task's parameters could do for a plan that does not fit, from specs; nothing is compiled."""

import pytest

from lingvo_moe.core.config import registry
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.task.inspect import bytes_per_device
from lingvo_moe.planning import fitting

MIB = 2**20
# 4 blocks; 64 x 16 tokens on either side, 128 of them on each of 8 devices, of 32 numbers.
SIZES = (
    "task.num_encoder_layers=4;task.num_decoder_layers=4;task.num_experts=0;task.optimizer=adam;input.batch_size=64;"
    "task.model_dim=32;input.source_length=16;input.target_length=16"
)
CARRIES = 2 * 4 * 128 * 32 * 4


def _advice(override="", missing=1.0, activations=0, mesh="expert:8"):
    """The sentences for M4Tiny, whose peak has its state, all gradients, and so many bytes of float32 activations.

    `missing`: the share of these that does not fit.
    """
    params = registry.GetParams("mt.M4Tiny", f"{SIZES};{override}")
    state = params.task.Instantiate().StateSpecs()
    on = Mesh.parse(mesh)
    weights, slots = (
        sum(bytes_per_device(spec, on) for spec in part.Flatten())
        for part in (state.theta, state.slots)
    )
    kinds = {"weights": weights, "slots": slots, "gradients": weights, "activations": activations}
    memory = {
        "kinds": kinds | {"temporaries": 0},
        "float32": {"activations": activations, "temporaries": 0},
        "misses_by": int(missing * sum(kinds.values())),
    }
    return fitting.advice(memory, params.task, params, on)


def test_one_parameter_is_enough():
    less, enough = _advice(missing=0.1)
    for name in ("slots", "gradients", "weights"):
        assert f"train.shard_state={name}" in less and f"train.shard_state={name}" in enough
    assert "train.offload=slots" in enough
    assert "train.offload=master" not in less  # there are none
    assert "task.remat" not in less  # it recomputes already


def test_two_parameters_are_enough():
    _, together = _advice(missing=0.8)
    assert together.startswith("None of them alone makes it fit. By estimate ")
    assert "train.shard_state=weights and task.dtype=bfloat16 together do" in together


def test_no_parameter_is_enough():
    _, none = _advice()
    assert none.startswith(
        "None of task.dtype, task.fprop_dtype, train.offload, train.shard_state makes it fit, nor do they together"
    )


def test_what_is_there_already_is_not_proposed():
    found = _advice("train.shard_state=gradients;task.fprop_dtype=bfloat16")
    assert "train.shard_state=weights" in found[0] and "shard_state=slots" not in found[0]
    assert "task.fprop_dtype" not in " ".join(found)
    assert "shard_state" not in " ".join(_advice(mesh="expert:1"))


@pytest.mark.parametrize(
    "override, name",
    [
        ("task.remat=dots", "task.remat=full"),
        ("task.repeat=False", "task.repeat=True"),
    ],
)
def test_recomputation_keeps_the_inputs_of_blocks(override, name):
    (less, *_) = _advice(override, activations=8 * MIB)
    (saved,) = [part for part in less.split(", ") if name in part]
    assert f"{(8 * MIB - CARRIES) / MIB:.1f}" in saved
