"""Every recorded plan of the paper's models has the parameters and the operations that the code gives them now."""

from pathlib import Path

import pytest

from lingvo_moe.core.config import registry
from lingvo_moe.core.task.inspect import count_parameters
from lingvo_moe.reproduction import goldens
from lingvo_moe.reproduction.requests import REQUESTS

PLANS = goldens.read_all(Path(__file__).parents[2] / "docs" / "plans", REQUESTS)
# One plan of each experiment: machines change neither figure.
COUNTED = {(p["model"], p["override"]): n for n, p in PLANS.items() if "parameters" in p}
TRAINED = [
    name
    for name, plan in PLANS.items()
    if plan["what"] == "train" and "M4MoE" in plan["model"] and plan.get("work")
    if "host" not in plan and "Pipe" not in plan["model"]
]


@pytest.mark.parametrize("name", COUNTED.values())
def test_parameters_are_those_of_the_experiment_to_the_unit(name):
    plan = PLANS[name]
    task = registry.GetParams(plan["model"], plan["override"]).task.Instantiate()
    count = count_parameters(task.VariableSpecs().Flatten())
    assert plan["parameters"]["count"] == count
    size = 2 if task.p.dtype == "bfloat16" else 4
    assert plan["parameters"]["bytes_total"] == size * count


@pytest.mark.parametrize("name", TRAINED)
def test_forward_operations_are_the_hand_count_of_the_einsums(name):
    plan = PLANS[name]
    params = registry.GetParams(plan["model"], plan["override"])
    parts = params.task.Instantiate().Costs().FlopsByPart(params.input.Instantiate().BatchSpec())
    hand = sum(parts.values()) / plan["topology"]["devices"]
    forward = sum(row["flops"] for row in plan["work"] if row["phase"] == "forward")
    assert forward == pytest.approx(hand, rel=0.02)
