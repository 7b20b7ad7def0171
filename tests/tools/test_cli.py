"""What the command lines share."""

import os
import subprocess
import sys

import pytest

from tools import _cli, evaluate, export, translate


@pytest.mark.parametrize("tool", [translate, evaluate, export])
def test_help_shows_a_command_and_every_flag_s_meaning(tool, capsys):
    with pytest.raises(SystemExit) as stop:
        tool.main(["--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert f"python -m tools.{tool.__name__.split('.')[-1]} --" in out
    assert "--beam_size" in out


@pytest.mark.parametrize(
    "tool, argv, message",
    [
        (translate, ["--saved_modl=x"], "no flag --saved_modl (did you mean '--saved_model'"),
        (translate, ["--model=x", "--inptu", "y"], "did you mean '--input'"),
        (translate, [], "one of the arguments --saved_model/--model --logdir is required"),
        (translate, ["--model=x", "--logdir=y"], "not allowed with"),
        (translate, ["--model=x", "--batch_size=0"], "--batch_size=0: must be at least 1"),
        (evaluate, ["--model=x", "--max_per_language=0"], "--max_per_language=0"),
        (evaluate, ["--model=x", "--beam_sise=2"], "did you mean '--beam_size'"),
        (export, ["--logdir=x"], "--output"),
    ],
)
def test_flags_that_make_no_sense(tool, argv, message, capsys):
    with pytest.raises(SystemExit) as stop:
        tool.main(argv)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "tool, argv, message",
    [
        (translate, ["--saved_model={tmp}/none", "--input={tmp}/in"], "no SavedModel there"),
        (translate, ["--saved_model={tmp}", "--input={tmp}/none"], "No such file"),
        (
            translate,
            ["--saved_model={tmp}", "--input={tmp}/in", "--beam_size=2"],
            "--beam_size was fixed",
        ),
        (translate, ["--logdir={tmp}/none", "--input={tmp}/in"], "no such directory"),
        (translate, ["--logdir={tmp}", "--input={tmp}/in", "--beam_size=0"], "beam_size is 0"),
        (evaluate, ["--saved_model={tmp}/none"], "--data_dir is needed"),
        (evaluate, ["--logdir={tmp}"], "no run there"),
        (evaluate, ["--logdir={tmp}", "--data_dir={tmp}/none"], "does not exist"),
        (evaluate, ["--logdir={tmp}", "--data_dir={tmp}"], "no dev directory"),
        (export, ["--logdir={tmp}", "--output={tmp}/out"], "no run there"),
        (export, ["--logdir={tmp}", "--output={tmp}/out", "--top_k=9"], "top_k is 9"),
    ],
)
def test_what_cannot_be_done_is_said_and_leaves_nothing(tool, argv, message, tmp_path, capfd):
    (tmp_path / "in").write_bytes(b"red\n")
    before = sorted(tmp_path.rglob("*"))
    output = [f"--output={tmp_path}/out"] if tool is translate else []
    assert tool.main([a.format(tmp=tmp_path) for a in argv] + output) == 1
    err = capfd.readouterr().err
    assert message in err
    assert err.count("\n") == 1, err
    assert sorted(tmp_path.rglob("*")) == before


def test_quiet_imports_shows_notes_of_what_fails(capfd):
    with _cli.quiet_imports():
        os.write(2, b"a note\n")
    assert capfd.readouterr().err == ""
    with pytest.raises(ImportError), _cli.quiet_imports():
        _fail_loudly()
    assert "the reason" in capfd.readouterr().err


def _fail_loudly() -> None:
    os.write(2, b"the reason\n")
    raise ImportError


def test_commands_start_without_tensorflow():
    """--help and a wrong flag must not wait for it."""
    code = "import tools.translate, tools.evaluate, tools.export, sys; print('tensorflow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
