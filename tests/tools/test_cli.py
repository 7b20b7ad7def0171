"""Helpers that the commands share."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.console.flags import Flags
from tools import _cli, build_corpus, evaluate, export, prepare, train_vocab, translate, verify

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("tool", [translate, evaluate, export, build_corpus, train_vocab])
def test_help_shows_a_command_and_every_flag_s_meaning(tool, capsys):
    with pytest.raises(SystemExit) as stop:
        tool.main(["--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert f"python -m tools.{tool.__name__.split('.')[-1]} --" in out
    if tool in (translate, evaluate, export):
        assert "--beam_size" in out


@pytest.mark.parametrize(
    "tool, argv, message",
    [
        (translate, ["--saved_modl=x"], "no flag --saved_modl (did you mean '--saved_model'"),
        (translate, ["--saved_model=x", "--inptu", "y"], "did you mean '--input'"),
        (translate, [], "give exactly one of --saved_model and --logdir"),
        (translate, ["--saved_model=x", "--logdir=y"], "give exactly one of --saved_model and"),
        (translate, ["--saved_model=x", "--batch_size=0"], "--batch_size=0: must be an integer of"),
        (evaluate, ["--saved_model=x", "--max_per_language=0"], "--max_per_language=0"),
        (translate, ["--logdir=x", "--beam_size=0"], "--beam_size=0: must be an integer from 1 to"),
        (
            translate,
            ["--logdir=x", "--beam_size=1000000"],
            "--beam_size=1000000: must be an integer",
        ),
        (evaluate, ["--logdir=x", "--length_alpha=nan"], "--length_alpha=nan: must be a number in"),
        (evaluate, ["--logdir=x", "--length_alpha=-1"], "--length_alpha=-1: must be a number in"),
        (translate, ["--logdir=x", "--max_length=0"], "--max_length=0: must be an integer from"),
        (
            translate,
            ["--logdir=x", "--max_source_length=9999999"],
            "--max_source_length=9999999: must be an integer from 1 to 1000000",
        ),
        (export, ["--logdir=x", "--output=y", "--top_k=0"], "--top_k=0: must be an integer of at"),
        (
            export,
            ["--logdir=x", "--output=y", "--checkpoint_step=-1"],
            "--checkpoint_step=-1: must",
        ),
        (evaluate, ["--saved_model=x", "--beam_sise=2"], "did you mean '--beam_size'"),
        (export, ["--logdir=x"], "export: --output is required"),
        (translate, ["--model=x"], "no flag --model"),
        (build_corpus, ["--output=x", "--langs=de"], "did you mean '--languages'"),
        (build_corpus, ["--out=x"], "no flag --out"),
        (build_corpus, ["--output=x", "--max_per_language=-1"], "--max_per_language=-1: must be"),
        (build_corpus, ["--output=x", "--packages=,"], "--packages is empty"),
        (
            prepare,
            ["--input=x", "--output=y", "--target_lang=../x"],
            "--target_lang=../x: must be the code of a language, e.g. en",
        ),
        (train_vocab, ["--outptu=x"], "did you mean '--output'"),
        (
            train_vocab,
            ["--data_dir=x", "--output=y", "--source_size=9"],
            "--source_size=9: must be",
        ),
        (
            train_vocab,
            ["--data_dir=x", "--output=y", "--max_sentences=5"],
            "must be an integer of at least 100",
        ),
        (
            train_vocab,
            ["--data_dir=x", "--output=y", "--temperature=0"],
            "must be a positive number",
        ),
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
        (translate, ["--logdir={tmp}/none", "--input={tmp}/in"], "no such directory"),
        (evaluate, ["--saved_model={tmp}/none"], "--data_dir is needed"),
        (evaluate, ["--logdir={tmp}"], "no run there"),
        (evaluate, ["--logdir={tmp}", "--data_dir={tmp}/none"], "does not exist"),
        (evaluate, ["--logdir={tmp}", "--data_dir={tmp}"], "no dev directory"),
        (export, ["--logdir={tmp}", "--output={tmp}/out"], "no run there"),
        (
            export,
            ["--logdir={tmp}", "--output={tmp}/out", "--top_k=9"],
            "--top_k=9: must be an integer from 1 to 4",
        ),
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


@pytest.mark.parametrize(
    "tool, output, message",
    [
        (translate, "{tmp}", "is a directory; name a file"),
        (translate, "{tmp}/none/out", "there is no directory {tmp}/none"),
        (translate, "{tmp}/file/out", "there is no directory {tmp}/file"),
        *[
            (tool, output, message)
            for tool in (evaluate, export, train_vocab, build_corpus)
            for output, message in (
                ("{tmp}/file", "is a file; name a directory"),
                ("{tmp}/file/deeper/out", ": {tmp}/file is not a directory"),
            )
        ],
    ],
)
def test_outputs_are_checked_before_any_work(tool, output, message, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(_cli, "load_tensorflow", lambda: pytest.fail("began to work"))
    (tmp_path / "file").write_bytes(b"red\n")
    flags = {
        translate: ["--saved_model=x", f"--input={tmp_path}/file"],
        evaluate: ["--saved_model=x", "--data_dir=x"],
        export: ["--logdir=x"],
        train_vocab: ["--data_dir=x"],
        build_corpus: [],
    }[tool]
    output = output.format(tmp=tmp_path)
    assert tool.main([*flags, f"--output={output}"]) == 1
    name = tool.__name__.split(".")[-1]
    err = capfd.readouterr().err
    assert err.startswith(f"{name}: --output={output}")
    assert err.endswith(message.format(tmp=tmp_path) + "\n")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


_PATHS = re.compile(
    r"(.*_)?(dir|out|output|input|html|json|plot|program|compare|docs|corpus|shortlist|saved_model|logdir|baselines)"
)


COMMANDS = [
    f"{folder}.{path.stem}"
    for folder in ("tools", "benchmarks")
    for path in sorted((Path(__file__).parents[2] / folder).glob("*.py"))
    if "def main(argv" in path.read_text()
] + ["lingvo_moe.training.flags"]


def _needed(flags):
    """Values for the flags that a command requires."""
    names = (n for n in flags.Names() if "(required)" in flags[n].help or n == "saved_model")
    return dict.fromkeys(names, "x")


def test_the_commands_are_found():
    assert {"tools.evaluate", "tools.build_files", "benchmarks.decode"} <= {*COMMANDS}


@pytest.mark.parametrize("name", COMMANDS[:-1])
def test_every_flag_that_names_a_path_is_checked(name, capsys):
    """The trainer checks its own together with those in parameters; see test_trainer_flags.py."""
    define = importlib.import_module(name).define_flags
    for flag in filter(_PATHS.fullmatch, define().Names()):
        others = {**_needed(define()), flag: "s3://x/y"}
        if flag == "logdir":
            others.pop("saved_model", None)
        wrong = {"s3://x/y": "remote storage is not"}
        if flag in ("logdir", "saved_model"):
            wrong["x[1]"] = "checkpoints and models could not"
        for path, why in wrong.items():
            with pytest.raises(SystemExit):
                define().Parse(
                    [f"--{name}={value}" for name, value in {**others, flag: path}.items()]
                )
            assert f"--{flag}={path}: {why}" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_can_be_read_from_a_file_and_is_explained(name, tmp_path):
    define = importlib.import_module(name).define_flags
    flags = define()
    assert all(flags[n].help.strip() for n in flags.Names())
    text = _needed(flags)
    (tmp_path / "flags").write_text("".join(f"--{n}={value}\n" for n, value in text.items()))
    read = define().Parse([f"--flagfile={tmp_path / 'flags'}"]).Values()
    assert read == {**{n: flags[n].default for n in flags.Names()}, **text}


@pytest.mark.parametrize(
    "tool, flag, message",
    [
        (translate, "--input=gs://bucket/x", "--input=gs://bucket/x: remote storage is not"),
        (translate, "--output=http://host/x", "--output=http://host/x: remote"),
        (translate, "--saved_model=s3://x/y", "--saved_model=s3://x/y: remote"),
        (translate, "--logdir=~/run", "--logdir=~/run: '~' is only replaced by a shell"),
        (evaluate, "--logdir=runs[1]", "--logdir=runs[1]: checkpoints and models could not"),
        (evaluate, "--data_dir=hdfs://x/y", "--data_dir=hdfs://x/y: remote"),
        (export, "--output=a\\b", "--output=a\\b: checkpoints and models could not be read"),
        (prepare, "--input=gs://x/y", "--input=gs://x/y: remote"),
        (build_corpus, "--output=gs://x/y", "--output=gs://x/y: remote"),
    ],
)
def test_paths_that_cannot_be_worked_with(tool, flag, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    needed = {translate: ["--saved_model=m"], evaluate: ["--saved_model=m"]}.get(tool, [])
    needed = [] if flag.startswith(("--logdir", "--saved_model")) else needed
    for name in ("--logdir", "--output"):
        if tool in (export, prepare) and not flag.startswith(name):
            needed += [f"{name}=x"] if tool is export or name == "--output" else []
    with pytest.raises(SystemExit) as stop:
        tool.main([*needed, flag])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


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
    names = [name for name in COMMANDS if not name.startswith("benchmarks.")]
    code = f"""
import importlib, sys
import lingvo_moe.trainer
for name in {names}:
    importlib.import_module(name).define_flags()
print([name for name in ("tensorflow", "jax") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


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
_MAKE_NO_FILES = {"build_files", "import_graph", "score", "serve", "translate", "verify"}


@pytest.mark.parametrize("path", sorted((ROOT / "tools").glob("[a-z]*.py")), ids=lambda p: p.stem)
def test_a_command_ends_with_what_it_made(path):
    text = path.read_text("utf-8")
    assert ("_cli.made(" in text) != (path.stem in _MAKE_NO_FILES)


def test_what_was_made_and_the_next_command_are_lines(capsys):
    _cli.made("a.json", Path("b.html"))
    _cli.made("c", next="python -m tools.x")
    lines = ["written: a.json, b.html", "written: c", "next: python -m tools.x"]
    assert capsys.readouterr().out.splitlines() == lines


def test_a_model_flag_alone_lists_the_experiments(capsys):
    with pytest.raises(SystemExit) as stop:
        verify.main(["--num_devices=2", "--model"])
    assert stop.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == registry.AllNames()
    assert all(len(line.split(maxsplit=1)) == 2 for line in lines)
    (tiny,) = (line for line in lines if line.startswith("mt.M4Tiny "))
    assert tiny.endswith("Seconds, not minutes: for tests and for trying things out.")
    with pytest.raises(SystemExit):
        verify.main([])
    assert "--model is required; --model alone lists all" in capsys.readouterr().err
