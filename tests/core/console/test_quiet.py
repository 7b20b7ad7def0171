"""quiet: nothing on standard error, not even from C, unless the block fails."""

import os

import pytest

from lingvo_moe.core.console.quiet import quiet


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
