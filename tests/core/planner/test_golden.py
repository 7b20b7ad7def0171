"""Golden plans: a difference is named by layer; figures that vary with the machine are not compared."""

import copy

import pytest
from toy_moe import SPLITS, planned_collectives

from lingvo_moe.core.planner.golden import differences


def _plan():
    def talk(kind, layer, part, phase, count, num_bytes):
        return {
            "kind": kind,
            "layer": layer,
            "part": part,
            "phase": phase,
            "count": count,
            "bytes": num_bytes,
            "participants": 8,
            "seconds": 0.1,
        }

    return {
        "model": "mt.M4Tiny",
        "override": "",
        "what": "train",
        "mesh": "expert:8",
        "parameters": {"count": 10, "bytes_total": 40, "bytes": 5, "slot_bytes": 1},
        "memory": {
            "fits": True,
            "arguments": 1000,
            "temporaries": 4000,
            "peak": 5000,
            "holders": [
                {"layer": "encoder.moe", "part": "experts", "phase": "forward", "bytes": 3000},
                {"layer": "softmax", "part": "softmax", "phase": "backward", "bytes": 1000},
            ],
        },
        "work": [
            {"part": "experts", "phase": "forward", "flops": 1e9, "seconds": 1.0},
            {"part": "attention", "phase": "backward", "flops": 5e8, "seconds": 1.0},
        ],
        "collectives": [
            talk("all-to-all", "encoder.moe", "dispatch_combine", "forward", 2, 4096),
            talk("all-reduce", "decoder.dense", "attention", "backward", 1, 1 << 20),
        ],
        "time": {"step_seconds": 1.0},
    }


def test_a_plan_keeps_its_own_promise_whatever_the_clock_says():
    plan = _plan()
    plan["time"]["step_seconds"] = 7.0
    plan["work"][0]["seconds"] = plan["collectives"][0]["seconds"] = 9.0
    plan["memory"]["temporaries"] += 100  # a buffer moved
    plan["work"][0]["flops"] *= 1.01
    assert differences(_plan(), plan) == []


def _gathers(plan):
    row = dict(plan["collectives"][0], kind="all-gather", count=1, bytes=1 << 24)
    plan["collectives"].append(row)


def _doubles(plan):
    plan["collectives"][0]["count"] = 4


def _widens(plan):
    plan["collectives"][1]["bytes"] *= 2


def _replicates(plan):
    plan["work"][0]["flops"] *= 8


def _swells(plan):
    plan["memory"]["peak"] += 3000
    plan["memory"]["holders"][0]["bytes"] += 3000


def _loses_its_cut(plan):
    plan["parameters"]["bytes"] = 40


def _misfits(plan):
    plan["memory"]["fits"] = False


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_gathers, "encoder.moe, dispatch_combine, forward: 1 all-gather a step, were 0"),
        (_doubles, "encoder.moe, dispatch_combine, forward: 4 all-to-all a step, were 2"),
        (_widens, "decoder.dense, attention, backward: all-reduce carries 2,097,152 bytes"),
        (_replicates, "experts, forward: 8e+09 FLOPs a device, were 1e+09"),
        (_swells, "most of it in encoder.moe, experts: +3,000 bytes"),
        (_loses_its_cut, "parameters.bytes is 40, was 5"),
        (_misfits, "the program does not fit; the recorded one does"),
    ],
)
def test_a_difference_names_the_layer(change, told):
    plan = copy.deepcopy(_plan())
    change(plan)
    found = differences(_plan(), plan)
    assert len(found) == 1 and told in found[0], found


def test_one_collective_in_two_rows_is_no_difference():
    plan = _plan()
    row = plan["collectives"][0]
    row["count"] = 1
    plan["collectives"].append(dict(row))
    assert differences(_plan(), plan) == []


def test_work_that_was_not_there_before_is_told():
    plan = _plan()
    plan["work"].append({"part": "gating", "phase": "recompute", "flops": 3e8, "seconds": 1.0})
    assert differences(_plan(), plan) == ["gating, recompute: 3e+08 FLOPs a device, were 0"]


def test_a_layer_that_is_no_longer_sharded_is_named():
    """If experts' slots stay sharded by groups, every device needs every expert."""
    split = {"B": "expert", "G": "expert"}
    whole, uncut = (
        _plan() | {"collectives": planned_collectives("v3:2x2", activation_split=each)}
        for each in (SPLITS["activation_split"], split)
    )
    found = differences(whole, uncut)
    assert any("experts, forward: 2 all-gather a step, were 0" in line for line in found), found
