"""The paper's models: the sizes in their docstrings equal those of the specs and of a closed formula.

Letters: M model, H hidden, N head, K key, E expert, V vocabulary, L layer.
"""

import re

import pytest

from lingvo_moe.core.config import registry
from lingvo_moe.core.pipeline.schedule import STAGE
from lingvo_moe.core.sharding import Mesh, ShardingError
from lingvo_moe.core.task import inspect
from lingvo_moe.core.task.meshes import check_divisible, make_mesh
from lingvo_moe.params.mt import dense, m4

_FAMILY = sorted(
    name
    for name in registry.AllNames("mt")
    if registry.GetExperiment(name).__module__ in (m4.__name__, dense.__name__)
)
_MOE = [n for n in _FAMILY if not issubclass(registry.GetExperiment(n), dense.DenseBase)]


def _parameters(p) -> int:
    """The number of parameters, by hand.

    An attention has 4 M N K, a feed-forward 2 M H, and there are no biases; an MoE has E of those
    and a gate, M E. A normalisation (2 M) stands before each of the 2 or 3 parts of a layer and
    after each stack. The output shares the target embedding's V M.
    """
    M, H, N, K, E = p.model_dim, p.hidden_dim, p.num_heads, p.key_dim, p.num_experts
    attention, feed_forward, norm = 4 * M * N * K, 2 * M * H, 2 * M
    moe = E * feed_forward + M * E
    total = (p.source_vocab_size + p.target_vocab_size) * M
    for L, attentions in ((p.num_encoder_layers, 1), (p.num_decoder_layers, 2)):
        num_moe = L // 2 if E else 0
        total += L * (attentions * attention + (attentions + 1) * norm) + norm
        total += (L - num_moe) * feed_forward + num_moe * moe
    return total


def test_the_family_is_the_papers_table():
    sizes = {f"mt.M4MoE{E}E{L}L" for E in (128, 512, 2048) for L in (12, 36, 60)}
    others = {"mt.M4MoE2048E36LPipe2", "mt.M4MoE2048E36LPipe4", "mt.M4MoE2048E60LSharded"}
    assert set(_MOE) == sizes | others
    assert set(_FAMILY) == sizes | others | {"mt.T96L", "mt.T96LPipe8", "mt.Bilingual"}


@pytest.mark.parametrize("name", _FAMILY)
def test_docstrings_state_the_exact_count(name):
    doc = registry.GetExperiment(name).__doc__
    experts, layers, stated = re.match(
        r"(?:MoE|T)\((?:(\d+)E, )?(\d+)L\): [\d.]+[BT]; ([\d,]+) parameters here", doc
    ).groups()
    params = registry.GetParams(name).task
    assert params.num_experts == int(experts or 0)
    assert params.num_encoder_layers + params.num_decoder_layers == int(layers)
    specs = params.Instantiate().VariableSpecs().Flatten()
    assert f"{inspect.count_parameters(specs):,}" == stated
    assert inspect.count_parameters(specs) == _parameters(params)


@pytest.mark.parametrize("name", _FAMILY)
def test_the_size_in_billions_is_the_papers(name):
    """Within 8%: the paper rounds, and hardly says what it counts."""
    doc = registry.GetExperiment(name).__doc__
    number, unit = re.search(r": ([\d.]+)([BT]);", doc).groups()
    ours = _parameters(registry.GetParams(name).task)
    assert ours == pytest.approx(float(number) * {"B": 1e9, "T": 1e12}[unit], rel=0.08)


@pytest.mark.parametrize("name", _FAMILY)
def test_a_step_divides_over_the_cores(name):
    params = registry.GetParams(name)
    cores = int(re.search(r"(\d+)\s+cores", registry.GetExperiment(name).__doc__)[1])
    mesh = Mesh.parse(params.train.mesh)
    assert mesh.size == cores
    check_divisible(params, params.task.Instantiate(), mesh)
    tokens = params.input.batch_size * params.input.target_length
    assert tokens == {2048: 2**22, 512: 2**20, 128: 2**20, 8: 2**16}[cores]
    if name in _MOE:
        stages = (STAGE,) if params.task.pipeline.stages > 1 else ()
        rest = ("core",) if params.train.shard_state != "none" else ()
        assert mesh.axis_names == (*stages, "expert", *rest)
        assert params.task.num_groups == cores
    if STAGE in mesh.axis_names:
        with pytest.raises(ShardingError, match=f"need a multiple of {mesh.shape[1]} devices"):
            make_mesh(params, num_devices=8)
    else:  # On fewer devices the first axis shrinks.
        eight = make_mesh(params, num_devices=8)
        assert eight.size == 8 and eight.shape[1:] == mesh.shape[1:]
    assert make_mesh(params) == mesh
    assert make_mesh(params, "expert:4", 8) == Mesh.parse("expert:4")
