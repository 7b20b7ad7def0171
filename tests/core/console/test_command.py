"""A command ends quietly if the reader of its output goes away, whatever it writes with and catches."""

import contextlib
import os
import pty
import subprocess
import sys

import pytest

_MAIN = """
import sys
from lingvo_moe.core.console.command import run

def main():
    try:
        {body}
    except (ValueError, OSError) as e:
        print("caught", e, file=sys.stderr)
        return 1
    finally:
        print("cleaned up", file=sys.stderr)
    return 3

run(main)
"""


def _ends(body: str, reads: bool) -> tuple[int, bytes, bytes]:
    command = [sys.executable, "-c", _MAIN.format(body=body)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        if not reads:
            process.stdout.close()
            return process.wait(timeout=60), b"", process.stderr.read()
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err


@pytest.mark.parametrize("body", [
    "print('line\\n' * 9999)",
    "print('kept until the end')",
    "sys.stdout.buffer.write(b'x' * 99999)",
])  # fmt: skip
def test_nobody_reads(body):
    assert _ends(body, reads=False) == (141, b"", b"cleaned up\n")


@pytest.mark.parametrize(
    "body, said",
    [("print('kept until the end')", b"cleaned up\nerror: "), ("print('x' * 9999)", b"caught ")],
)
def test_a_full_disk(tmp_path, body, said):
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); "
    with open(tmp_path / "out", "wb") as out:
        done = subprocess.run(
            [sys.executable, "-c", _MAIN.format(body=full + body)],
            stdout=out,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
            env={k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"},
        )
    error = said + b"[Errno 27] File too large: 'standard output'\n"
    assert done.returncode == 1 and error in done.stderr and done.stderr.count(b"Errno") == 1


def test_somebody_reads():
    assert _ends("print('Grüße')", reads=True) == (3, "Grüße\n".encode(), b"cleaned up\n")
    assert _ends("sys.exit(5)", reads=False)[0] == 5


def test_logging_stays_as_python_has_it():
    """Warnings are plain lines; absl's messages below them are not printed."""
    body = (
        "import logging; from absl import logging as absl_logging; "
        "logging.basicConfig(format='%(message)s'); "
        "logging.warning('one'); absl_logging.warning('two'); absl_logging.info('hidden')"
    )
    assert _ends(body, reads=True) == (3, b"", b"one\ntwo\ncleaned up\n")


def test_a_tool_of_ours():
    command = [sys.executable, "-m", "tools.reproduce", "--list"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert (process.wait(timeout=60), process.stderr.read()) == (141, b"")


_HOSTILE = "a\x1b]0;title\x07b\x1b[2J\x9b\x7f\r\x1b[1mbold\x1b[0m\tc\n"
_SHOWN = "a\\x1b]0;title\\x07b\\x1b[2J\\x9b\\x7f\\x0d\x1b[1mbold\x1b[0m\tc"


def _at_terminal(body: str) -> str:
    """The output of a command at a terminal, standard output and error together."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", _MAIN.format(body=body)]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs):
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # at the end
            while got := os.read(ours, 4096):
                shown += got
    os.close(ours)
    return shown.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("body", [
    "print({!r}, end='')",
    "sys.stdout.buffer.write({!r}.encode())",
    "sys.stderr.write({!r})",
    "import logging; logging.getLogger('x').warning({!r}.strip())",
])  # fmt: skip
def test_control_characters_of_others_do_not_reach_the_terminal(body):
    assert _at_terminal(body.format(_HOSTILE)) == f"{_SHOWN}\ncleaned up\n"


def test_messages_are_escaped_everywhere_and_data_in_files_are_as_they_are():
    body = f"print({_HOSTILE!r}, end=''); raise ValueError({_HOSTILE!r})"
    assert _ends(body, reads=True) == (
        1,
        _HOSTILE.encode(),
        f"caught {_SHOWN}\n\ncleaned up\n".encode(),
    )
    from_say = f"from lingvo_moe.core.console.command import say; say({_HOSTILE!r})"
    said = _SHOWN.replace("\x1b", "\\x1b").encode()
    assert _ends(from_say, reads=True) == (3, b"", said + b"\n\ncleaned up\n")


def test_a_line_of_progress_moves_the_cursor_itself():
    body = (
        "from lingvo_moe.core.console.waiting import LineProgress; "
        f"show = LineProgress(); show({_HOSTILE.strip()!r}); show.Close()"
    )
    said = _SHOWN.replace("\x1b", "\\x1b")
    assert _at_terminal(body) == f"\r\x1b[2K{said}\ncleaned up\n"
