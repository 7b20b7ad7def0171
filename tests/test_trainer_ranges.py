"""Sizes that a mesh does not divide, and runs that do not fit the memory: refused by parameter, value and remedy."""

import pytest

from lingvo_moe.core.config import registry
from lingvo_moe.core.sharding import Mesh, single_device
from lingvo_moe.core.task.meshes import check_divisible, check_state_is_sharded
from lingvo_moe.training.checks import UsageError
from lingvo_moe.training.memory import Share, check_memory

GiB = 2**30
_IMAGES = "image.ResNet50Classes130K"
# Three stages of a network of images, and where they are.
_CELLS = "task.pipeline.stages=3;task.pipeline.micro_batches=2;task.optimizer=adam"
_STAGES = "task.weight_split={'Z': 'stage'}"
_TWO_STAGES = "task.pipeline.stages=2;task.pipeline.micro_batches=4"
_TWO_PARTS = "train.num_micro_batches=2"
_ON_EXPERTS = "task.activation_split={'E': 'expert'}"


@pytest.mark.parametrize(("model", "mesh", "override", "expected"), [
    (_IMAGES, "data:8", "task.num_classes=1001", "num_classes=1001 does not divide over the 8 "),
    (_IMAGES, "data:8", "task.head.weight_split={'V': 'modle'}",
     "task.head.weight_split: 'V' is sharded along 'modle', and mesh data:8 has no axis 'modle'"),
    (_IMAGES, "data:8", "task.network.base_channels=6;task.network.weight_split={'O': 'data'}",
     "variable network.stage_0.stages[0].convolve.conv.w: O=6 does not divide over the 8 devices"),
    ("mt.M4Tiny", "expert:8", f"{_TWO_PARTS};input.batch_size=16", "task.num_groups=8 / 2 = 4"),
    ("mt.M4Tiny", "expert:8", f"{_TWO_PARTS};task.num_groups=16", "input.batch_size=8 / 2 = 4"),
    ("mt.M4Tiny", "expert:8", f"{_TWO_PARTS};input.batch_size=16;task.num_groups=16", ""),
    ("mt.M4Tiny", "expert:1", "train.num_micro_batches=3", "choose 1, 2, 4 or 8"),
    ("mt.M4Tiny", "expert:8", f"task.num_experts=0;{_ON_EXPERTS}", "'expert'"),
    ("lm.Tiny", "stage:2,data:4", "", "along 'stage', so its 2 devices would compute the same"),
    ("lm.Tiny", "data:2,model:4", "",
     """the same; set --model_params_override='task.activation_split={"B": ["model", "data"]}'"""),
    ("lm.Tiny", "data:2,model:4", "train.shard_state=slots",
     "would compute the same (train.shard_state=slots shards storage alone)"),
    ("lm.Tiny", "data:2,model:4", "task.activation_split={'B': ['model', 'data']}", ""),
    ("lm.Mixtral8x7B", "data:8,expert:8,model:1", "", "along 'data', so its 8 devices would compute"),
    ("lm.Tiny", "data:2,model:4", "task.weight_split={'H': 'model'}", ""),
    ("lm.Tiny", "data:1", _TWO_STAGES, "give --mesh=stage:2,data:1 and, on a CPU, --num_devices=2"),
    ("lm.Tiny", "stage:2,data:1", _TWO_STAGES, ""),
    ("image.Digits", "data:2", _CELLS, "task.pipeline.stages=3: mesh data:2 has no axis 'stage'"),
    ("image.Digits", "data:2,stage:2", f"{_CELLS};{_STAGES}", "the axis 'stage' of mesh data:2,stage:2 has 2 devices"),
    ("image.Digits", "data:2,stage:3", f"{_CELLS};{_STAGES}", ""),
    ("image.Digits", "data:2,stage:3,x:2", f"{_CELLS};{_STAGES};task.activation_split={{'B': ('data', 'x')}}",
     "stages of different shapes have axis 'stage', and 'data' for their rows, so the 2 devices along 'x' would "
     "compute the same; give --mesh=stage:3,data:4"),
])  # fmt: skip
def test_a_mesh_divides_what_it_shards(model, mesh, override, expected):
    params = registry.GetParams(model, override)
    task = params.task.Instantiate()
    if not expected:
        check_divisible(params, task, Mesh.parse(mesh))
        return
    with pytest.raises(ValueError) as error:
        check_divisible(params, task, Mesh.parse(mesh))
    assert expected in str(error.value)
    with pytest.raises(ValueError) as error:
        check_divisible(params, task, Mesh.parse(mesh), is_trained=False)
    assert "--model_params_override" not in str(error.value)  # no flag of commands that decode


@pytest.mark.parametrize("level", ["slots", "gradients", "weights"])
def test_state_that_is_not_sharded_is_refused(level):
    override = f"train.shard_state={level};train.max_steps=5"
    task = registry.GetParams("mt.M4Tiny", override).task.Instantiate()
    for mesh, where in (
        ("expert:1", "one device"),
        ("data:7,expert:1", "mesh data:7,expert:1, along whose"),
    ):
        message = rf"^train\.shard_state={level}: has no effect on {where}"
        with pytest.raises(UsageError, match=message):
            check_state_is_sharded(override, task, Mesh.parse(mesh))
    check_state_is_sharded(override, task, Mesh.parse("data:2,expert:1"))
    check_state_is_sharded("train.shard_state=none", task, Mesh.parse("data:1"))


# --- memory


def _check(override, mesh=None, model="mt.M4Tiny", **kwargs):
    p = registry.GetParams(model, override)
    task, inputs = p.task.Instantiate(), p.input.Instantiate()
    check_memory(p, task, inputs, mesh or single_device(), **kwargs)


@pytest.mark.parametrize(("override", "named"), [
    ("task.num_experts=200000000", "task.num_experts=200000000, task.hidden_dim=32"),
    ("task.num_encoder_layers=10000;task.num_experts=1024", "task.num_encoder_layers=10000"),
    ("task.source_vocab_size=10000000;task.model_dim=1024", "task.source_vocab_size=10000000, task.model_dim=1024"),
    ("input.source_length=1000000", "input.batch_size=8, input.source_length=1000000"),
])  # fmt: skip
def test_the_largest_parameters_are_named(override, named):
    message = r"^the run needs at least .* machine has 16\.0 GiB; "
    with pytest.raises(UsageError, match=message) as e:
        _check(override, available=16 * GiB)
    assert f"reduce {named}" in str(e.value)


def test_scores_need_no_memory_where_attention_goes_by_blocks():
    long = "input.batch_size=1;input.target_length=32768"
    _check(long, model="lm.Tiny", available=GiB)
    with pytest.raises(
        UsageError, match=r"at least 4\.0 GiB of memory.* input\.target_length=32768"
    ):
        _check(f"{long};task.attention_block=full", model="lm.Tiny", available=GiB)


def test_devices_and_processes_share_the_memory():
    mesh = Mesh(("expert",), (8,))
    # 1 GiB of weights, and 1 GiB of statistics
    override = "task.num_experts=65536;input.batch_size=8"
    _check(override, mesh, available=3 * GiB)
    with pytest.raises(UsageError, match="num_experts=65536"):
        _check(override, mesh, available=1 * GiB)
    _check(override, mesh, available=1 * GiB, share=Share(8))
    _check(override, mesh, available=1 * GiB, share=Share(holds_state=False))
    with pytest.raises(UsageError, match="batch_size=100000000"):  # the host makes the batches
        _check("input.batch_size=100000000", available=8 * GiB, share=Share(holds_state=False))
