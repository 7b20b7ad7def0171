"""Signals request a stop; the second Ctrl-C raises KeyboardInterrupt."""

import os
import signal

import pytest

from lingvo_moe.core.engine.loop.interrupt import StopRequest


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
