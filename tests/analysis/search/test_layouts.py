"""Layouts by name, and the commands that messages and plans propose: each is parsed, checked or run."""

import contextlib
import copy
import importlib
import re
import shlex

import pytest
import trainer_testing

from lingvo_moe.analysis.plans import step_plan
from lingvo_moe.analysis.plans.suggestions import suggestions
from lingvo_moe.analysis.search import best_plan, layouts, parallelizing
from lingvo_moe.analysis.search.parallelizing import check_override
from lingvo_moe.analysis.search.strategies.strategy_file import LAYOUTS, StrategyError
from lingvo_moe.core.config import registry
from lingvo_moe.core.engine.devices import device_count
from lingvo_moe.core.sharding import Mesh, ShardingError
from lingvo_moe.core.task.meshes import check_divisible
from lingvo_moe.reproduction import open_models
from lingvo_moe.training.checks import UsageError, check_upcycling
from lingvo_moe.training.flags import parse_flags
from tests.made_up_plans import make_plan
from tools import plan as plan_tool, verify


@pytest.fixture(autouse=True)
def _eight_devices():
    assert device_count() == 8


def _override(model, name, count):
    return layouts.layouts(name, model, f"input.batch_size={4 * count}", count)[name]


# Those of docs/open_models.md, which were compiled.
@pytest.mark.parametrize("planned", [each for each in open_models._LAYOUTS if each[0] in (
    "OLMoE1B7B", "Llama4Scout", "Qwen3_235B_A22B", "KimiK2", "Llama31_70B",
)])  # fmt: skip
def test_published_models_have_layouts_of_the_page_s_shape(planned):
    model, _, rows, experts, _ = planned
    count = rows * experts
    override = _override(f"lm.{model}", "fsdp+expert" if experts > 1 else "fsdp", count)
    mesh = Mesh.parse(registry.GetParams(f"lm.{model}", override).train.mesh)
    assert dict(zip(mesh.axis_names, mesh.shape)) == (
        {"data": rows, "expert": experts} if experts > 1 else {"data": count}
    )


def test_tensor_parallelism_goes_over_heads_and_hidden_units():
    override = dict(registry.split_override(_override("lm.Qwen3_30B_A3B", "tp", 64)))
    assert override["train.mesh"] == "data:16,model:4"  # for 4 heads of keys and values
    assert "'A': 'model'" in override["task.weight_split"]
    assert override["train.shard_state"] == "weights" and override["task.remat"] == "full"


def test_layouts_that_do_not_divide_are_refused():
    with pytest.raises(
        StrategyError, match=r"^--layout=fsdp\+expert: 8 devices have no divisor .*experts"
    ):
        layouts.layouts("fsdp+expert", "lm.Llama31_8B", "", 8)
    with pytest.raises(StrategyError, match=r"--layout=fsdp: is for models of equal blocks, which"):
        layouts.layouts("fsdp", "image.Digits", "", 2)
    with pytest.raises(ShardingError, match=r"input\.batch_size=64 does not divide over the 128"):
        layouts.layouts("fsdp", "lm.Mixtral8x7B", "", 128)
    assert set(layouts.layouts("auto", "lm.Mixtral8x7B", "", 64)) == set(LAYOUTS) - {"auto"}


# --- what messages propose


class _Checked(Exception):
    """Raised where a program would be lowered."""


def _checked(*_):
    raise _Checked


def _proposed(said):
    """The tool and the flags of the command that a message proposes."""
    python, minus_m, module, *flags = shlex.split(said.partition("Try this layout: ")[2].strip())
    assert (python, minus_m) == ("python", "-m")
    return importlib.import_module(module), flags


@pytest.mark.parametrize("flags", [
    "--model=lm.Mixtral8x7B --topology=v5p:4x4x4",
    "--model=lm.Mixtral8x7B --topology=v5p:4x4x4 --mesh=data:8,expert:8,model:1 --what=train",
    "--model=lm.OLMoE1B7B --topology=v5p:4x4x8 --model_params_override=task.remat=dots;task.dropout=0.1",
    "--model=lm.Llama31_8B --topology=v5p:8x8x8 --mesh=data:7",
    "--model=lm.Mixtral8x7B --topology=v5e",
    "--model=lm.Mixtral8x7B --topology=v5e --model_params_override=task.remat=dots;task.dropout=0.1",
])  # fmt: skip
def test_a_plan_of_a_mesh_that_does_not_divide_proposes_a_command_that_does(
    flags, monkeypatch, capsys
):
    monkeypatch.setattr(step_plan, "lower_step", _checked)
    assert plan_tool.main([*flags.split(), "--cache_dir="]) == 1
    tool, proposed = _proposed(capsys.readouterr().err.splitlines()[-1])
    assert tool is plan_tool and ("--what=decode" in flags) == ("--what=decode" in proposed)
    args = plan_tool.define_flags().Parse(proposed)
    assert (
        args.layout and args.topology[0] in flags and "task.remat" not in args.model_params_override
    )
    with pytest.raises(_Checked):
        plan_tool.make(args, args.topology[0], "", None, lambda _: None, step_plan.Lowering())


def test_the_command_that_verify_proposes_verifies(capsys):
    """A step whose slots are in the memory of hosts."""
    flags = ["--model=lm.Tiny", "--model_params_override=train.offload=slots;task.num_layers=2"]
    assert verify.main([*flags, "--mesh=data:1,model:2"]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert "along 'model', so its 2 devices would compute the same; set --model_params_" in said
    tool, proposed = _proposed(said)
    assert tool is verify and tool.main(proposed) == 0
    out = capsys.readouterr().out
    assert "lm.Tiny over mesh data:2: " in out and "are those of one device" in out
    # The other remedy of the message divides the rows, too.
    override = re.search(r"set (--model_params_override='[^']*')", said)[1]
    args = verify.define_flags().Parse(
        ["--model=lm.Tiny", "--mesh=data:1,model:2", *shlex.split(override)]
    )
    params = registry.GetParams("lm.Tiny", args.model_params_override)
    check_divisible(params, params.task.Instantiate(), Mesh.parse(args.mesh))


def test_the_trainer_proposes_a_layout_and_trains_in_it(tmp_path, capsys, monkeypatch):
    data = trainer_testing.write_corpus(tmp_path / "data")
    flags = [
        "--model=mt.M4Tiny", f"--data_dir={data}", f"--logdir={tmp_path / 'run'}", "--num_devices=8", "--max_steps=1",
        "--mesh=expert:4,data:2", "--engine=pjrt",
    ]  # fmt: skip
    assert trainer_testing.status(*flags) == 2
    tool, proposed = _proposed(capsys.readouterr().err.splitlines()[-1])
    trained = []
    monkeypatch.setattr(tool, "train_model", lambda job: trained.append(tool.checked_run(job)) or 0)
    assert "--layout=fsdp+expert" in proposed and tool.main(proposed) == 0
    ((run, engine),) = trained
    assert str(engine.mesh) == "data:2,expert:4" and "train.shard_state=weights" in run.override
    assert run.task.p.activation_split["B"] == ("data", "expert")
    with contextlib.suppress(SystemExit):
        assert tool.main([*proposed, "--mesh=expert:8"]) == 2
    assert "--layout=fsdp+expert does not go with --mesh=expert:8" in capsys.readouterr().err


def test_auto_takes_the_fastest_that_fits(monkeypatch):
    seconds = {"data:8": 3.0, "data:2,expert:4": 2.0, "data:1": 1.0}

    def plan(request, *_):
        mesh = registry.GetParams(request.model, request.override).train.mesh
        fits = mesh in seconds
        memory = {"fits": fits, "misses_by": 1}
        return {"memory": memory, "time": {"step_seconds": seconds[mesh]} if fits else None}

    monkeypatch.setattr(step_plan, "make_plan", plan)
    request = step_plan.Request("lm.MoEDemo", "v5e:2x4", override="task.dropout=0.1")
    made = best_plan.laid_out("auto", request, None)
    assert (made["layout"], made["override"]) == ("fsdp+expert", "task.dropout=0.1")
    monkeypatch.setattr(
        "lingvo_moe.analysis.plans.measuring.measured_step",
        lambda model, override, mesh, *_: {"time": {"step_seconds": seconds.get(str(mesh), 9.0)}},
    )
    args = parse_flags(["--model=lm.MoEDemo", "--layout=auto"])
    override = layouts.fastest_here(args, "", 8)
    assert registry.GetParams("lm.MoEDemo", override).train.mesh == "data:2,expert:4"


# --- what plans advise


def _commands(plan):
    return [
        shlex.split(found) for line in suggestions(plan) for found in re.findall("`([^`]*)`", line)
    ]


@pytest.mark.parametrize(
    "override", ["", "task.repeat=True;task.dropout=0.1;task.activation_split={'B': 'data'}"]
)
def test_the_tools_take_the_commands_that_a_plan_advises(override, monkeypatch):
    slow = copy.deepcopy(make_plan()) | {"override": override, "layout": "fsdp"}
    slow["memory"]["needed"] = 1 << 30
    slow["time"]["collective_seconds"] = 0.4
    for _, _, module, *flags in _commands(slow):
        args = importlib.import_module(module).define_flags().Parse(flags)
        registry.GetParams(args.model, args.model_params_override)
        if module == "tools.parallelize":
            check_override(args.model_params_override)
            assert (args.model_params_override == "task.dropout=0.1") == bool(override)
            assert args.topology == "v3:32x32"
        else:
            assert (args.topology, args.layout, args.model_params_override) == (
                ("v3",),
                "fsdp",
                override,
            )
    assert {command[2] for command in _commands(slow)} == {"tools.parallelize", "tools.plan"}
    images = {**slow, "batch": {"images": 8}}
    images["time"] = slow["time"] | {"images_per_second": 1.0}
    assert {command[2] for command in _commands(images)} == {
        "tools.plan"
    }  # equal blocks are searched
    registry.GetParams("lm.MoEDemo", "task.moe.dispatcher=index").task.Instantiate()


def test_the_search_reads_dropless_models():
    """Each candidate exchanges rows as the model does, so none has stages; and the work is that of MFU."""
    params = registry.GetParams("lm.MoEDemo")
    assert params.task.moe.dispatcher == "dropless"
    work = parallelizing.read_workload(params)
    flops = sum(times * product.flops for product, times in work.products.items())
    batch = params.input.Instantiate().BatchSpec()
    assert 3 * flops == params.task.Instantiate().Costs().StepFlops(batch)
    assert not work.stages


def test_growing_with_dense_first_layers_and_another_attention_is_refused_by_their_names():
    override = (
        "train.upcycle_at=2;task.num_layers=5;task.hidden_dim=192;task.nth_attention=extended"
    )
    params = registry.GetParams("lm.MoEDemo", override)
    params.task.Instantiate()
    with pytest.raises(
        UsageError, match=r"=2: task\.dense_first_layers=1 does not go with task\.nth_"
    ):
        check_upcycling(parse_flags(["--model=lm.MoEDemo"]), params)
    params.task.dense_first_layers, params.task.num_layers = 0, 4
    check_upcycling(parse_flags(["--model=lm.MoEDemo"]), params)
