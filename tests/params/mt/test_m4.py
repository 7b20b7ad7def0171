"""The paper's family: the sizes that its docstrings state are the sizes of its specs."""

import re

import pytest

from lingvo_moe.core import inspect, registry
from params.mt import m4

_FAMILY = sorted(
    name for name in registry.AllNames("mt") if issubclass(registry.GetExperiment(name), m4.M4Base)
)


def test_the_family_is_the_papers_table():
    assert [
        f"mt.M4MoE{size}"
        for size in ("128E12L", "128E36L", "2048E12L", "2048E36L", "2048E60L", "512E12L", "512E36L")
    ] == _FAMILY


@pytest.mark.parametrize("name", _FAMILY)
def test_docstrings_state_the_exact_count(name):
    doc = registry.GetExperiment(name).__doc__
    experts, layers, stated = re.match(
        r"MoE\((\d+)E, (\d+)L\): [\d.]+[BT]; ([\d,]+) parameters here", doc
    ).groups()
    params = registry.GetParams(name).task
    assert params.num_experts == int(experts)
    assert params.num_encoder_layers + params.num_decoder_layers == int(layers)
    specs = params.Instantiate().VariableSpecs().Flatten()
    assert f"{inspect.count_parameters(specs):,}" == stated


@pytest.mark.parametrize("name", _FAMILY)
def test_a_step_divides_over_the_papers_cores(name):
    params = registry.GetParams(name)
    cores = int(re.search(r"(\d+) cores", registry.GetExperiment(name).__doc__)[1])
    assert params.task.num_groups == cores
    tokens = params.input.batch_size * params.input.target_length
    assert tokens == {2048: 4, 512: 1, 128: 1}[cores] * 2**20
    assert params.input.batch_size % cores == 0 and params.task.num_experts % cores == 0
