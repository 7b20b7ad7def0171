"""The suggestions of a report for a plan."""

import copy

from lingvo_moe.analysis.plans.suggestions import suggestions
from tests.made_up_plans import make_plan, make_plan_that_misses


def _changed(**changes):
    """The made-up plan with other figures; `time__x=1` sets plan['time']['x']."""
    plan = copy.deepcopy(make_plan())
    for name, value in changes.items():
        *path, last = name.split("__")
        place = plan
        for key in path:
            place = place[key]
        place[last] = value
    return plan


def test_memory_is_advised_on_only_where_it_is_short():
    assert suggestions(make_plan()) == make_plan()["memory"]["advice"]  # 81% of it is used
    missing = make_plan_that_misses() | {"memory": {"fits": False, "advice": ["Less."]}}
    assert suggestions(missing) == ["Less."]
    assert suggestions(_changed(memory__needed=8 << 30)) == []


def test_a_machine_that_is_far_too_large_is_said():
    (line,) = suggestions(_changed(memory__needed=1 << 30))
    assert "one device in 16 would do (a device needs 1.00 GiB of 16.00 GiB)" in line
    assert "`python -m tools.plan --model=mt.M4MoE2048E36L --topology=v3` looks for the" in line
    assert "one device in 2,048" in suggestions(_changed(memory__needed=1 << 20))[0]


def test_low_utilisation_names_what_a_device_gets():
    (line,) = suggestions(_changed(memory__needed=8 << 30, time__utilization=0.05))
    assert line.startswith("Utilisation is 5.0%: a device gets 2,048 tokens a step")
    assert "would take 340 ms of 570 ms" in line and "input.batch_size" in line


def test_the_network_idle_stages_and_hosts_lead_to_the_search():
    command = "`python -m tools.parallelize --model=mt.M4MoE2048E36L --topology=v3:32x32` searches"
    slow = _changed(memory__needed=8 << 30, time__collective_seconds=0.4)
    network, search = suggestions(slow)
    assert "The network takes 70.2% of a step, most of it 18 all-to-all" in network
    assert search.startswith(command)
    hosts, _ = suggestions(_changed(memory__needed=8 << 30, time__host_seconds=0.2))
    assert "wait for their hosts' memory for 35.1%" in hosts
    turning = _changed(memory__needed=8 << 30, time__turning_seconds=0.2, work=[{"turns": 7000}])
    loops, _ = suggestions(turning | {"work": [*make_plan()["work"], *turning["work"]]})
    assert "about 7,000 a step" in loops and "task.moe.dispatcher=index" in loops
    idle = _changed(memory__needed=8 << 30, pipelines=[{"bubble": 0.4, "seconds": 1.0}])
    stages, _ = suggestions(idle | {"override": "task.dropout=0"})
    assert "idle for 40.0%" in stages and "task.pipeline.micro_batches" in stages
    assert suggestions(idle | {"what": "decode"}) == []  # the search is for training
