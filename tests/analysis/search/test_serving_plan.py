"""Plans of serving: their arithmetic from the plans of programs, and a small model compiled for a TPU slice."""

import math

import pytest
from refusals import refuses

from lingvo_moe.analysis.plans import prices, step_plan
from lingvo_moe.analysis.plans.step_plan import Request
from lingvo_moe.analysis.search import serving_plan
from lingvo_moe.analysis.search.strategies.serving_layouts import serving_layouts
from lingvo_moe.core.pages import tables

SMALL = (
    "input.target_vocab_size=64;task.num_layers=2;task.vocab_size=64;task.model_dim=32;task.hidden_dim=64;"
    "task.expert_hidden_dim=32"
)
REQUEST = Request("lm.MoEDemo", "v5e:2x2", SMALL, prompt=12, reply=5)
GIB = 2**30


def _planned(seconds, needed=GIB, fits=True):
    """Plans whose times are `seconds` by program and number of rows."""

    def make_plan(request, *_):
        batch = int(request.override.split("input.batch_size=")[1].split(";")[0])
        memory = {"fits": fits, "needed": needed}
        return {"memory": memory, "time": {"step_seconds": seconds(request.what, batch)}}

    return make_plan


def test_figures_follow_from_both_programs(monkeypatch):
    """Weights, caches and rates are counted again here, from the sizes of the model."""
    times = {"prefill": 0.1, "decode": 0.02}
    monkeypatch.setattr(step_plan, "make_plan", _planned(lambda what, batch: times[what]))
    plan = serving_plan.make_serving_plan(REQUEST, [2, 3, 16], None)
    assert [(row["layout"], row["batch"]) for row in plan["rows"]] == [
        *(("ep", 4), ("ep", 16), ("tp", 2), ("tp", 3), ("tp", 16), ("ep+tp", 4), ("ep+tp", 16))
    ]
    ep, tp = plan["rows"][1], plan["rows"][4]
    # Two layers, keys and values, 2 heads of 32 numbers in float32, for all tokens of a prompt but one and a reply's.
    caches = 2 * 2 * 16 * (12 - 1 + 5) * 2 * 32 * 4
    state = 16 * (4 + 4 + 5 * 4 + 5 + 4 + 1 + 5 + 4 + 4) + 4
    assert ep["caches"] == (caches + state - 4) // 4 + 4
    assert tp["caches"] == caches + state  # two heads of keys do not divide over four devices
    assert ep["needed"] == GIB + ep["caches"]  # prompts are read beside the batch
    for row, prompts in ((ep, 4), (tp, 1)):
        of_reply = 0.1 / prompts + 5 * 0.02 / 16
        assert row["prompts"] == prompts
        assert row["first_token_seconds"] == pytest.approx(0.12)
        assert row["user_tokens_per_second"] == pytest.approx(50)
        assert row["chip_tokens_per_second"] == pytest.approx(5 / of_reply / 4)
        assert row["chip_seconds_per_million"] == pytest.approx(1e6 * 4 * of_reply / 5)


def test_batches_grow_until_the_memory_is_full_and_limits_choose_the_largest(monkeypatch):
    made = _planned(lambda what, batch: 0.004 if what == "prefill" else 0.001 * batch)
    monkeypatch.setattr(step_plan, "make_plan", made)
    long = Request("lm.MoEDemo", "v5e:2x2", SMALL, prompt=12, reply=1_000_000)
    plan = serving_plan.make_serving_plan(long, [], None)
    rows = [row for row in plan["rows"] if row["layout"] == "ep"]
    assert [row["batch"] for row in rows] == [4, 8, 32, 128]
    assert [row["fits"] for row in rows] == [True] * 3 + [False]
    assert math.isclose(rows[1]["caches"] / rows[0]["caches"], 2, rel_tol=1e-3)
    limits = prices.read_limits("36ms/0.01s")
    best = serving_plan.chosen(plan, limits)
    assert [(row["layout"], row["batch"]) for row in best] == [("ep", 8), ("ep+tp", 8), ("tp", 8)]
    shown = tables.lines(serving_plan.table(plan, limits, 3.6))
    cost = rows[1]["chip_seconds_per_million"] / 1000
    assert f"{cost:,.0f}" in shown[2] and shown[2].endswith("kept")
    assert serving_plan.chosen(plan, None) == [] and "does not fit" in shown[4]


def test_layouts_shard_what_they_name():
    sizes = {"E": {8}, "N": {4}, "A": {2}, "H": {64, 32}, "V": {60}, "M": {16}}
    layouts = {name: one.layout for name, one in serving_layouts(sizes, 8).items()}
    assert [str(layout.mesh) for layout in layouts.values()] == [
        *("expert:8", "data:2,model:4", "data:2,model:4")
    ]
    assert dict(layouts["tp"].weights) == {"N": "model", "H": "model", "V": "model"}
    both = dict(layouts["ep+tp"].activations)
    assert both["B"] == "data" and both["G"] == both["E"] == ("data", "model")
    dense = serving_layouts({"N": {4}, "H": {64}, "V": {60}}, 4)
    assert list(dense) == ["dp", "tp"]


@refuses(
    ValueError,
    (("200ms",), "no pair of times"),
    (("200ms/30",), "no pair of times"),
    (("0s/30ms",), "must be positive"),
)
def test_limits_are_two_times(text):
    prices.read_limits(text[0])


@pytest.mark.slow
def test_a_step_of_a_small_model_has_two_exchanges_a_layer_of_experts(monkeypatch):
    layouts = serving_plan.serving_layouts

    def both(*args):
        return {"ep+tp": layouts(*args)["ep+tp"]}

    monkeypatch.setattr(serving_plan, "serving_layouts", both)
    plans, make_plan = [], step_plan.make_plan
    monkeypatch.setattr(step_plan, "make_plan", lambda *a: plans.append(make_plan(*a)) or plans[-1])
    (row,) = serving_plan.make_serving_plan(REQUEST, [8], None)["rows"]
    assert row["fits"] and [plan["what"] for plan in plans] == ["prefill", "decode"]
    # No cache needs the experts of the last layer, which are the only ones.
    for plan, count in zip(plans, (0, 2), strict=True):
        rows = [c for c in plan["collectives"] if c["kind"] == "all-to-all" and c["layer"]]
        sent = [c["count"] for c in rows if c["part"] == "dispatch_combine" and c["bytes"] > 64]
        assert sum(sent) == count
    assert row["step_seconds"] == plans[1]["time"]["step_seconds"]
    inputs = plans[1]["memory"]["kinds"]["inputs"]
    assert row["caches"] == inputs
