"""The depths of GPipe's table 1: numbers of parameters, bytes, and what a core has of them."""

import pytest

from lingvo_moe.core.config import registry
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.task.inspect import bytes_per_device, count_parameters

# The paper's table: experiment, layers, cores, parameters in millions, their last digit, bytes a parameter.
TABLE = [
    ("lm.GPipe13L", 3, 1, 282.2, 0.1),
    ("lm.GPipe13L", 13, 1, 785.8, 0.1),
    ("lm.GPipe103L", 103, 8, 5_300, 100),
    ("lm.GPipe415L", 415, 32, 21_000, 100),
    ("lm.GPipe1663L", 1663, 128, 83_900, 100),
]
M, H, V = 2048, 8192, 32_000


def _specs(name, layers):
    params = registry.GetParams(name, f"task.num_layers={layers}")
    return params, params.task.Instantiate()


@pytest.mark.parametrize("name, layers, cores, millions, digit", TABLE)
def test_parameters_are_the_paper_s_but_for_biases(name, layers, cores, millions, digit):
    """The table's figures come out to their last digit with biases in each projection and in the softmax."""
    params, task = _specs(name, layers)
    ours = count_parameters(task.VariableSpecs().Flatten())
    norms = 2 * 2 * M
    assert ours == layers * (12 * M**2 + norms) + 2 * M + 2 * V * M
    biases = layers * (4 * M + H + M) + V
    assert abs((ours + biases) / 1e6 - millions) <= digit / 2
    assert 0 < biases / ours < 6e-4
    assert params.task.pipeline.stages == Mesh.parse(params.train.mesh).size == cores


@pytest.mark.parametrize("name, layers, cores, millions, digit", TABLE[1:])
def test_the_experiments_have_the_depths_of_the_table(name, layers, cores, millions, digit):
    params = registry.GetParams(name)
    assert params.task.num_layers == layers
    assert params.input.batch_size == 32 and params.input.target_length == 1024
    ours = count_parameters(params.task.Instantiate().VariableSpecs().Flatten())
    assert f"; {ours:,} parameters here" in registry.GetExperiment(name).__doc__


def test_a_parameter_takes_12_bytes():
    _, task = _specs("lm.GPipe13L", 13)
    state, mesh = task.StateSpecs(), Mesh.parse("stage:1")
    held = sum(bytes_per_device(spec, mesh) for spec in state.Flatten())
    counters = 2 * 4
    assert held == 12 * count_parameters(task.VariableSpecs().Flatten()) + counters


def test_a_core_has_its_layers_and_its_share_of_the_vocabulary():
    """13 layers a core in a model of 1,664."""
    params, task = _specs("lm.GPipe1663L", 1664)
    mesh = Mesh.parse(params.train.mesh)
    specs = task.VariableSpecs().Flatten()
    held = sum(bytes_per_device(spec, mesh) for spec in specs)
    assert held == 4 * (13 * (12 * M**2 + 4 * M) + 2 * M + 2 * V // 128 * M)
