"""python -m tools.translate: as many lines out as in, from a file, a pipe and a terminal, in any batch."""

import contextlib
import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece
import toy_translation as toy
from odd_lines import MATRIX

from lingvo_moe.tasks.mt.export import export
from lingvo_moe.tasks.mt.saved_translator import SavedTranslator
from lingvo_moe.tasks.mt.translator import TranslateOptions, Translator
from tools import translate

_ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory) -> str:
    vocab = toy.train_vocab(toy.sentences(200))
    size = sentencepiece.SentencePieceProcessor(model_proto=vocab).vocab_size()
    model = toy.ToyModel(size, size)
    options = TranslateOptions(beam_size=2, max_source_length=8, max_length=10, rows=4)
    path = tmp_path_factory.mktemp("saved") / "model"
    export(Translator(model, model.InitTheta(), vocab, vocab, options), path)
    return str(path)


@pytest.fixture(scope="module")
def opened(saved_model):
    return SavedTranslator(saved_model)


@pytest.fixture
def run(monkeypatch, opened, saved_model, tmp_path, capfd):
    """Runs the command in this process, loading the model once for all tests."""
    monkeypatch.setattr(translate._cli, "open_translator", lambda args: (opened, {}))

    def call(data: bytes, *flags: str, by_file: bool = False) -> tuple[bytes, str]:
        argv = [f"--saved_model={saved_model}", *flags]
        out = tmp_path / "out.txt"
        if by_file:
            (tmp_path / "in.txt").write_bytes(data)
            argv += [f"--input={tmp_path}/in.txt"]
        else:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        assert translate.main([*argv, f"--output={out}"]) == 0
        return out.read_bytes(), capfd.readouterr().err

    return call


@pytest.mark.parametrize("name", MATRIX)
def test_lines_out_are_lines_in(name, run):
    data = MATRIX[name]
    out, err = run(data)
    lines = data.count(b"\n") + (data != b"" and not data.endswith(b"\n"))
    assert out.count(b"\n") == data.count(b"\n")
    assert len(out.decode().splitlines()) == lines
    assert f"{lines} lines in" in err
    assert run(data, "--batch_size=1" if lines < 100 else "--batch_size=7")[0] == out
    assert run(data, "--batch_size=32", by_file=True)[0] == out
    assert ("line 1 is too long" in err) == (name == "long")


def test_blank_stays_blank_and_text_does_not(run, opened):
    out, _ = run(b"\n  \nred house\n\xef\xbb\xbf\n")
    want = opened.Translate(["red house"]).translations[0][0]
    assert want
    assert out.decode().split("\n") == ["", "", want, "", ""]


def test_a_real_process_in_a_pipe(saved_model, opened):
    """The command itself: text on stdout, the rest on stderr, no other output."""
    done = subprocess.run(
        [sys.executable, "-m", "tools.translate", f"--saved_model={saved_model}"],
        input=b"red\n\nopen file\n",
        capture_output=True,
        cwd=_ROOT,
    )
    assert done.returncode == 0, done.stderr
    want = [row[0] for row in opened.Translate(["red", "", "open file"]).translations]
    assert done.stdout.decode() == "".join(f"{w}\n" for w in want)
    notes = done.stderr.decode().splitlines()
    assert all(note.startswith("translate: 3 lines") for note in notes), notes


# The command with a translator that turns letters to capitals, to start at once.
_WITH_STUB = """
import sys
from types import SimpleNamespace
from tools import _cli, translate

class Capitals:
    def Translate(self, lines, languages=None):
        texts = [[line.decode("utf-8", "replace").upper()] for line in lines]
        return SimpleNamespace(translations=texts, truncated=[b"long" in line for line in lines])

_cli.load_tensorflow = lambda: None
_cli.open_translator = lambda args: (Capitals(), {})
sys.exit(translate.main(["--saved_model=x", *sys.argv[1:]]))
"""


def test_interactive_at_a_terminal():
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", _WITH_STUB],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=_ROOT,
        env={**os.environ, "TERM": "dumb"},
    )
    os.close(theirs)

    def until(text: str) -> str:
        seen = b""
        while text.encode() not in seen:
            try:
                seen += os.read(ours, 1000)
            except OSError:
                break
        return seen.decode()

    until("> ")
    os.write(ours, "größer\n".encode())
    assert "GRÖSSER\r\n> " in until("\n> ")
    os.write(ours, b"\n")
    assert "\n\r\n> " in until("\n\r\n> ")  # an empty line is answered by one
    os.write(ours, b"long\n")
    assert "too long" in until("> ")
    os.write(ours, b"\x04")
    assert process.wait(30) == 0
    os.close(ours)


def test_output_is_whole_or_not_there(run, opened, tmp_path, monkeypatch, capfd):
    class Fails:
        calls = 0

        def Translate(self, lines, languages=None):
            Fails.calls += 1
            if Fails.calls == 2:
                raise OSError("disk full")
            return opened.Translate(lines)

    monkeypatch.setattr(translate._cli, "open_translator", lambda args: (Fails(), {}))
    (tmp_path / "in").write_bytes(b"red\n" * 4)
    (tmp_path / "out").write_bytes(b"older\n")
    argv = [
        "--saved_model=x",
        f"--input={tmp_path}/in",
        f"--output={tmp_path}/out",
        "--batch_size=2",
    ]
    assert translate.main(argv) == 1
    assert "disk full" in capfd.readouterr().err
    assert (tmp_path / "out").read_bytes() == b"older\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]


def test_an_output_that_is_no_file_is_written_in_place(tmp_path):
    """A pipe gets its lines as they are done, and stays a pipe."""
    (tmp_path / "in").write_bytes(b"red\ngreen\n")
    os.mkfifo(tmp_path / "pipe")
    command = [sys.executable, "-c", _WITH_STUB, f"--input={tmp_path}/in", "--batch_size=1"]
    with subprocess.Popen([*command, f"--output={tmp_path}/pipe"], cwd=_ROOT) as process:
        assert (tmp_path / "pipe").read_bytes() == b"RED\nGREEN\n"
        assert process.wait(30) == 0
    assert (tmp_path / "pipe").is_fifo()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "pipe"]


def test_who_reads_our_output_may_stop():
    """`translate | head -1` ends quietly."""
    with subprocess.Popen(
        [sys.executable, "-c", _WITH_STUB, "--quiet", "--batch_size=1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=_ROOT,
    ) as process:
        process.stdin.write(b"red\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"RED\n"  # one line in, one out, at once
        process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(b"green\n" * 10)
            process.stdin.close()
        assert process.wait(30) == 1
        assert process.stderr.read() == b""
