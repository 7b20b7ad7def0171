"""Helpers that the commands share."""

import importlib
import re
from pathlib import Path

import pytest
import toy_translation as toy
from processes import run_python

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.runs.evaluations import Evaluation, Evaluations
from lingvo_moe.tasks.text.runs.run_dir import TextRunDir
from tools import _cli, plan, verify

ROOT = Path(__file__).parents[2]


_PATHS = re.compile(
    r"(.*_)?(dir|out|output|input|html|json|plot|program|compare|docs|corpus|shortlist|saved_model|logdir|baselines)"
)


COMMANDS = [
    f"{folder}.{path.stem}"
    for folder in ("tools", "benchmarks")
    for path in sorted((ROOT / folder).glob("*.py"))
    if "def main(argv" in path.read_text()
] + ["lingvo_moe.training.flags"]


def _needed(flags):
    """Values for the flags that a command requires, or one of several."""
    one = next(n for n in ("init_from", "saved_model", "logdir", "") if n in flags.Names() or not n)
    one = "model" if one == "init_from" else one
    names = (n for n in flags.Names() if "(required)" in flags[n].help or n == one)
    return dict.fromkeys(names, "x")


@pytest.mark.parametrize("name", COMMANDS[:-1])
def test_every_flag_that_names_a_path_is_checked(name, capsys):
    """The trainer checks its own together with those in parameters; see test_trainer_refusals.py."""
    define = importlib.import_module(name).define_flags
    for flag in filter(_PATHS.fullmatch, define().Names()):
        if define()[flag].default in (True, False):
            continue
        others = {**_needed(define()), flag: "az://x/y"}
        if flag == "logdir":
            others.pop("saved_model", None)
        wrong = {"az://x/y": "storage is"}
        if flag in ("logdir", "saved_model"):
            wrong["x[1]"] = "checkpoints and models could not"
        for path, why in wrong.items():
            with pytest.raises(SystemExit):
                define().Parse(
                    [f"--{name}={value}" for name, value in {**others, flag: path}.items()]
                )
            said = capsys.readouterr().err
            assert f"--{flag}={path}: " in said and why in said


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_can_be_read_from_a_file_and_is_explained(name, tmp_path):
    define = importlib.import_module(name).define_flags
    flags = define()
    assert all(flags[n].help.strip() for n in flags.Names()) and "python -m " in flags.Help()
    text = _needed(flags)
    (tmp_path / "flags").write_text("".join(f"--{n}={value}\n" for n, value in text.items()))
    read = define().Parse([f"--flagfile={tmp_path / 'flags'}"]).Values()
    assert read == {**{n: flags[n].default for n in flags.Names()}, **text}


def test_commands_start_without_tensorflow():
    """--help and a wrong flag must not wait for it; nor for NumPy, where the command alone does not need it."""
    names = [name for name in COMMANDS if not name.startswith("benchmarks.")]
    code = f"""
import importlib, sys
import tools._cli, tools.evaluate, tools.serve, tools.translate
print("numpy" in sys.modules)
import lingvo_moe.trainer
for name in {names}:
    importlib.import_module(name).define_flags()
print([name for name in ("tensorflow", "jax") if name in sys.modules])
"""
    done = run_python("-c", code, check=True)
    assert done.stdout == "False\n[]\n"


def test_the_data_that_a_run_trained_on_is_named(capsys):
    flags = Flags("command", "")
    flags.DEFINE_path("logdir", None, "a run")
    flags.DEFINE_path("data_dir", None, "a corpus")
    inputs = Params()
    with pytest.raises(ValueError, match="--data_dir is needed: RUN trained on no directory"):
        _cli.data_dir(flags.Parse(["--logdir=RUN"]), inputs)
    inputs.Define("data_dir", "CORPUS", "")
    assert _cli.data_dir(flags.Parse(["--logdir=RUN"]), inputs) == "CORPUS"
    assert "data: CORPUS, which RUN trained on; --data_dir" in capsys.readouterr().err
    assert _cli.data_dir(flags.Parse(["--logdir=RUN", "--data_dir=OTHER"]), inputs) == "OTHER"
    assert not capsys.readouterr().err


# Commands that write to standard output, or nothing at all.
_MAKE_NO_FILES = (
    "build_files",
    "chat",
    "import_graph",
    "generate",
    "lingvo_moe",
    "score",
    "serve",
    "translate",
    "verify",
)


@pytest.mark.parametrize("path", sorted((ROOT / "tools").glob("[a-z]*.py")), ids=lambda p: p.stem)
def test_a_command_ends_with_what_it_made(path):
    text = path.read_text("utf-8")
    assert ("_cli.made(" in text) != (path.stem in _MAKE_NO_FILES)


def test_a_model_flag_alone_lists_the_experiments(capsys):
    with pytest.raises(SystemExit) as stop:
        verify.main(["--num_devices=2", "--model"])
    assert stop.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == registry.AllNames()
    assert all(len(line.split(maxsplit=1)) == 2 for line in lines)
    (tiny,) = (line for line in lines if line.startswith("mt.M4Tiny "))
    assert tiny.endswith("Seconds, not minutes: for tests and for trying things out.")


def test_the_best_checkpoint_is_the_default_and_it_is_said(tmp_path, capfd):
    run = TextRunDir(tmp_path / "run")
    vocab = toy.train_vocab(toy.sentences(200))
    for step in (3, 5, 7):
        toy.save_run(run.path, vocab, step, more=toy.SMALL)

    def chosen(*more):
        flags = Flags("x", "About.")
        _cli.define_logdir_flag(flags)
        _cli.define_run_flags(flags)
        return _cli.chosen(flags.Parse([f"--logdir={run.path}", *more])).step

    assert chosen() is None and capfd.readouterr().err == ""  # none was evaluated
    run.WriteEvaluations(Evaluations("x", (Evaluation(3, 2.0), Evaluation(5, 1.0))))
    assert chosen() == 5
    told = "step 5, the best one; --checkpoint_step=newest takes the last, 7\n"
    assert capfd.readouterr().err == told
    for flag in ("--checkpoint_step=newest", "--average_last=2"):
        assert chosen(flag) is None
    assert chosen("--checkpoint_step=3") == 3 and chosen("--checkpoint_step=best") == 5
    run.WriteEvaluations(Evaluations("x", (Evaluation(3, 2.0), Evaluation(7, 1.0))))
    assert chosen() is None and capfd.readouterr().err == ""  # it is the newest


def test_an_installed_package_says_that_it_has_no_recorded_plans(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(plan, "PLANS", tmp_path / "docs/plans")
    with pytest.raises(SystemExit):
        plan.main(["--validate"])
    assert capsys.readouterr().err == (
        "plan: --validate reads the recorded plans docs/plans of the repository, which an installed package does not "
        "have; run it in a checkout\n"
    )
