"""The search for a strategy: what it hands out, what it refuses, and when it says that nothing fits."""

import functools
import re
from pathlib import Path

import pytest
import toy_attention  # noqa: F401
from refusals import refuses

from lingvo_moe import trainer as trainer_module
from lingvo_moe.analysis.explain.verifying import VerifyError
from lingvo_moe.analysis.plans import step_plan as planning
from lingvo_moe.analysis.plans.machines.base_machine import PlanError
from lingvo_moe.analysis.plans.measuring import measured_step
from lingvo_moe.analysis.search import parallelizing, result_cache
from lingvo_moe.analysis.search.parallelizing import NoneFits, Search
from lingvo_moe.analysis.search.strategies.strategy_file import StrategyError, read_overrides
from lingvo_moe.analysis.search.strategies.workload import read_workload
from lingvo_moe.core.config import registry
from lingvo_moe.core.engine import devices
from lingvo_moe.core.files.artifacts import RunArtifacts
from lingvo_moe.core.runs.run_dir import RunDir
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.state.offload import items_of
from lingvo_moe.trainer import main as trainer
from lingvo_moe.training import found_strategy
from lingvo_moe.training.flags import parse_flags
from tools import parallelize

_MODEL = "mt.M4Tiny"
_GIB = 2**30


_WORK = {}


@pytest.fixture(autouse=True)
def _each_experiment_is_traced_once(monkeypatch):
    def read(params):
        key = params.ToText()
        if key not in _WORK:
            _WORK[key] = read_workload(params)
        return _WORK[key]

    monkeypatch.setattr(parallelizing, "read_workload", read)


@pytest.fixture
def plans(monkeypatch):
    """Plans whose seconds a test chooses, by the mesh; the requests in order."""
    seconds, asked = {}, []

    def plan(request, cache_dir, say):
        del cache_dir, say
        asked.append(request)
        mesh = registry.GetParams(request.model, request.override).train.mesh
        if mesh == "expert:8" and "refused" in seconds:
            raise PlanError(seconds["refused"])
        one = seconds.get(mesh, 1.0)
        return {
            "memory": {"fits": True, "needed": _GIB, "hbm": 16 * _GIB},
            "work": [{"part": "experts", "roofline_seconds": one}],
            "time": {"step_seconds": one, "collective_seconds": 0.0},
        }

    monkeypatch.setattr(parallelizing, "cached_plan", plan)
    return seconds, asked


def _find(**changes):
    return parallelizing.find(
        Search(**({"model": _MODEL, "topology": "v5e:2x4", "verify": False} | changes)), None
    )


def test_the_best_compiled_one_is_handed_out(plans, tmp_path):
    seconds, asked = plans
    seconds["expert:4"] = seconds["expert:8"] = 3.0
    found = _find(compiles=4)
    assert len(asked) == len(found.tried) <= 4
    assert found.best.step_seconds == min(tried.step_seconds for tried in found.tried)
    assert found.Ranked()[0] == (found.best, "best; not verified")
    path = tmp_path / "strategy.txt"
    path.write_text(found.ToText())
    params = registry.GetParams(_MODEL, read_overrides(path, registry.AsDefined(_MODEL)))
    assert params.train.mesh == found.best.overrides["train.mesh"]
    assert found.ToText() == _find(compiles=4).ToText()


def test_what_the_compiler_refuses_is_reported_and_not_taken(plans):
    plans[0]["refused"] = "XLA computes this wrongly"
    found = _find(compiles=3)
    refused = found.tried[0].refused  # the experiment as it is written
    where = r'test_parallelizing\.py:\d+ in plan: raise PlanError\(seconds\["refused"\]\)'
    assert re.fullmatch(rf"XLA computes this wrongly \(\S*{where}\)", refused)
    assert found.best is not found.tried[0]
    assert refused in [why for _, why in found.Ranked()]


def test_a_winner_that_computes_something_else_is_refused(plans, monkeypatch):
    meshes = []

    def verify(model, mesh, override, cache_dir, say):
        del cache_dir, say
        meshes.append(mesh)
        registry.GetParams(model, override)
        if len(meshes) == 1:
            raise VerifyError("the gradient of wi differs")

    monkeypatch.setattr(parallelizing, "cached_verification", verify)
    plans[0]["expert:8"] = 0.001  # so that at first no other one should beat it
    found = _find(verify=True, compiles=3)
    assert len(found.tried) > 1
    assert any("the gradient of wi differs" in tried.refused for tried in found.tried)
    assert not found.best.refused
    assert found.verified == str(meshes[-1])
    assert all(mesh.size <= 8 for mesh in meshes)


def test_programs_that_do_not_fit_are_offloaded(monkeypatch):
    def plan(request, cache_dir, say):
        del cache_dir, say
        fits = bool(items_of(registry.GetParams(request.model, request.override).train.offload))
        needed = 2**18 if fits else 16 * 2**20
        return {
            "memory": {"fits": fits, "needed": needed, "hbm": 2**20, "misses_by": 15 * 2**20},
            "work": [],
            "time": {"step_seconds": 1.0, "collective_seconds": 0.0} if fits else None,
        }

    monkeypatch.setattr(parallelizing, "cached_plan", plan)
    found = _find(compiles=3, memory=2**19)
    assert not found.tried[0].candidate.offload
    assert found.best.candidate.offload
    with pytest.raises(NoneFits, match=r"misses by 15.0 MiB; --compiles=1 ended the search after"):
        _find(compiles=1, memory=2**19)


def test_a_search_keeps_its_minutes_and_says_what_it_left(plans, monkeypatch):
    """A program takes 100 s to compile, and the winner 50 s to verify."""
    now, (seconds, asked) = [0.0], plans
    compile_it = parallelizing.cached_plan

    def plan(*args):
        now[0] += 100.0
        return compile_it(*args)

    def verify(*_):
        now[0] += 50.0

    monkeypatch.setattr(parallelizing, "cached_plan", plan)
    monkeypatch.setattr(parallelizing, "cached_verification", verify)
    seconds["expert:8"] = 1000.0

    def search(minutes, **changes):
        now[0] = 0.0
        asked.clear()
        what = {"model": _MODEL, "topology": "v5e:2x4", "seconds": 60 * minutes} | changes
        return parallelizing.find(Search(**what), None, clock=lambda: now[0])

    for minutes, compiled in ((0.1, 1), (4.9, 1), (5, 2)):
        found = search(minutes)
        assert len(asked) == len(found.tried) == compiled
        assert now[0] <= max(60 * minutes, 150)
        assert found.ended.startswith(f"--minutes={minutes:g} ended the search after ")
        assert f" {compiled} of {found.candidates[0]:,} candidates. By estimate " in found.ended
        # For three more programs and the verification.
        more = -(-(now[0] - 50 + 400) // 60)
        assert found.ended.endswith(f"--minutes={more:.0f} tries more")
    with pytest.raises(NoneFits, match=r"[0-9]+ more machines were not tried"):
        search(0.1, topology="v5e", objective="smallest", memory=2**20)
    assert search(60, compiles=1).ended.endswith(": --compiles=4 tries more")
    seconds["expert:8"] = 1e-9  # which nothing should beat
    assert search(60).ended == ""


def test_dropless_experts_are_searched_without_stages(plans):
    found = _find(override="task.moe.dispatcher=dropless", compiles=2)
    assert len(found.tried) == 2
    assert {tried.candidate.layout.stages for tried in found.tried} == {1}


def test_an_objective_chooses_the_machine(plans):
    found = _find(topology="v5e", objective="smallest", compiles=1)
    assert found.machine.name == "v5e:2x2"


@refuses(
    StrategyError,
    ({"topology": "v5e"}, "say how large it is"),
    ({"objective": "smallest"}, "give --topology without sizes"),
    ({"dtypes": ("bfloat",)}, "--activations=bfloat: must be .*did you mean"),
    ({"memory": 1000}, NoneFits, "fits v5e:2x4 under no strategy: .* are missing"),
    ({"topology": "h100:7x1"}, NoneFits, "over the 7 devices of h100:7x1 in no way"),
)
def test_what_cannot_be_searched_is_refused(changes):
    _find(**changes)


def test_pipelines_are_verified_with_the_stages_of_the_small_mesh():
    for text in ("stage:4,data:2", "stage:16,data:2", "stage:2,data:256"):
        mesh = parallelizing.small_mesh(Mesh.parse(text))
        override = dict(part.split("=") for part in parallelizing._pipeline_over(mesh))
        assert override["task.pipeline.stages"] == str(mesh.axis_size("stage"))
    assert list(parallelizing._pipeline_over(Mesh.parse("data:2"))) == []


def test_an_experiment_of_other_axes_is_not_tried_as_it_is_written(plans):
    found = _find(model="lm.Tiny", override="", compiles=1, topology="v5e:2x2")
    assert found.tried[0].name == "as written"
    params = registry.GetParams("lm.Tiny", "train.mesh=expert:8")
    assert parallelizing._as_written(params, 8) is None


def test_the_written_axes_of_a_letter_may_be_a_list():
    params = registry.GetParams("lm.Tiny", "train.mesh=data:2,expert:4")
    params.task.Set(activation_split={"B": ["data", "expert"]}, weight_split={})
    written = parallelizing._as_written(params, 8)
    assert written is not None and written in {written}  # candidates are keys
    assert written.layout.activations == (("B", ("data", "expert")),)


def test_a_plan_is_read_from_the_cache_until_a_parameter_changes(monkeypatch, tmp_path):
    made = []
    monkeypatch.setattr(
        planning, "make_plan", lambda request, *_: made.append(request) or {"plan": len(made)}
    )
    request = planning.Request(_MODEL, "v5e:2x4")
    other = planning.Request(_MODEL, "v5e:2x4", "task.hidden_dim=64")
    for each in (request, request, other, request):
        result_cache.cached_plan(each, tmp_path, print)
    assert made == [request, other]


def test_a_plan_is_made_again_after_any_file_of_the_package_has_changed(monkeypatch, tmp_path):
    made, read = [], Path.read_bytes
    monkeypatch.setattr(planning, "make_plan", lambda *_: made.append(1) or {"plan": len(made)})
    request = planning.Request(_MODEL, "v5e:2x4")
    for changed in ("nothing", "work/costs.py", "engine/loop/steps.py", "machines/tpus.json"):
        name = f"/{changed}"
        monkeypatch.setattr(
            Path, "read_bytes", lambda p, end=name: b"#" if p.as_posix().endswith(end) else read(p)
        )
        result_cache.cached_plan(request, tmp_path, print)
    assert len(made) == 4


def test_a_step_is_verified_until_it_changes(monkeypatch, tmp_path):
    seen = []

    def verify(model, mesh, override):
        seen.append(override)
        if "dots" in override:
            raise VerifyError("the gradient of wi differs")

    monkeypatch.setattr(result_cache, "verify_model", verify)
    mesh, full, dots = Mesh.parse("expert:2"), "train.mesh=expert:2", "task.remat=dots"
    for _ in range(2):
        result_cache.cached_verification(_MODEL, mesh, full, tmp_path, print)
        with pytest.raises(VerifyError):
            result_cache.cached_verification(_MODEL, mesh, dots, tmp_path, print)
    assert seen == [full, dots, dots]


def test_the_command_says_what_lacks(capsys):
    flags = [f"--model={_MODEL}", "--topology=v5e:2x4", "--memory=1e-6", "--noverify"]
    assert parallelize.main(flags) == 3
    assert "are missing" in capsys.readouterr().err
    assert parallelize.main([*flags[:2], "--noverify", "--memory=1000"]) == 1
    assert "--memory=1000: a device of v5e:2x4 has 15.75 GiB, so" in capsys.readouterr().err


def test_the_trainer_takes_a_strategy(tmp_path, capsys):
    path = tmp_path / "strategy.txt"
    path.write_text("# for a test\ntrain.mesh=data:2,expert:4\ntask.remat=dots\n")
    flags = [f"--model={_MODEL}", "--mode=inspect_params", f"--strategy={path}"]
    assert trainer(flags) == 0
    shown = capsys.readouterr().out
    assert "train.mesh : 'data:2,expert:4'" in shown
    assert "task.remat : 'dots'" in shown
    assert trainer([*flags, "--model_params_override=task.remat=full"]) == 0
    assert "task.remat : 'full'" in capsys.readouterr().out
    for text, expected in (
        ("task.remta=dots", "'task.remta' is no part of a strategy (did you mean"),
        ("task.remat=dost", "task.remat=dost: must be"),
        ("task.pipeline.stages=two", "task.pipeline.stages=two: does not read as int"),
        ("train.num_micro_batches=0", "train.num_micro_batches=0: must be"),
    ):
        path.write_text(f"# for a test\n{text}\n")
        assert trainer(flags) == 2
        assert f"--strategy={path}, line 2: {expected}" in capsys.readouterr().err
    path.write_text("train.mesh=data:2,expert:4\n")
    flags[1] = "--mode=inspect_model"
    assert trainer([*flags, "--mesh=expert:8"]) == 2
    expected = (
        f"--mesh=expert:8: --strategy={path} has train.mesh=data:2,expert:4, which would have"
    )
    assert expected in capsys.readouterr().err
    flags = [*flags[:1], "--mode=inspect_params", "--max_steps=5"]
    assert trainer([*flags, "--model_params_override=train.max_steps=7"]) == 2
    assert "--max_steps=5: --model_params_override has train.max_ste" in capsys.readouterr().err


def test_strategies_for_the_devices_here_are_measured(monkeypatch):
    """The search itself is the one of other machines; only a plan's place is taken by a run of the step."""
    asked = []

    def measured(model, override, mesh, memory, known_faults):
        del model, known_faults
        asked.append(registry.GetParams(_MODEL, override).train.mesh)
        assert asked[-1] == str(mesh) and mesh.size == 8
        memory = {"fits": True, "needed": 1, "hbm": memory, "misses_by": 0}
        time = {"step_seconds": 1.0 / len(asked), "collective_seconds": None}
        return {"memory": memory, "work": [], "time": time}

    monkeypatch.setattr(parallelizing, "measured_step", measured)
    found = _find(topology="", devices=8, compiles=3)
    assert found.best is found.tried[-1]
    assert "a step (measured)" in found.ToText()


def test_a_measured_step_says_what_it_needs_and_how_long_it_takes():
    found = measured_step("toy_attention.Right", "", Mesh.parse("a:4,b:2"), 10**9, "error")
    assert found["memory"]["fits"] and 0 < found["memory"]["needed"] < 10**9
    assert found["time"]["step_seconds"] > 0


def test_a_run_trains_with_the_strategy_that_was_searched_for_it(tmp_path, monkeypatch, plans):
    found = _find(compiles=1)
    searches = []
    monkeypatch.setattr(parallelizing, "find", lambda search, *_: searches.append(search) or found)
    trained = []
    monkeypatch.setattr(trainer_module, "train", lambda job: trained.append(job.override) or 0)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "de.tsv").write_text("ein Haus\ta house\n" * 40)
    flags = [f"--model={_MODEL}", f"--data_dir={corpus}", "--strategy=auto"]
    logdir = f"--logdir={tmp_path / 'run'}"
    assert trainer([*flags, f"--logdir={corpus}"]) == 2  # before anything is searched
    assert trainer([*flags, logdir, f"--data_dir={tmp_path / 'none'}"]) == 2
    assert not searches
    assert trainer([*flags, logdir]) == 0
    assert [search.devices for search in searches] == [8]
    assert f"train.mesh={found.best.overrides['train.mesh']}" in trained[0]


def test_a_resumed_run_keeps_its_strategy(tmp_path, monkeypatch):
    logdir = tmp_path / "run"
    (logdir / "checkpoints" / "3").mkdir(parents=True)
    override = "train.mesh=data:2,expert:4;task.remat=dots;task.hidden_dim=64"
    RunDir(logdir).Write(_MODEL, override, RunArtifacts())
    args = parse_flags([f"--model={_MODEL}", f"--logdir={logdir}"])
    assert found_strategy._of_run(args, 8) == "train.mesh=data:2,expert:4;task.remat=dots"
    assert found_strategy._of_run(args, 4) == ""
    monkeypatch.setattr(devices, "find_devices", lambda: None)
    for name in ("check_flags", "check_data_exists"):
        monkeypatch.setattr(found_strategy, name, lambda *_: None)
    monkeypatch.setattr(
        found_strategy, "_searched", lambda args, override, count: f"for={override}"
    )
    for count, strategy in (
        (8, "train.mesh=data:2,expert:4;task.remat=dots"),
        (4, "for=task.hidden_dim=64"),
    ):
        monkeypatch.setattr(devices, "device_count", functools.partial(int, count))
        args = parse_flags([f"--model={_MODEL}", f"--logdir={logdir}", "--strategy=auto"])
        # What the run remembers beside its strategy stays.
        override = found_strategy.override_with_strategy(args, registry.AsDefined(_MODEL))
        assert override == f"{strategy};task.hidden_dim=64"
