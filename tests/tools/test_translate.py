"""python -m tools.translate: where its output goes; test_odd_lines.py tests the lines themselves."""

import contextlib
import os
import pty
import re
import subprocess
from types import SimpleNamespace

import pytest
import toy_translation as toy
from processes import start_python

from lingvo_moe.core.nested_map import NestedMap
from tools import translate

# The command with a translator that returns capitals, so that it starts at once.
_WITH_STUB = """
import sys
from types import SimpleNamespace
from tools import _cli, _models, translate

class Capitals:
    def Translate(self, lines, languages=None):
        texts = [[line.decode("utf-8", "replace").upper()] for line in lines]
        return SimpleNamespace(translations=texts, truncated=[b"long" in line for line in lines])

_cli.load_tensorflow = lambda: None
_models.open_translator = lambda args: (Capitals(), {})
sys.exit(translate.main(["--saved_model=x", *sys.argv[1:]]))
"""


def test_interactive_at_a_terminal():
    """Lines that can be typed; a terminal's line has no NUL and ends with CR or newline."""
    ours, theirs = pty.openpty()
    # Of most people's terminals: what is typed must be UTF-8, or it is an error to Python.
    env = {"TERM": "dumb", "PYTHONIOENCODING": "utf-8:strict"}
    process = start_python("-c", _WITH_STUB, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)

    def until_prompt() -> bytes:
        seen = b""
        with contextlib.suppress(OSError):
            while not seen.endswith(b"> "):
                seen += os.read(ours, 1000)
        return seen

    assert b"one line each" in until_prompt()
    answers = {
        "größer".encode(): "GRÖSSER",
        b"": "",
        b"   ": "   ",
        b"\xff\xfe": "\ufffd\ufffd",
        "red\u2028green".encode(): "RED\u2028GREEN",
    }
    for line, answer in answers.items():
        os.write(ours, line + b"\n")
        said = until_prompt()
        assert said.endswith(f"\r\n{answer}\r\n> ".encode()), said
    os.write(ours, b"long\n")
    assert b"too long" in until_prompt()
    os.write(ours, b"\x04")
    assert process.wait(30) == 0
    os.close(ours)


class _Stops:
    """Replaces the translator: capitals, and `error` in call number `stop_at`, counted from when it was set."""

    def __init__(self, monkeypatch, directory):
        (directory / "assets.extra").mkdir(parents=True, exist_ok=True)
        (directory / "assets.extra/manifest.sha256").touch()
        monkeypatch.setattr(translate._models, "open_translator", lambda args: (self, {}))
        self.languages, self.calls, self.stop_at, self.error = (), [], 0, OSError("disk full")

    def Translate(self, lines, languages=None):
        self.calls.append(len(lines))
        if len(self.calls) == self.stop_at:
            raise self.error
        texts = [[line.decode().upper()] for line in lines]
        return NestedMap(translations=texts, truncated=[b"long" in line for line in lines])


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_what_was_done_before_it_stopped_is_not_done_again(tmp_path, monkeypatch, capfd, error):
    """And the output is whole or not there."""
    stops = _Stops(monkeypatch, tmp_path / "model")
    text = "".join(f"red {i}\n" for i in range(9)) + "long, and without a newline"
    (tmp_path / "in").write_text(text)
    (tmp_path / "out").write_bytes(b"older\n")
    flags = [f"--saved_model={tmp_path}/model", f"--input={tmp_path}/in", "--batch_size=2"]
    flags.append(f"--output={tmp_path}/out")

    def run(stop_at=0):
        stops.calls, stops.stop_at, stops.error = [], stop_at, error
        return translate.main(flags), sum(stops.calls)

    assert run(3) == (130 if isinstance(error, KeyboardInterrupt) else 1, 6)
    told = "translate: stopped; the same command resumes from there"
    said = capfd.readouterr().err
    assert (told if isinstance(error, KeyboardInterrupt) else "disk full") in said
    assert re.search(r"translate: 2 of 10 lines, \d+ a second, \d+s left\n", said)
    assert (tmp_path / "out").read_bytes() == b"older\n"
    assert run(2)[1] == 4
    # A changed line is translated again with its batch, and another model has nothing of this one.
    (tmp_path / "in").write_text(text.replace("red 0", "blue"))
    assert run(0)[1] == 2 + 4
    said = capfd.readouterr().err
    assert re.search(r"translate: 10 lines, 4 of them from before, \d+ a second\n", said)
    assert "line 10 is too long: its end is not translated" in said
    assert (tmp_path / "out").read_text() == text.replace("red 0", "blue").upper()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "model", "out"]
    assert run(3)[1] == 6
    os.utime(tmp_path / "model/assets.extra/manifest.sha256", ns=(0, 7))
    assert run()[1] == 10


def test_equal_batches_of_one_run_are_not_said_to_be_from_before(tmp_path, monkeypatch, capfd):
    stops = _Stops(monkeypatch, tmp_path / "model")
    (tmp_path / "in").write_text("red\n" * 6)
    flags = [f"--saved_model={tmp_path}/model", f"--input={tmp_path}/in", "--batch_size=2"]
    assert translate.main([*flags, f"--output={tmp_path}/out"]) == 0
    assert stops.calls == [2] and (tmp_path / "out").read_text() == "RED\n" * 6
    assert re.search(r"translate: 6 lines, \d+ a second\n", capfd.readouterr().err)


def test_an_input_that_is_not_there_is_refused_by_its_flag(tmp_path, capfd):
    lacking = f"--input={tmp_path}/nofile.txt"
    assert translate.main(["--saved_model=x", lacking]) == 1
    told = f"translate: {lacking}: cannot be read (No such file or directory)\n"
    assert capfd.readouterr().err == told


def test_a_language_needs_a_model_that_routes_by_it(tmp_path, monkeypatch, capfd):
    translator = SimpleNamespace(languages=())
    monkeypatch.setattr(translate._models, "open_translator", lambda args: (translator, {}))
    assert translate.main(["--saved_model=x", f"--input={__file__}", "--language=klingon"]) == 1
    told = "--language=klingon has no effect: this model does not route by"
    assert told in capfd.readouterr().err


def test_an_output_that_is_no_file_is_written_in_place(tmp_path):
    """A pipe gets its lines as they are done, and stays a pipe."""
    (tmp_path / "in").write_bytes(b"red\ngreen\n")
    os.mkfifo(tmp_path / "pipe")
    flags = [f"--input={tmp_path}/in", "--batch_size=1", f"--output={tmp_path}/pipe"]
    with start_python("-c", _WITH_STUB, *flags, stdout=None, stderr=None) as process:
        assert (tmp_path / "pipe").read_bytes() == b"RED\nGREEN\n"
        assert process.wait(30) == 0
    assert (tmp_path / "pipe").is_fifo()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "pipe"]


def test_who_reads_our_output_may_stop():
    """`translate | head -1` ends quietly."""
    flags = ("--quiet", "--batch_size=1")
    with start_python("-c", _WITH_STUB, *flags, stdin=subprocess.PIPE, text=False) as process:
        process.stdin.write(b"red\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"RED\n"  # one line in, one out, at once
        process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(b"green\n" * 10)
            process.stdin.close()
        assert process.wait(30) == 1
        assert process.stderr.read() == b""


def test_several_drawn_translations_with_noise_of_a_run(tmp_path, capfd):
    toy.save_run(tmp_path / "run", toy.train_vocab(toy.sentences(200)), more=toy.SMALL)
    (tmp_path / "in").write_bytes(b"red\n\nopen file")
    flags = [f"--logdir={tmp_path}/run", f"--input={tmp_path}/in", "--quiet", "--max_length=9"]
    assert translate.main([*flags, "--nbest=3", "--temperature=1", "--noise=0,1,0"]) == 0
    lines = [line.split("\t") for line in capfd.readouterr().out.split("\n")]
    assert [line[0] for line in lines] == list("1112333")
    assert lines[3] == ["2", "0.0000", ""]
    for _, score, text in lines[:3] + lines[4:]:
        assert float(score) < 0 and set(text.split()) <= {"<blank>"}
