"""Signals request a stop; the second Ctrl-C raises KeyboardInterrupt."""

import os
import signal

import pytest
from processes import run_python

from lingvo_moe.core.console.interrupt import Stopped, StopRequest


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
