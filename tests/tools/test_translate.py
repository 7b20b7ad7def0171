"""python -m tools.translate: where its output goes; test_odd_lines.py tests the lines themselves."""

import contextlib
import os
import pty
import subprocess
from types import SimpleNamespace

from processes import start_python

from lingvo_moe.core.nested_map import NestedMap
from tools import translate

# The command with a translator that returns capitals, so that it starts at once.
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


def test_output_is_whole_or_not_there(tmp_path, monkeypatch, capfd):
    class Fails:
        calls = 0

        def Translate(self, lines, languages=None):
            Fails.calls += 1
            if Fails.calls == 2:
                raise OSError("disk full")
            return NestedMap(translations=[["x"]] * len(lines), truncated=[False] * len(lines))

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


def test_a_language_needs_a_model_that_routes_by_it(tmp_path, monkeypatch, capfd):
    translator = SimpleNamespace(languages=())
    monkeypatch.setattr(translate._cli, "open_translator", lambda args: (translator, {}))
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
