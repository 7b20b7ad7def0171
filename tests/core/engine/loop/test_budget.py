"""The budget of a run: what counts, and the step that it foretells, with made-up clocks."""

import pytest

from lingvo_moe.core.config.registry import TrainParams
from lingvo_moe.core.engine.loop.budget import Budget


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def _steps(budget, clock, first, until, seconds, units=32, every=1):
    """Does steps, counted every so many of them, up to the foretold end or `until`; returns the last one."""
    step = counted = first
    while step < min(budget.last, until):
        step += 1
        clock.now += seconds
        if step % every == 0 or step in (first + 1, budget.last):
            budget.Count(step, units * (step - counted))
            counted = step
    return step


@pytest.mark.parametrize("every", [1, 7])
@pytest.mark.parametrize("limit, last, why", [
    ({"max_units": 3200}, 100, "train.max_units=3200 is used up"),
    ({"max_cpu_seconds": 50.0}, 101, "train.max_cpu_seconds=50 is used up"),  # the first is free
    ({"max_units": 3200, "max_cpu_seconds": 20.0}, 41, "train.max_cpu_seconds=20 is used up"),
    ({"max_units": 3200, "max_steps": 60}, 60, "train.max_steps=60 is reached"),
])  # fmt: skip
def test_a_run_ends_where_its_nearest_limit_is(limit, last, why, every):
    clock = Clock()
    budget = Budget(TrainParams().Set(**limit), clock)
    assert _steps(budget, clock, 0, 1000, seconds=0.5, every=every) == last
    assert budget.WhyDone(last) == why
    assert not budget.WhyDone(last - 1)


def test_the_end_is_foretold_and_follows_the_speed():
    clock = Clock()
    budget = Budget(TrainParams().Set(max_cpu_seconds=50.0), clock)
    _steps(budget, clock, 0, 11, seconds=0.5)
    assert budget.last == 101
    _steps(budget, clock, 11, 31, seconds=0.25)
    assert budget.last == 31 + 120  # 40 s are left, at 3 steps a second on average


def test_a_run_goes_on_with_what_it_has_used_and_compiling_is_free():
    clock = Clock()
    budget = Budget(TrainParams().Set(max_cpu_seconds=50.0), clock)
    _steps(budget, clock, 0, 41, seconds=0.5)
    assert budget.GetState() == {"units": 41 * 32, "cpu_seconds": 20.0}
    again = Budget(TrainParams().Set(max_cpu_seconds=50.0), clock)
    again.Begin(41, budget.GetState())
    assert again.last == 41 + 62  # 30 s are left, at 41 steps in 20 s
    clock.now += 1000  # the first step also compiles
    assert _steps(again, clock, 41, 1000, seconds=0.5) == 102
    shorter = Budget(TrainParams().Set(max_cpu_seconds=10.0), clock)
    shorter.Begin(41, budget.GetState())
    assert shorter.WhyDone(41) == "train.max_cpu_seconds=10 is used up"


def test_paused_time_is_free():
    clock = Clock()
    budget = Budget(TrainParams().Set(max_cpu_seconds=50.0), clock)
    budget.Count(1, 32)
    with budget.Paused():
        clock.now += 1000
    _steps(budget, clock, 1, 11, seconds=0.5)
    assert budget.GetState()["cpu_seconds"] == 5.0
