"""The command `lingvo-moe`: it lists the tools and runs one, and messages name what an installed package has."""

import importlib
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import run_python

from lingvo_moe import __main__ as console
from lingvo_moe.core.console import command
from lingvo_moe.core.console.flags import Flags


def test_alone_it_lists_every_command_with_a_line(capsys):
    assert console.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = [line.split(maxsplit=1) for line in lines if line.startswith("  ")]
    assert [name for name, _ in listed] == list(console.commands())
    assert all(title.endswith(".") for _, title in listed)
    assert {"train", "plan", "prepare", "serve"} < set(console.commands())
    assert not {"build_files", "import_graph", "_cli"} & set(console.commands())


@pytest.mark.parametrize("name", console.commands())
def test_each_is_a_command(name):
    module = importlib.import_module(console.commands()[name])
    define = module.define_flags if name != "train" else module.parse_flags
    assert callable(define) and '__name__ == "__main__"' in Path(module.__file__).read_text("utf-8")


def test_an_unknown_name_is_said(capsys):
    assert console.main(["traim", "--model=mt.M4Tiny"]) == 2
    assert "no command 'traim' (did you mean 'train'?)" in capsys.readouterr().err


def test_it_runs_a_command_with_its_flags_and_status(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "argv", ["lingvo-moe"])
    monkeypatch.setattr(sys, "path", ["/somewhere"])
    monkeypatch.setattr(
        runpy, "run_module", lambda *args, **kwargs: seen.append((args, sys.argv[1:]))
    )
    console.main(["train_vocab", "--output=x"])
    assert seen == [(("lingvo_moe.tools.train_vocab",), ["--output=x"])]
    assert sys.path == ["/somewhere", str(Path.cwd())]  # a package there is the last to be found


def test_as_a_process():
    done = run_python("-m", "lingvo_moe", "plan", "--topologyy=v3:2x2")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "plan: no flag --topologyy (did you mean '--topology'?)\n"


@pytest.mark.parametrize("text, installed", [
    ("run python -m tools.train_vocab --output=x", "run lingvo-moe train_vocab --output=x"),
    ("what tools.evaluate wrote", "what lingvo-moe evaluate wrote"),
    ("python -m lingvo_moe.trainer --model=x", "lingvo-moe train --model=x"),
    ("/my/tools.plan/x and my.tools.plan", "/my/tools.plan/x and my.tools.plan"),
    ("pip install --no-deps -r requirements-gpu.txt (it", "pip install 'lingvo_moe[gpu-plan]' (it"),
])  # fmt: skip
def test_a_message_names_what_the_user_has(text, installed, monkeypatch, capsys):
    assert command.as_typed(text) == text
    monkeypatch.setattr(command, "_IN_CHECKOUT", False)
    command.say(text)
    assert capsys.readouterr().err == f"{installed}\n"
    assert Flags("python -m tools.plan", text).Help().startswith(installed)


@pytest.mark.parametrize("stand_in, command, said", [
    ("lingvo_moe.lingvo_moe", "trainer", "error: no flag --modell (did you mean '--model' or"),
    ("lingvo_moe.tools.lingvo_moe", "goodput", "goodput: no flag --modell"),
    ("lingvo_moe.tools.lingvo_moe", "train_vocab", "train_vocab: no flag --modell"),
])  # fmt: skip
def test_a_file_of_a_command_runs_by_its_path(stand_in, command, said, tmp_path):
    """The directory may be any one, and Python need not find lingvo_moe."""
    path = Path(find_spec(stand_in).origin).with_name(f"{command}.py")
    done = run_python(str(path), "--modell=x", env={"PYTHONPATH": None}, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith(said), done.stderr
