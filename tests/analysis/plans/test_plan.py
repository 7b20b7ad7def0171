"""Plans: sums of the compiler's figures, times by the models, costs of a token budget."""

import dataclasses

import pytest

from lingvo_moe.analysis.plans import tables
from lingvo_moe.analysis.plans.machines.gpu_cluster import Cluster
from lingvo_moe.analysis.plans.machines.topology import Topology
from lingvo_moe.analysis.plans.network import interconnect
from lingvo_moe.analysis.plans.work.costs import Cost
from lingvo_moe.analysis.programs.hlo.collectives import CollectiveUse
from lingvo_moe.analysis.programs.hlo.parts import Place
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.tasks.mt.mt_model import MtModel

POD = Topology.parse("v3:4x4")
CHIP = POD.chip
EXPERTS = Place("experts", "encoder.moe", "forward", "m4.encoder")
DISPATCH = Place("dispatch_combine", "encoder.moe", "forward", "m4.encoder")


def _cost(place, times=1, flops=0, num_bytes=0, cycles=0, collective=None):
    fields = {
        "place": place,
        "opcode": "fusion",
        "name": "x",
        "times": times,
        "flops": flops,
        "bytes": num_bytes,
        "estimated_cycles": cycles,
        "collective": collective,
        "formats": {"bfloat16": flops},
        "tiled": {"bfloat16": flops},
        "loops": (),
        "turns": 0,
    }
    return Cost(**{f.name: fields[f.name] for f in dataclasses.fields(Cost)})


def _all_to_all(times, num_bytes=1 << 20):
    use = CollectiveUse(kind="all-to-all", bytes=num_bytes, participants=32, groups=1, tensors=1)
    return _cost(DISPATCH, times, num_bytes=1, collective=use)


def _job(budget=0.0):
    return tables.PlannedJob(
        "mt.X", "", "train", {"source_tokens": 64, "target_tokens": 128}, "tokens", budget
    )


def test_an_instruction_takes_the_longest_of_its_three_estimates_each_time_it_runs():
    second = CHIP.peak_flops
    costs = [
        _cost(EXPERTS, times=3, flops=second, num_bytes=CHIP.hbm_bandwidth / 2),  # arithmetic
        _cost(EXPERTS, flops=second / 4, num_bytes=2 * CHIP.hbm_bandwidth),  # memory
        _cost(EXPERTS, flops=second / 4, cycles=5 * CHIP.clock_hz),  # the compiler
    ]
    (row,) = tables.work(costs, POD)
    assert (row["part"], row["phase"]) == ("experts", "forward")
    assert row["flops"] == pytest.approx(3.5 * second)
    assert row["compute_seconds"] == pytest.approx(3.5)
    assert row["memory_seconds"] == pytest.approx(3.5)
    assert row["roofline_seconds"] == pytest.approx(3 + 2 + 0.25)
    assert row["compiler_seconds"] == pytest.approx(5)
    assert row["seconds"] == pytest.approx(3 + 2 + 5)


def test_collectives_are_no_work_and_equal_ones_share_a_row():
    costs = [_all_to_all(9), _all_to_all(9), _all_to_all(1, num_bytes=8), _cost(EXPERTS, flops=1)]
    assert [row["part"] for row in tables.work(costs, POD)] == ["experts"]
    rows = tables.collectives(costs, POD)
    assert [(row["count"], row["bytes"]) for row in rows] == [(18, 1 << 20), (1, 8)]
    one = interconnect.seconds("all-to-all", 1 << 20, 32, POD)
    assert rows[0]["seconds"] == pytest.approx(18 * one) and one > 0


def test_collectives_inside_and_between_the_nodes_of_a_cluster_have_rows_of_their_own():
    cluster = Cluster.parse("h100:2x4")
    groups = {"inside": ((0, 1, 2, 3), (4, 5, 6, 7)), "between": ((0, 1, 4, 5), (2, 3, 6, 7))}
    costs = [
        _cost(DISPATCH, 3, collective=CollectiveUse("all-to-all", 1 << 20, 4, 2, 1, devices))
        for devices in groups.values()
    ]
    between, inside = tables.collectives(costs, cluster)
    assert (inside["nodes"], inside["in_node"], inside["sent_between"]) == (1, 4, 0)
    assert (between["nodes"], between["in_node"], between["sent_between"]) == (2, 2, 1 << 19)
    assert inside["sent_inside"] == 3 << 18
    one = interconnect.seconds("all-to-all", 1 << 20, 4, cluster, interconnect.Spread(2, 2))
    assert between["seconds"] == pytest.approx(3 * one)


def test_a_budget_costs_its_tokens_at_the_step_s_rate():
    costs = [_cost(EXPERTS, flops=CHIP.peak_flops), _all_to_all(4)]
    work, talk = tables.work(costs, POD), tables.collectives(costs, POD)
    flops = round(0.4 * POD.num_devices * CHIP.peak_flops)
    time = tables.time(dataclasses.replace(_job(budget=1e9), model_flops=flops), POD, work, talk)
    step = POD.pace.Seconds(1, talk[0]["seconds"])
    assert 1 < time["lower_seconds"] + 1e-9 < step < time["upper_seconds"]
    assert time["step_seconds"] == pytest.approx(step)
    assert time["utilization"] == pytest.approx(0.4 / step)
    assert time["hardware_utilization"] == pytest.approx(1 / step)
    assert tables.time(_job(), POD, work, talk)["utilization"] is None  # as of decoding
    assert time["tokens_per_second"] == pytest.approx(128 / step)
    days = 1e9 / 128 * step / 86400
    assert time["days"] == pytest.approx(days)
    assert time["chip_days"] == pytest.approx(16 * days)
    assert time["device_years"] == pytest.approx(32 * days / 365.25)


def test_parameters_are_counted_whole_and_by_device():
    p = MtModel.Params().Set(name="m4", source_vocab_size=64, target_vocab_size=32, num_experts=8)
    p.Set(model_dim=8, hidden_dim=16, num_heads=2, key_dim=4, num_groups=8)
    p.Set(num_encoder_layers=2, num_decoder_layers=2, weight_split={"E": "expert"})
    task = p.Instantiate()
    mesh = Mesh(("expert",), (8,))
    counted = tables.parameters(task.StateSpecs(), mesh)
    experts = 2 * 8 * (8 * 16 + 16 * 8)  # two MoE layers
    assert counted["bytes_total"] == 4 * counted["count"]
    assert counted["bytes"] == 4 * (counted["count"] - experts + experts // 8)
    assert counted["slot_bytes"] > 0
    alone = tables.parameters(task.VariableSpecs(), mesh)
    assert alone == counted | {"slot_bytes": 0}
    assert isinstance(task.VariableSpecs(), NestedMap)
    averaged = tables.parameters(p.Set(ema_decay=0.9).Instantiate().StateSpecs(), mesh)
    assert averaged == counted | {"slot_bytes": counted["slot_bytes"] + counted["bytes"]}


def test_a_plan_that_contradicts_itself_is_refused():
    good = {"memory": {"fits": True, "peak": 5, "hbm": 6}, "time": {"days": 1.0}}
    tables.check(good)
    for path, value in (("days", float("nan")), ("days", -1.0)):
        with pytest.raises(ValueError, match=rf"plan\.time\.{path}"):
            tables.check(good | {"time": {path: value}})
    with pytest.raises(ValueError, match="peak over its memory"):
        tables.check(good | {"memory": {"fits": True, "peak": 7, "hbm": 6}})
