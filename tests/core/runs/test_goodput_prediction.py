"""The predicted goodput is that of a simulated machine that fails at random, and the best interval is the best."""

import math
import random
from dataclasses import replace

import pytest

from lingvo_moe.core.runs.goodput_prediction import FailingMachine


def _simulated(machine: FailingMachine, seed: int, disruptions: int = 40_000) -> float:
    """The goodput of a machine that works, saves, fails and restarts, event by event."""
    rng = random.Random(seed)
    now = lasted = since_save = 0.0
    restarting, failure = True, rng.expovariate(1 / machine.mtbf)
    while disruptions:
        doing = machine.restart if restarting else machine.interval + machine.save
        if now + doing <= failure:  # done before the next disruption
            now += doing
            lasted += 0.0 if restarting else machine.interval
            restarting = False
            continue
        since_save = 0.0 if restarting else min(failure - now, machine.interval)
        if rng.random() < machine.announced:
            lasted += since_save
        now, restarting, disruptions = failure, True, disruptions - 1
        failure = now + rng.expovariate(1 / machine.mtbf)
    return machine.share_of_steps * lasted / now


@pytest.mark.parametrize("machine", [
    FailingMachine(mtbf=11160, save=20, restart=600, interval=600),
    FailingMachine(mtbf=30, save=0.5, restart=12, interval=8, announced=0.4, share_of_steps=0.9),
    FailingMachine(mtbf=10, save=3, restart=10, interval=20, announced=1.0),
])  # fmt: skip
def test_it_is_what_a_simulation_delivers(machine):
    assert machine.Goodput() == pytest.approx(_simulated(machine, seed=1), rel=0.03)


def test_for_rare_failures_it_is_the_rule_of_thumb():
    machine = FailingMachine(mtbf=1e6, save=10, restart=300, interval=4000)
    d, t, R, M = machine.save, machine.interval, machine.restart, machine.mtbf
    assert machine.Goodput() == pytest.approx(1 - d / t - (t / 2 + R) / M, abs=1e-4)
    assert machine.BestInterval() == pytest.approx(math.sqrt(2 * d * M), rel=0.01)


@pytest.mark.parametrize("announced", [0.0, 0.7])
@pytest.mark.parametrize("mtbf", [15.0, 400.0, 1e5])
def test_no_other_interval_is_better_than_the_best(mtbf, announced):
    machine = FailingMachine(mtbf, save=5, restart=60, interval=1, announced=announced)
    best = replace(machine, interval=machine.BestInterval()).Goodput()
    others = [replace(machine, interval=10 ** (k / 20)).Goodput() for k in range(-20, 140)]
    assert max(others) <= best + 1e-12


def test_a_machine_that_fails_before_it_can_restart_does_nothing():
    assert FailingMachine(mtbf=1, save=1, restart=1e6, interval=10).Goodput() == 0.0
