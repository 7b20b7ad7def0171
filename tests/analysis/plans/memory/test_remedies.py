"""The parameters that would make a step fit: estimates by hand-made sizes, the sentences, and a task's choices."""

from dataclasses import replace

import pytest

from lingvo_moe.analysis.plans.memory.remedies import Remedy, advice, saved
from lingvo_moe.analysis.plans.memory.state import held
from lingvo_moe.analysis.plans.memory.step_bytes import StateSize
from lingvo_moe.core.config import registry
from lingvo_moe.core.sharding import Mesh

_GIB = 2**30
NOW = Remedy(
    {}, StateSize(weights=4 * _GIB, slots=8 * _GIB, gradients=4 * _GIB), weight_size=4, narrow=False
)
KINDS = {"weights": 4, "slots": 8, "gradients": 3, "weight_copies": 1, "activations": 6}
MEMORY = {
    "kinds": {kind: n * _GIB for kind, n in (KINDS | {"temporaries": 2}).items()},
    "float32": {"activations": 4 * _GIB, "temporaries": _GIB},
    "misses_by": 5 * _GIB,
}


def _choice(name="a", value="1", changes=None, **other):
    """The choice NOW with other figures, of which some are the state's."""
    changed = {key: other.pop(key) for key in list(other) if hasattr(NOW.state, key)}
    return replace(
        NOW, changes=changes or {name: value}, state=replace(NOW.state, **changed), **other
    )


@pytest.mark.parametrize("changes, gib", [
    ({}, 0),
    ({"slots": _GIB}, 7),
    # Of 4 GiB of gradients 3 are live at the peak; copies of weights are a quarter of these.
    ({"weights": 2 * _GIB, "gradients": _GIB}, 2 + 3 * 3 / 4 + 0.5),
    # The new weights take the place of the gradients.
    ({"slots": _GIB, "gradients": 0, "written": 4 * _GIB}, 7),
    ({"weights": 2 * _GIB, "at_once": _GIB}, 2 + 0.5 - 1),
    # Half of what is float32, less a copy of the weights of 2 GiB instead of 1.
    ({"narrow": True}, 2.5 - 1),
    ({"narrow": True, "weights": 2 * _GIB, "weight_size": 2}, 2.5 + 2 + 0.5),
    ({"carries": _GIB}, 5),
    ({"carries": _GIB, "narrow": True}, 5 + 0.5 - 1),
])  # fmt: skip
def test_bytes_that_a_choice_saves(changes, gib):
    assert saved(MEMORY, NOW, _choice(**changes)) == gib * _GIB


def test_without_a_schedule_gradients_are_among_the_temporaries():
    kinds = {"weights": 4 * _GIB, "slots": 8 * _GIB, "temporaries": 9 * _GIB}
    other = _choice(gradients=_GIB)
    assert saved({"kinds": kinds}, NOW, other) == 3 * _GIB


# --- a task's choices

MIB = 2**20
# 4 blocks; 64 x 16 tokens on either side, 128 of them on each of 8 devices, of 32 numbers.
SIZES = (
    "task.num_encoder_layers=4;task.num_decoder_layers=4;task.num_experts=0;task.optimizer=adam;input.batch_size=64;"
    "task.model_dim=32;input.source_length=16;input.target_length=16"
)
CARRIES = 2 * 4 * 128 * 32 * 4


def _advice(override="", missing=0.1, activations=0, mesh="expert:8"):
    """The sentences for M4Tiny, whose peak has its state, all gradients, and so many bytes of float32 activations.

    `missing`: the share of these that does not fit.
    """
    params = registry.GetParams("mt.M4Tiny", f"{SIZES};{override}")
    on = Mesh.parse(mesh)
    state = held(params.task.Instantiate(), on)
    kinds = {"weights": state.weights, "slots": state.slots, "gradients": state.weights}
    kinds["activations"] = activations
    memory = {
        "kinds": kinds | {"temporaries": 0},
        "float32": {"activations": activations, "temporaries": 0},
        "misses_by": int(missing * sum(kinds.values())),
    }
    return advice(memory, params.task, params, on)


def test_one_parameter_is_enough():
    less, enough = _advice()
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
    _, none = _advice(missing=1.0, mesh="expert:1")
    assert none.startswith(
        "None of task.dtype, task.fprop_dtype, train.offload makes it fit, nor do they together"
    )


def test_what_is_there_already_is_not_proposed():
    found = _advice("train.shard_state=gradients;task.fprop_dtype=bfloat16")
    assert "train.shard_state=weights" in found[0] and "shard_state=slots" not in found[0]
    assert "task.fprop_dtype" not in " ".join(found)
    assert "shard_state" not in " ".join(_advice(mesh="expert:1"))


@pytest.mark.parametrize(
    "override, name",
    [("task.remat=dots", "task.remat=full"), ("task.repeat=False", "task.repeat=True")],
)
def test_recomputation_keeps_the_inputs_of_blocks(override, name):
    (less, *_) = _advice(override, activations=8 * MIB)
    (saved,) = [part for part in less.split(", ") if name in part]
    assert f"{(8 * MIB - CARRIES) / MIB:.1f}" in saved
