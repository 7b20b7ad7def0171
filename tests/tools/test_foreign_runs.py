"""A run by somebody else is data: no command executes anything in it unless the user allows it."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import toy_translation as toy

from lingvo_moe import trainer
from lingvo_moe.core.config import registry
from lingvo_moe.core.runs.run_description import RunDirError
from lingvo_moe.core.runs.run_lock import RunLock
from lingvo_moe.tasks.text.runs.artifacts import text_artifacts
from lingvo_moe.tasks.text.runs.run_dir import TextRunDir
from lingvo_moe.training import same_run
from tools import evaluate, export, report, score, serve, shortlist, translate

CODE = """
open({marker!r}, "w").close()
from lingvo_moe.core.moe.routers.top_k import TopKRouter
class Router(TopKRouter):
    pass
"""
REFUSED = "params.txt: mt.M4Tiny cannot be what this run was trained as: task.moe.router.cls=type/{module}/Router then"


@pytest.fixture(scope="module")
def vocab() -> bytes:
    return toy.train_vocab(toy.sentences(200))


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "code_of_the_run_was_executed"


@pytest.fixture
def run(tmp_path: Path, vocab: bytes, marker: Path) -> Iterator[Path]:
    """A run that contains a package with a router; `name_class` changes its override."""
    path = tmp_path / "given"
    TextRunDir(path).Write(
        "mt.M4Tiny", "", text_artifacts({"source": vocab, "target": vocab}, ["de"])
    )
    (path / "checkpoints" / "5").mkdir(parents=True)
    (path / "mischief").mkdir()
    (path / "mischief" / "__init__.py").write_text(CODE.format(marker=str(marker)))
    yield path
    for name in [n for n in sys.modules if n.split(".")[0] in ("given", "mischief")]:
        del sys.modules[name]


def _name_class(run: Path, module: str) -> None:
    found = json.loads((run / "experiment.json").read_text())
    found["params_override"] = f"task.moe.router.cls=type/{module}/Router"
    (run / "experiment.json").write_text(json.dumps(found))
    lines = (run / "params.txt").read_text().splitlines(keepends=True)
    line = f"task.moe.router.cls : type/{module}/Router\n"
    (run / "params.txt").write_text(
        "".join(line if ".moe.router.cls" in was else was for was in lines)
    )
    TextRunDir(run).ListFiles()


def _commands(run: Path, tmp_path: Path) -> dict:
    lines = tmp_path / "lines.txt"
    lines.write_text("red house\tred house\n")
    given = [f"--logdir={run}"]
    files = [f"--input={lines}", f"--output={tmp_path / 'out.txt'}"]
    data = tmp_path / "data"
    (data / "dev").mkdir(parents=True)
    for path in (data / "de.tsv", data / "dev" / "de.tsv"):
        path.write_text("".join(f"{line}\t{line}\n" for line in toy.sentences(40)))
    begin = ["--model=mt.M4Tiny", f"--data_dir={data}", "--engine=tf_graph"]
    begin += [f"--logdir={tmp_path / 'new'}", f"--init_from={run}"]
    return {
        "translate": (translate.main, given + files),
        "score": (score.main, given + files),
        "export": (export.main, [*given, f"--output={tmp_path / 'model'}"]),
        "evaluate": (evaluate.main, [*given, f"--output={tmp_path / 'scores'}"]),
        "report": (report.main, [*given, f"--data_dir={data}"]),
        "shortlist": (shortlist.main, [*given, f"--output={tmp_path / 'shortlist.npz'}"]),
        "serve": (serve.main, [*given, "--port=0"]),
        "trainer": (trainer.main, begin),
    }


COMMANDS = ["translate", "score", "export", "evaluate", "report", "shortlist", "serve", "trainer"]


@pytest.mark.parametrize("command", COMMANDS)
def test_code_in_a_run_is_not_executed(command, run, marker, tmp_path, monkeypatch, capfd):
    """The run's parent is the working directory, and the run a package without an __init__.py."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    module = "given.mischief"
    _name_class(run, module)
    monkeypatch.syspath_prepend(str(run.parent))  # as `python -m` does there
    main, flags = _commands(run, tmp_path)[command]
    assert main(flags) in (1, 2)
    said = capfd.readouterr().err
    assert REFUSED.format(module=module) in said
    assert said.count("--trust_run imports it") == 1  # one error
    assert not marker.exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_user_may_trust_a_run(command, run, marker, tmp_path, monkeypatch):
    """The class is imported; the command then fails for want of a checkpoint's contents."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _name_class(run, "mischief")
    monkeypatch.syspath_prepend(str(run))
    main, flags = _commands(run, tmp_path)[command]
    main([*flags, "--trust_run"])
    assert marker.exists()


def test_a_run_of_the_user_s_own_class_goes_on_without_trust(run, marker, monkeypatch):
    """The user types the override again; nothing that the run's files name is imported."""
    _name_class(run, "mischief")
    override = "task.moe.router.cls=type/mischief/Router"
    monkeypatch.syspath_prepend(str(run))
    described = TextRunDir(run)
    with pytest.raises(RunDirError, match="--trust_run"):
        described.Params()
    assert not marker.exists()
    described.Write("mt.M4Tiny", override, described.artifacts)
    marker.unlink()
    del sys.modules["mischief"]
    with RunLock(run) as lock:
        params = registry.GetParams("mt.M4Tiny", override)
        same_run.prepare_run_dir(described, "mt.M4Tiny", override, params, lock, restart=False)
    assert marker.exists()  # by what was typed


@pytest.mark.parametrize(
    "command, place", [(report, "report.html"), (evaluate, "eval"), (evaluate, "eval/report.json")]
)
def test_a_command_writes_nowhere_else_because_of_a_link(command, place, run, tmp_path, capfd):
    letter = tmp_path / "letter.txt"
    letter.write_text("dear")
    (run / place).parent.mkdir(exist_ok=True)
    (run / place).symlink_to(letter)
    assert command.main([f"--logdir={run}"]) == 1
    assert f": {place} is a link that leads out of the run, to {letter}" in capfd.readouterr().err
    assert letter.read_text() == "dear"
