"""Commands: a reader of the output that goes away, what comes through quietly, and Ctrl-C."""

import contextlib
import os
import pty
import signal
import subprocess
import sys

import pytest
from processes import run_python

from lingvo_moe.core.console.interrupt import Stopped, StopRequest
from lingvo_moe.core.console.quiet import quiet

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


def test_what_succeeds_says_nothing(capfd):
    os.write(2, b"before\n")
    with quiet():
        os.write(2, b"a note\n")
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "before\nafter\n"


def test_what_fails_says_why(capfd):
    with pytest.raises(ImportError), quiet():
        _fail_loudly()
    assert capfd.readouterr().err == "the reason\n"


def _fail_loudly() -> None:
    os.write(2, b"the reason\n")
    raise ImportError


def test_no_descriptor_is_left_open():
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with quiet():
            pass
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_request(number, capfd):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert (stop.requested, stop.signal) == (True, number)
    assert signal.getsignal(number) is before
    err = capfd.readouterr().err
    assert err.startswith(f"{signal.Signals(number).name}: stopping after this step")
    assert err.count("\n") == 1


def test_a_second_ctrl_c_interrupts():
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert stop.signal == signal.SIGTERM


def test_a_second_sigterm_is_patient():
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.requested


def test_a_handler_that_python_does_not_know_is_left_alone(monkeypatch):
    """signal.signal returns None for a handler that C code set."""
    set_handlers = []

    def fake(number, handler):
        set_handlers.append(handler)

    monkeypatch.setattr(signal, "signal", fake)
    with StopRequest():
        pass
    assert set_handlers[2:] == [signal.SIG_DFL, signal.SIG_DFL]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_where_nothing_is_lost_a_signal_ends_the_work_at_once(number):
    with StopRequest() as stop:
        with pytest.raises(Stopped, match=signal.Signals(number).name) as found, stop.AtOnce():
            os.kill(os.getpid(), number)
        assert found.value.status == 128 + number and not stop.requested
        os.kill(
            os.getpid(), signal.SIGTERM
        )  # outside the block it is a request, which the next block answers
        with pytest.raises(Stopped, match="SIGTERM"), stop.AtOnce():
            pytest.fail("the block began")


_COMPILES = """
import os, signal, sys, time
def compile(*_):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(300)
"""
_TRAINER = """
from lingvo_moe import trainer
from lingvo_moe.core.engine.tf_engine import TfEngine
TfEngine.BuildStep = compile
sys.exit(trainer.main(["--model=toy_task.Line", f"--logdir={sys.argv[1]}", "--num_devices=1"]))
"""
_TOOL = """
from lingvo_moe.tools import _cli
with _cli.CompilerProgress() as progress:
    sys.exit(_cli.attempt_compiling("plan", lambda: progress.Watch(compile)))
"""


@pytest.mark.parametrize("command, last", [
    (_TRAINER, "SIGTERM: stopped while it compiled, before any step; the same command begins there again"),
    (_TOOL, "plan: interrupted; nothing was written"),
])  # fmt: skip
def test_sigterm_of_a_compile_ends_the_command_with_a_line(command, last, tmp_path):
    done = run_python("-c", _COMPILES + command, str(tmp_path / "run"), timeout=120)
    assert done.returncode == 128 + signal.SIGTERM
    assert done.stderr.splitlines()[-1] == last and "Traceback" not in done.stderr
