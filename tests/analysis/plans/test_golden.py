"""Golden plans: a difference is named by layer; figures that vary with the machine are not compared."""

import pytest
from made_up_plans import make_plan

from lingvo_moe.analysis.plans.golden import differences


def test_a_plan_keeps_its_own_promise_whatever_the_clock_says():
    plan = make_plan()
    plan["time"]["step_seconds"] = 7.0
    plan["work"][0]["seconds"] = plan["collectives"][0]["seconds"] = 9.0
    plan["memory"]["temporaries"] += 100  # a buffer moved
    plan["work"][0]["flops"] *= 1.01
    assert differences(make_plan(), plan) == []


@pytest.mark.parametrize("place, value, message", [
    ("collectives 0 count", 20, "moe, dispatch_combine, forward: 20 all-to-all a step, were 18"),
    ("collectives 1 bytes", 16 << 20, "attention, backward: all-reduce carries 603,979,776 bytes"),
    ("work 0 flops", 33.6e12, "experts, forward: 3.36e+13 FLOPs a device, were 4.2e+12"),
    ("memory peak", 20 * 10**9, "most of it in encoder.0, experts: +3,000 bytes"),
    ("parameters bytes", 40, "parameters.bytes is 40, was 5,600,000,000"),
    ("memory fits", False, "the program does not fit; the recorded one does"),
])  # fmt: skip
def test_a_difference_names_the_layer(place, value, message):
    plan = make_plan()
    plan["memory"]["holders"][0]["bytes"] += 3000
    *path, last = place.split()
    found = plan
    for key in path:
        found = found[int(key) if key.isdigit() else key]
    found[last] = value
    (line,) = differences(make_plan(), plan)
    assert message in line


def test_one_collective_in_two_rows_is_no_difference_and_a_new_one_is():
    plan = make_plan()
    row = plan["collectives"][0]
    row["count"] = 9
    plan["collectives"].append(dict(row))
    assert differences(make_plan(), plan) == []
    plan["collectives"].append(dict(row, kind="all-gather"))
    (line,) = differences(make_plan(), plan)
    assert "encoder.moe, dispatch_combine, forward: 9 all-gather a step, were 0" in line
