"""Progress: what is printed at a terminal and elsewhere, and how often."""

import io
import threading

import pytest

from lingvo_moe.core.console import units, waiting as waiting_module
from lingvo_moe.core.console.waiting import LineProgress, Waiting
from lingvo_moe.core.engine.loop.progress import StepProgress, StepWork


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_elsewhere_the_first_the_last_and_one_in_five_seconds():
    out, clock = io.StringIO(), Clock()
    with LineProgress(out, interval=5.0, clock=clock) as progress:
        for i in range(97):
            progress(f"reading {i}")
            clock.now += 0.25
    lines = out.getvalue().splitlines()
    assert lines == [f"reading {i}" for i in (0, 20, 40, 60, 80, 96)]


def test_at_a_terminal_lines_take_each_others_place(monkeypatch):
    monkeypatch.setenv("COLUMNS", "11")
    out = Terminal()
    with LineProgress(out) as progress:
        progress("first")
        progress("the second, which is long")
    assert out.getvalue() == "\r\x1b[2Kfirst\r\x1b[2Kthe second\n"


def test_what_takes_long_is_shown_with_its_seconds_while_it_does_not_return(monkeypatch):
    shown, clock = threading.Event(), Clock()

    class Log(io.StringIO):
        def write(self, text):
            if "..." in text and text.endswith(" s\n"):
                shown.set()
            return super().write(text)

    monkeypatch.setattr(waiting_module, "_TICK", 0.001)
    out = Log()
    with Waiting("lowering", out, interval=10.0, clock=clock) as waiting:
        clock.now = 1.0
        waiting("compiling")  # too soon for another line
        clock.now = 13.0
        assert shown.wait(60)
        waiting("loading")  # which takes no time
    assert out.getvalue().splitlines() == ["lowering ...", "compiling ... 12 s"]


def test_steps_elsewhere(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("time.monotonic", clock)
    out = io.StringIO()
    progress = StepProgress(100, 200, "tokens", stream=out)
    clock.now = 10.0
    assert progress.Update(110, 2.5, 5000.0) == (500, None, None, 0.0)
    clock.now = 40.0  # slower: 3 s a step, 2 on average
    assert (
        progress.Update(120, float("nan"), 3000.0, skipped=2, note="3.1% dropped at worst")[0]
        == 100
    )
    progress.Close()
    assert out.getvalue().splitlines() == [
        "running the first step ...",
        "step 110/200  loss 2.5000  500 tokens/s  1m30s left",
        "step 120/200  loss nan  100 tokens/s  2m40s left  3.1% dropped at worst  (2 not finite, skipped)",
    ]


def test_the_first_step_alone_tells_nothing_of_the_others(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("time.monotonic", clock)
    out = io.StringIO()
    progress = StepProgress(0, 11, "tokens", stream=out)
    clock.now = 100.0  # it compiles
    progress.Update(1, 2.5, 100.0)
    clock.now = 105.0
    progress.Update(6, 2.5, 100.0)
    progress.Close()
    assert out.getvalue().splitlines() == [
        "running the first step ...",
        "step 1/11  loss 2.5000",
        "step 6/11  loss 2.5000  20 tokens/s  5s left",
    ]


@pytest.mark.parametrize("peak, utilisation, text", [
    (None, None, "4.00 GFLOP/s  5s left"),
    (16e9, 0.25, "4.00 GFLOP/s  25.0% MFU  5s left"),
    (3e9, None, "4.00 GFLOP/s  5s left"),  # a peak that cannot be right
])  # fmt: skip
def test_model_flops_and_utilisation(monkeypatch, peak, utilisation, text):
    clock, out = Clock(), io.StringIO()
    monkeypatch.setattr("time.monotonic", clock)
    progress = StepProgress(0, 20, "images", StepWork(2 * 10**9, peak), stream=out)
    clock.now = 5.0
    assert progress.Update(10, 1.0, 50.0) == (10.0, 4e9, utilisation, 0.0)
    assert f"10 images/s  {text}" in out.getvalue()


def test_waiting_for_input_is_shown_where_it_matters(monkeypatch):
    clock, out = Clock(), io.StringIO()
    monkeypatch.setattr("time.monotonic", clock)
    progress = StepProgress(0, 30, "tokens", stream=out)
    for step, waited in ((10, 0.05), (20, 2.0)):
        clock.now += 10.0
        speed = progress.Update(step, 1.0, 50.0, waited=waited)
    assert speed.input_wait == pytest.approx(0.2)
    _, first, second = out.getvalue().splitlines()
    assert "waiting" not in first and "20% waiting for input" in second


@pytest.mark.parametrize(
    "seconds, text", [(0, "0s"), (59.6, "1m00s"), (3599, "59m59s"), (3725, "1h02m")]
)
def test_seconds_as_on_a_clock(seconds, text):
    assert units.clock(seconds) == text
