"""Bad values of parameters and flags: one line with path, value and range, status 2, and nothing started."""

import pytest
import trainer_testing

from lingvo_moe.core.config import registry
from lingvo_moe.core.sharding import Mesh, ShardingError, single_device
from lingvo_moe.training.checks import UsageError, check_divisible, check_state_is_sharded
from lingvo_moe.training.flags import MOST_DEVICES
from lingvo_moe.training.memory import Share, check_memory, machine_bytes

GiB = 2**30


def _error(capfd, tmp_path, *flags):
    """Returns the one line of error for these flags."""
    places = [f"--data_dir={tmp_path / 'data'}", f"--logdir={tmp_path / 'run'}"]
    assert trainer_testing.status("--model=mt.M4Tiny", *places, *flags) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("error: "), err
    assert not (tmp_path / "run").exists()
    return err.removeprefix("error: ").rstrip()


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("task.model_dim", "0", "must be an integer of at least 1"),
        ("task.model_dim", "-16", "must be an integer of at least 1"),
        ("task.model_dim", "1e9", "is of type float, expected int"),
        ("task.hidden_dim", "0", "must be an integer of at least 1"),
        (
            "task.num_experts",
            "100000000000",
            "must be an integer of at least 0 and at most 2147483647",
        ),
        ("task.num_experts", "-1", "must be an integer of at least 0"),
        ("task.num_encoder_layers", "1000000000", "must be an integer from 1 to 10000"),
        ("task.num_heads", "0", "must be an integer of at least 1"),
        ("task.dropout", "1", "must be a number in [0, 1)"),
        ("task.label_smoothing", "-0.1", "must be a number in [0, 1)"),
        ("task.clip_gradient_norm", "-1", "must be a number of at least 0"),
        ("task.clip_gradient_norm", "1e999", "must be a number of at least 0, finite in float32"),
        ("task.optimizer.learning_rate.multiplier", "-1", "must be a number of at least 0"),
        (
            "task.optimizer.learning_rate.multiplier",
            "1e999",
            "must be a number of at least 0, finite in float32",
        ),
        ("task.seed", "-1", "must be an integer of at least 0"),
        ("task.repeat", "1", "must be True, False or auto"),
        ("task.repeat", "atuo", "must be True, False or auto (did you mean 'auto'?)"),
        ("task.moe.router.level", "word", "must be one of token, sentence, task"),
        ("task.moe.capacity_factor", "0", "must be a positive number"),
        (
            "task.moe.router",
            "None",
            "must be one of expert_choice, hash, lsh, noisy_top_k, random, soft, top2, top_k, or Params of a class",
        ),
        ("input.languages", "[1,2]", "must be a list of strings"),
        (
            "input.batch_size",
            "10000000000",
            "must be an integer of at least 1 and at most 2147483647",
        ),
        ("input.temperature", "0", "must be a positive number"),
        ("train.max_steps", "-1", "must be an integer of at least 0"),
    ],
)
def test_parameters(path, value, expected, capfd, tmp_path):
    error = _error(capfd, tmp_path, f"--model_params_override={path}={value}")
    assert error == f"--model_params_override: {path}={value}: {expected}"


@pytest.mark.parametrize("name", ["weight_split", "activation_split"])
def test_splits(name, capfd, tmp_path):
    override = f"--model_params_override=task.{name}="
    error = _error(capfd, tmp_path, override + "{'Q': 'expert'}")
    assert f"task.{name}={{'Q': 'expert'}}: must be a map from letters" in error
    assert "unknown letter 'Q' (known: A, " in error
    error = _error(capfd, tmp_path, override + "{'H': 'experts'}")
    assert error == (
        f"task.{name}: 'H' is sharded along 'experts', and mesh expert:8 has no axis 'experts' "
        "(did you mean 'expert'?)"
    )


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("task.num_classes=1001", "task.num_classes=1001 does not divide over the 8 devices"),
        (
            "task.head.weight_split={'V': 'modle'}",
            "task.head.weight_split: 'V' is sharded along 'modle', and mesh data:8 has no axis 'modle'",
        ),
        (
            "task.head.activation_split={'V': 'date'}",
            "task.head.activation_split: 'V' is sharded along 'date', and mesh data:8 has no axis 'date' (did",
        ),
        (
            "task.num_classes=1001;task.head.weight_split={}",
            "task.num_classes=1001 does not divide over the 8 devices",
        ),
        (
            "task.network.base_channels=6;task.network.weight_split={'O': 'data'}",
            "variable network.stage_0.stages[0].convolve.conv.w: O=6 does not divide over the 8 devices",
        ),
    ],
)
def test_splits_of_layers(override, expected):
    params = registry.GetParams("image.ResNet50Classes130K", override)
    with pytest.raises(ShardingError) as error:
        check_divisible(params, params.task.Instantiate(), Mesh.parse("data:8"))
    assert str(error.value).startswith(expected)


# Three stages of a network of images, and where they are.
_CELLS = "task.pipeline.stages=3;task.pipeline.micro_batches=2;task.optimizer=adam"
_STAGES = "task.weight_split={'Z': 'stage'}"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("input.batch_size=16", "task.num_groups=8 / 2 = 4"),
        ("task.num_groups=16", "input.batch_size=8 / 2 = 4"),
        ("input.batch_size=16;task.num_groups=16", None),
        ("input.batch_size=16;task.num_groups=0", None),
    ],
)
def test_a_micro_batch_divides_over_the_devices(override, expected):
    params = registry.GetParams("mt.M4Tiny", f"{override};train.num_micro_batches=2")
    task, mesh = params.task.Instantiate(), Mesh.parse("expert:8")
    if expected is None:
        check_divisible(params, task, mesh)
        return
    with pytest.raises(ShardingError) as error:
        check_divisible(params, task, mesh)
    assert str(error.value).startswith("train.num_micro_batches=2: a micro-batch has ")
    assert expected in str(error.value)
    assert "set train.num_micro_batches to 1, or " in str(error.value)
    assert str(error.value).endswith(" to a multiple of 16")


@pytest.mark.parametrize(
    ("model", "mesh", "override", "expected"),
    [
        ("lm.Tiny", "stage:2,data:4", "", "along 'stage', so its 2 devices would compute the same"),
        ("lm.Tiny", "stage:2,data:4", "", "use --mesh=data:4, or set task.pipeline.stages=2"),
        ("lm.Tiny", "data:2,model:4", "", "use --mesh=data:2, or name 'model' in task.activation_"),
        ("lm.Tiny", "data:2,model:4", "train.shard_state=slots", ""),
        ("lm.Tiny", "data:2,model:4", "task.weight_split={'H': 'model'}", ""),
        ("lm.Tiny", "data:8,model:1", "", ""),
        ("mt.M4Tiny", "expert:8", "task.num_experts=0;task.activation_split={'E': 'expert'}", "'exp"),
        ("image.Digits", "data:2", _CELLS, "task.pipeline.stages=3: mesh data:2 has no axis with a dev"),
        ("image.Digits", "data:2,stage:2", f"{_CELLS};{_STAGES}", "stages=3: mesh data:2,stage:2 has"),
        ("image.Digits", "data:2,stage:3", f"{_CELLS};{_STAGES}", ""),
    ],
)  # fmt: skip
def test_an_axis_along_which_devices_compute_the_same(model, mesh, override, expected):
    params = registry.GetParams(model, override)
    task = params.task.Instantiate()
    if not expected:
        check_divisible(params, task, Mesh.parse(mesh))
        return
    with pytest.raises(ValueError, match="mesh") as error:
        check_divisible(params, task, Mesh.parse(mesh))
    assert expected in str(error.value)


def test_one_device_has_no_state_to_shard():
    override = "train.shard_state=weights;train.max_steps=5"
    with pytest.raises(
        UsageError, match=r"^train\.shard_state=weights: has no effect on one device"
    ):
        check_state_is_sharded(override, Mesh.parse("data:1"))
    check_state_is_sharded(override, Mesh.parse("data:2"))
    check_state_is_sharded("train.shard_state=none", Mesh.parse("data:1"))


def test_stages_need_more_than_one_device():
    params = registry.GetParams("lm.Tiny", "task.pipeline.stages=2;task.pipeline.micro_batches=4")
    task = params.task.Instantiate()
    with pytest.raises(
        UsageError, match=r"there is one device .* --mesh=stage:2,data:1 and, on a CPU, --num_dev"
    ):
        check_divisible(params, task, Mesh.parse("data:1"))
    check_divisible(params, task, Mesh.parse("stage:2,data:1"))


def test_a_batch_divides_into_micro_batches_on_one_device_too():
    params = registry.GetParams("mt.M4Tiny", "train.num_micro_batches=3")
    with pytest.raises(
        ValueError, match=r"batch_size=8 and task.num_groups=8 .* choose 1, 2, 4 or 8"
    ):
        check_divisible(params, params.task.Instantiate(), Mesh.parse("expert:1"))
    with pytest.raises(
        registry.RegistryError, match="num_micro_batches=0: must be an integer of at"
    ):
        registry.GetParams("mt.M4Tiny", "train.num_micro_batches=0")


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("--num_devices=100000", f"must be an integer from 0 to {MOST_DEVICES}"),
        ("--num_devices=-1", f"must be an integer from 0 to {MOST_DEVICES}"),
        ("--max_steps=-1", "must be an integer of at least 0"),
        ("--init_from_step=-1", "must be an integer of at least 0, or 'best'"),
        ("--num_processes=0", "must be an integer of at least 1"),
        ("--process_id=-1", "must be an integer of at least 0"),
        ("--model='mt.M4Tiny '", "expected task.Experiment (did you mean 'mt.M4Tiny'?)"),
    ],
)
def test_flags(flag, expected, capfd, tmp_path):
    assert (
        _error(capfd, tmp_path, flag.replace("='", "=").removesuffix("'")) == f"{flag}: {expected}"
    )


# --- memory


def _check(override, mesh=None, model="mt.M4Tiny", **kwargs):
    p = registry.GetParams(model, override)
    task, inputs = p.task.Instantiate(), p.input.Instantiate()
    check_memory(p, task, inputs, mesh or single_device(), **kwargs)


def test_a_batch_that_cannot_fit_is_refused_before_the_data_is_read(capfd, tmp_path):
    error = _error(capfd, tmp_path, "--model_params_override=input.batch_size=1000000000")
    assert error.startswith("the run needs at least 3,129.2 GiB of memory, and this machine has ")
    assert error.endswith(
        "for one batch and its activations; reduce input.batch_size=1000000000, input.source_length=24, "
        "input.target_length=24"
    )


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("task.num_experts=200000000", "reduce task.num_experts=200000000, task.hidden_dim=32"),
        ("task.hidden_dim=800000000", "reduce task.hidden_dim=800000000, task.model_dim=16"),
        (
            "task.num_encoder_layers=10000;task.num_experts=1024",
            "reduce task.num_encoder_layers=10000",
        ),
        (
            "task.source_vocab_size=10000000;task.model_dim=1024",
            "reduce task.source_vocab_size=10000000, task.model_dim=1024",
        ),
        ("input.source_length=1000000", "reduce input.batch_size=8, input.source_length=1000000"),
    ],
)
def test_the_largest_parameters_are_named(override, named):
    with pytest.raises(
        UsageError, match=r"^the run needs at least .* this machine has 16\.0 GiB; "
    ) as e:
        _check(override, available=16 * GiB)
    assert named in str(e.value)


def test_devices_and_processes_share_the_memory():
    mesh = Mesh(("expert",), (8,))
    override = (
        "task.num_experts=65536;input.batch_size=8"  # 1 GiB of weights, and 1 GiB of statistics
    )
    _check(override, mesh, available=3 * GiB)
    with pytest.raises(UsageError, match="num_experts=65536"):
        _check(override, mesh, available=1 * GiB)
    _check(override, mesh, available=1 * GiB, share=Share(8))
    _check(override, mesh, available=1 * GiB, share=Share(holds_state=False))
    with pytest.raises(UsageError, match="batch_size=100000000"):  # the host makes the batches
        _check("input.batch_size=100000000", available=8 * GiB, share=Share(holds_state=False))


def test_the_demo_fits_anywhere_and_the_largest_model_not_here():
    mesh = Mesh(("expert",), (8,))
    _check("", mesh, "mt.M4Demo", available=1 * GiB)
    with pytest.raises(UsageError, match="num_experts=2048"):
        _check("", mesh, "mt.M4MoE2048E36L", available=256 * GiB)
    assert machine_bytes() > 2**28
