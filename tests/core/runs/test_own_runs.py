"""A run that this user made is trusted with the code that it names; any other run is data."""

import json
import os
import stat
import sys
from pathlib import Path

import pytest
from refusals import refuses

from lingvo_moe.core.config import registry
from lingvo_moe.core.files.artifacts import RunArtifacts
from lingvo_moe.core.runs.own_runs import is_own, make_mark
from lingvo_moe.core.runs.run_description import RunDirError
from lingvo_moe.core.runs.run_dir import MARK, RunDir

CODE = """
from lingvo_moe.params.mt.demo import M4Tiny
open("was_imported", "w").close()
class Mine(M4Tiny):
    pass
class NoExperiment:
    pass
"""


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A user with a package of experiments in the working directory, where `python -m` looks first."""
    (tmp_path / "user_models").mkdir()
    (tmp_path / "user_models" / "deep.py").write_text(CODE)
    (tmp_path / "user_models" / "broken.py").write_text("import json\nimport no_such_module\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    yield tmp_path
    _forget()


def _forget() -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == "user_models"]:
        del sys.modules[name]
    Path("was_imported").unlink(missing_ok=True)


@pytest.fixture
def run(home):
    run = RunDir(home / "run")
    run.Write("user_models.deep.Mine", "task.num_experts=4", RunArtifacts({}, {}))
    _forget()
    return run


def test_an_experiment_of_the_users_own_package():
    assert registry.GetParams("user_models.deep.Mine", "input.batch_size=2").input.batch_size == 2
    assert registry.GetExperiment("user_models.deep.Mine").__module__ == "user_models.deep"


@refuses(
    registry.RegistryError,
    ("user_models.deep.Mime", r"there is no Mime in .*deep\.py \(did you mean 'Mine'\?\)"),
    ("user_models.deep.NoExperiment", r"not derived from .*registry\.Experiment: NoExperiment"),
    ("user_models.deap.Mine", r"no module 'user_models\.deap' in /.*/user_models$"),
    ("user_modles.deep.Mine", r"no module 'user_modles' where Python looks"),
    ("user_models.broken.Mine", r"importing .* failed: .*'no_such_module' \(.*broken\.py:2\)"),
    ("user_models..Mine", r"expected task\.Experiment"),
)
def test_what_is_no_experiment_is_said(name):
    registry.GetExperiment(name)


def test_a_run_by_this_user_is_trusted(run, home):
    assert RunDir(run.path).Params().task.num_experts == 4
    _forget()
    run.path.rename(home / "moved")
    assert RunDir(home / "moved").Params().task.num_experts == 4


def test_a_changed_run_is_not_trusted(run):
    found = json.loads((run.path / "experiment.json").read_text())
    found["params_override"] = "task.num_experts=8"
    (run.path / "experiment.json").write_text(json.dumps(found))
    run.ListFiles()
    _is_refused(run)


def test_a_run_from_elsewhere_is_not_trusted(run, home, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "of_another"))
    _is_refused(run)
    RunDir(home / "other").Write("mt.M4Tiny", "", RunArtifacts({}, {}))  # now there is a key
    _is_refused(run)


def test_a_mark_elsewhere_is_refused(run, home):
    (run.path / MARK).rename(home / MARK)
    (run.path / MARK).symlink_to(home / MARK)
    with pytest.raises(RunDirError, match="is a link that leads out of the run"):
        run.Params()
    (run.path / MARK).unlink()
    _is_refused(run)


def _is_refused(run: RunDir) -> None:
    with pytest.raises(RunDirError, match=r"'user_models\.deep\.Mine' is not of .*--trust_run"):
        RunDir(run.path).Params()
    assert not Path("was_imported").exists()
    assert RunDir(run.path, trust_run=True).Params()
    assert Path("was_imported").exists()
    _forget()


def test_the_key_is_made_once_and_for_its_owner_alone(home):
    mark = make_mark(b"{}")
    key = home / "config" / "lingvo_moe" / "key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert os.listdir(key.parent) == ["key"]
    assert make_mark(b"{}") == mark and is_own(mark, b"{}") and not is_own(mark, b"{ }")
    key.chmod(0o644)
    assert not is_own(mark, b"{}")


@pytest.mark.parametrize("wrong", ["no directory", "readable for others", "short"])
def test_a_run_without_a_key_goes_on_without_a_mark(wrong, home, monkeypatch, capfd):
    key = home / "config" / "lingvo_moe" / "key"
    key.parent.mkdir(parents=True)
    key.write_bytes(bytes(31 if wrong == "short" else 32))
    key.chmod(0o644 if wrong == "readable for others" else 0o600)
    if wrong == "no directory":
        monkeypatch.setenv("XDG_CONFIG_HOME", "/proc/none")
    run = RunDir(home / "run")
    run.Write("user_models.deep.Mine", "", RunArtifacts({}, {}))
    said = capfd.readouterr().err
    assert said.startswith("warning: the run gets no mark") and said.count("\n") == 1
    assert not (run.path / MARK).exists()
    _forget()
    _is_refused(run)
