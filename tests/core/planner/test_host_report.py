"""What reports show of the hosts' memory."""

import io

from made_up_plans import make_plan
from rich.console import Console

from lingvo_moe.core.planner.report import html_report, print_plan

_GIB = 2**30


def _printed(plan):
    shown = io.StringIO()
    print_plan(plan, Console(file=shown, width=200))
    return " ".join(shown.getvalue().split())


def test_what_is_in_the_hosts_memory_and_what_moves():
    plan = make_plan()
    assert "Memory of the hosts" not in _printed(plan)
    move = {"direction": "to device", "layer": "encoder.moe", "part": "experts", "phase": "forward"}
    move |= {"bytes": _GIB, "count": 6, "seconds": 0.4, "waiting_seconds": 0.1}
    plan["host"] = {"needed": 3 * _GIB, "host_devices": 4, "needed_by_host": 12 * _GIB}
    plan["host"] |= {"host_memory": 10 * _GIB, "link_bandwidth": 15e9, "link_source": "assumed"}
    plan["host"] |= {"moves": [move], "seconds": 0.4, "waiting_seconds": 0.1, "hidden_seconds": 0.3}
    for text in (_printed(plan), html_report([plan])):
        assert "Memory of the hosts" in text and "to device" in text
        assert "a host of 4 devices 12.00 GiB of 10.00 GiB" in text
        assert "A host does not have that much: 2.00 GiB are missing" in text
        assert "waits for 100 ms of it" in text and "75.0% is hidden" in text
