"""The plan's table of the training state, computed from specs."""

import pytest

from lingvo_moe.analysis.plans import step_plan
from lingvo_moe.analysis.plans.machines.base_machine import PlanError
from lingvo_moe.core.config import registry
from lingvo_moe.core.config.checks import STATE_LEVELS
from lingvo_moe.core.sharding import Mesh

# 7.5 billion parameters, the example of ZeRO's figure 1: Adam in mixed precision on 64 devices.
_SIZES = (
    "task.model_dim=4096;task.hidden_dim=16384;task.num_heads=32;task.key_dim=128;task.num_encoder_layers=17;"
    "task.num_decoder_layers=15;task.source_vocab_size=6208;task.target_vocab_size=6208;input.source_vocab_size=6208;"
    "input.target_vocab_size=6208"
)
_RECIPE = "task.optimizer=adam;task.dtype=bfloat16;task.activation_split={'B':'data'};task.weight_split={}"


def _state(level, mesh="data:64", recipe=_RECIPE):
    override = f"{_SIZES};{recipe};train.shard_state={level}"
    task = registry.GetParams("mt.T96L", override).task.Instantiate()
    request = step_plan.Request("mt.T96L", "v5p:4x4x4", override)
    return step_plan._state(request, task, Mesh.parse(mesh))["state"]


def test_zeros_example():
    """Table 1 and figure 1 of the paper: 120, 31.4, 16.6 and 1.9 GB of state on each of 64 devices."""
    state = _state("none")
    (weights,) = [row for row in state["parts"] if row["part"] == "weights"]
    count = weights["bytes_total"] // 2
    assert count == pytest.approx(7.5e9, rel=1e-3)
    held = {row["shard_state"]: row["bytes"] for row in state["levels"]}
    assert list(held) == list(STATE_LEVELS)
    assert held["none"] == 16 * count
    assert held["slots"] == 4 * count + 12 * count // 64
    assert held["gradients"] == 2 * count + 14 * count // 64
    assert held["weights"] == 16 * count // 64
    assert [round(n / 1e9, 1) for n in held.values()] == [120.0, 31.4, 16.6, 1.9]


@pytest.mark.parametrize(
    "level, copies",
    [("none", (64, 64, 64, 64)), ("gradients", (64, 1, 1, 1)), ("weights", (1,) * 4)],
)
def test_the_copies_of_each_part(level, copies):
    rows = _state(level)["parts"]
    assert [row["part"] for row in rows] == ["weights", "gradients", "master weights", "slots"]
    assert [row["dtype"] for row in rows] == ["bfloat16", "bfloat16", "float32", "float32"]
    assert tuple(row["copies"] for row in rows) == copies


def test_an_offload_that_the_compiler_does_not_carry_out_is_refused():
    moved = {"needed": 3 * 2**30, "host_arguments": 2**20}
    step_plan.check_offloaded("slots", moved, "v5p:2x2x1")
    step_plan.check_offloaded("none", {"needed": 1}, "v5p:2x2x1")
    told = r"train.offload=slots: frees nothing on v5p:2x2x1.* 3.00 GiB on each device"
    with pytest.raises(PlanError, match=told):
        step_plan.check_offloaded("slots", moved | {"host_arguments": 0}, "v5p:2x2x1")
