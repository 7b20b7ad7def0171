import io
import re

import pytest
from html_page import Page
from made_up_plans import make_plan, make_plan_of_a_cluster, make_plan_that_misses
from rich.console import Console

from lingvo_moe.analysis.plans.report import bar, html_report, print_comparison, print_plan
from lingvo_moe.core.console import units

_GIB = 2**30


def _printed(print_it, *args, width=200) -> str:
    out = io.StringIO()
    print_it(*args, Console(file=out, width=width))
    return out.getvalue()


def _squeezed(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("unit, cases", [
    (units.size, {0: "0 B", 1536: "1.5 KiB", 11 * _GIB: "11.00 GiB", 2.4e15: "2,235,174.18 GiB"}),
    (units.duration, {1.524: "1.52 s", 0.0861: "86.1 ms", 3e-6: "3.00 µs", 4e-8: "0.040 µs"}),
    (units.duration, {250: "4 min 10 s", 179.7: "3 min 0 s", 0: "0"}),
    (units.work, {8.24e13: "82.4 TFLOP"}),
    (units.quantity, {619.3e9: "619.3B", 1e12: "1T"}),
    (units.in_words, {619_366_506_496: "619.4 billion", 999_960_000: "1.0 billion"}),
    (units.in_words, {4_293_632: "4.3 million", 36_416: ""}),
    (units.number, {2311.6: "2,312", 0.5714: "0.571"}),
    (units.share, {0.3621: "36.2%"}),
])  # fmt: skip
def test_units(unit, cases):
    assert {value: unit(value) for value in cases} == cases
    assert unit is units.in_words or unit(None) == "–"
    assert units.rate(9e11, "B") == "900 GB/s"


def test_terminal_says_what_matters():
    said = _squeezed(_printed(print_plan, make_plan()))
    assert "Fits: 12.98 GiB of 16.00 GiB on each device, 3.02 GiB to spare." in said
    assert "step 570 ms (estimated)" in said
    assert "tokens a second 7,358,428 (estimated)" in said
    assert "days for 1T tokens 1.57 (estimated)" in said
    assert "core-years 8.82 (estimated)" in said
    assert "activations kept for backward 2.89 GiB 18.0%" in said
    assert "8 more" in said and "encoder.11" in said and "encoder.12" not in said
    assert "all-to-all encoder.moe dispatch_combine forward 18 16.0 MiB 2,048 100 ms" in said
    assert "experts 12.6 TFLOP 37.72 GiB 250 ms 240 ms 90.0 ms 240 ms 240 ms –" in said
    assert "619,301,234,567" in said
    assert "• Activations in bfloat16" in said


def test_comparison_has_a_row_for_each_plan():
    said = _printed(print_comparison, [make_plan(), make_plan_that_misses()])
    (first,) = re.findall(r"^mt\.M4MoE2048E36L .*", said, re.MULTILINE)
    for cell in ("v3:32x32", "619.3B", "12.98 / 16 GiB", "yes", "570 ms", "1.75", "21.1%"):
        assert cell in first
    assert "no, by 4.00 GiB" in said
    assert "does not fit: it misses by 4.00 GiB" in _squeezed(said)


@pytest.mark.parametrize("batches, price, said", [
    ([("tokens", 1e12)], None, "Days, chip-days and device-years are for 1T tokens."),
    (
        [("tokens", 1e12), ("images", 1e8), ("images", 0.0)],
        3.0,
        "Cost in all, days, chip-days and device-years are for 100M images or 1T tokens.",
    ),
    ([("images", 0.0)], None, ""),
])  # fmt: skip
def test_a_comparison_says_what_its_days_are_for(batches, price, said):
    plans = [make_plan() for _ in batches]
    for plan, (unit, budget) in zip(plans, batches, strict=True):
        plan["batch"] = {unit: 256}
        plan["time"] |= {f"budget_{unit}": budget, "price": price, "step_cost": 1, "budget_cost": 2}
    printed = _printed(print_comparison, plans)
    assert said in printed and said in Page(html_report([*plans, *plans])).text
    assert ("are for" in printed) == bool(said)


def test_collectives_of_a_cluster_have_the_nodes_that_they_span():
    said = _squeezed(_printed(print_plan, make_plan_of_a_cluster()))
    assert "kind layer part phase nodes a step bytes of one" in said
    assert "all-to-all encoder.moe dispatch_combine forward 32 18 16.0 MiB" in said
    assert "all-reduce encoder attention backward 1 36" in said
    told = "axis a step sent inside nodes sent between nodes seconds expert 54 3.0 MiB 5.00 GiB"
    assert told in said
    assert "data:8,expert:32 54 3.0 MiB 5.00 GiB 120 ms --mesh=data:8,expert:32 is faster." in said
    page = html_report([make_plan_of_a_cluster()])
    for cell in (">nodes<", ">32<", "sent between nodes", "data:8,expert:32 is faster."):
        assert cell in page
    for other in (_printed(print_plan, make_plan()), html_report([make_plan()])):
        assert "Mesh axes" not in other and " nodes " not in other and ">nodes<" not in other


def test_what_is_in_the_hosts_memory_and_what_moves():
    plan = make_plan()
    assert "Memory of the hosts" not in _printed(print_plan, plan)
    move = {"direction": "to device", "layer": "encoder.moe", "part": "experts", "phase": "forward"}
    move |= {"bytes": _GIB, "count": 6, "seconds": 0.4, "waiting_seconds": 0.1}
    plan["host"] = {"needed": 3 * _GIB, "host_devices": 4, "needed_by_host": 12 * _GIB}
    plan["host"] |= {"host_memory": 10 * _GIB, "link_bandwidth": 15e9, "link_source": "assumed"}
    plan["host"] |= {"moves": [move], "seconds": 0.4, "waiting_seconds": 0.1, "hidden_seconds": 0.3}
    for text in (_squeezed(_printed(print_plan, plan)), html_report([plan])):
        for part in (
            "Memory of the hosts",
            "to device",
            "a host of 4 devices 12.00 GiB of 10.00 GiB",
            "A host does not have that much: 2.00 GiB are missing",
            "waits for 100 ms of it",
            "75.0% is hidden",
        ):
            assert part in text


def make_plan_of_slices() -> dict:
    """The first plan on two slices; its first collective crosses them."""
    plan = make_plan()
    plan["topology"] |= {"name": "v5p:4x4x4*2", "slices": 2, "dcn_bandwidth": 6.25e9}
    first, *others = plan["collectives"]
    first |= {"slices": 2, "in_slice": 1, "sent_inside": 0, "sent_between": 8 * 2**20}
    for item in others:
        item |= {"slices": 1, "in_slice": 4, "sent_inside": 2**20, "sent_between": 0}
    return plan


def test_what_crosses_slices_has_a_table_of_its_own():
    plan = make_plan_of_slices()
    first = plan["collectives"][0]
    said = _squeezed(_printed(print_plan, plan, width=160))
    seconds = units.duration(first["seconds"])
    sent = units.size(8 * 2**20 * first["count"])
    assert "2 slices, each a torus 32×32" in said
    assert "kind layer part phase slices a step bytes of one" in said
    assert "kind layer part phase a step sent by one sent a step seconds" in said
    place = f"{first['kind']} {first['layer']} {first['part']} {first['phase']}"
    assert f"{place} {first['count']} 8.0 MiB {sent} {seconds}" in said
    share = units.share(first["seconds"] / plan["time"]["step_seconds"])
    total = f"In all {first['count']} a step: each device sends {sent} to other slices in {seconds}, {share}"
    assert total in said
    page = html_report([plan])
    for cell in (">slices<", "Between slices, over the data-centre network", sent, total):
        assert cell in page
    for other in (_printed(print_plan, make_plan()), html_report([make_plan()])):
        assert "Between slices" not in other and "slices" not in other
    first["slices"] = 1
    assert "No collective crosses slices." in _printed(print_plan, plan)


def make_plan_of_pipelines(bubble=3 / 11) -> dict:
    """The first plan with a pipeline of the encoder, one loop of which the compiler removed."""
    permutes = [
        {"bytes": 2**20, "count": 2.0, "seconds": 4e-3, "overlapped_seconds": 1e-3},
        {"bytes": 2**10, "count": 1.0, "seconds": 2e-3, "overlapped_seconds": 0.0},
    ]
    loops = [
        ("forward", 1, None, []),
        ("forward_backward", 8, 0.05, permutes),
        ("backward", 3, 0.03, permutes[:1]),
    ]
    pipeline = {
        "name": "m4/encoder",
        "schedule": "1f1b",
        "stages": 4,
        "micro_batches": 8,
        "repeats": 1,
        "bubble": bubble,
        "seconds": 0.49,
        "loops": [
            {
                "phase": phase,
                "ticks": ticks,
                "runs": 1,
                "tick_seconds": seconds,
                "seconds": seconds and ticks * seconds,
                "permutes": found,
            }
            for phase, ticks, seconds, found in loops
        ],
    }
    return make_plan() | {"pipelines": [pipeline]}


def test_pipelines_have_their_ticks_and_their_bubble():
    plan = make_plan_of_pipelines()
    said = _squeezed(_printed(print_plan, plan))
    heads = "pipeline phase ticks a tick in all permutes a tick bytes of one seconds overlapped"
    rows = (
        "m4/encoder forward 1 – – – – – –",
        "forward backward 8 50.0 ms 400 ms 2 1.0 MiB 4.00 ms 25.0%",
        "1 1.0 KiB 2.00 ms 0.0%",
        "backward 3 30.0 ms 90.0 ms 2 1.0 MiB",
    )
    assert " ".join((heads, *rows)) in said
    told = "m4/encoder: 1f1b of 4 stages and 8 micro-batches. The bubble is 27.3% of a stage's time"
    assert told in said
    text = Page(html_report([plan])).text
    assert "Pipelines" in text and told in text and "forward backward 8" in text
    uneven = make_plan_of_pipelines()
    uneven["pipelines"][0] |= {"blocks": {"encoder": 9}, "padding": 0.25}
    padding = "4 stages of 3 blocks have the 9 blocks of the encoder: 25% of the stages' blocks are padding"
    assert padding in _squeezed(_printed(print_plan, uneven)) and padding not in said
    unknown = make_plan_of_pipelines()
    del unknown["pipelines"][0]["bubble"]
    assert "m4/encoder: its schedule is not known" in _printed(print_plan, unknown)
    for other in (_printed(print_plan, make_plan()), html_report([make_plan()])):
        assert "ipelines" not in other


@pytest.mark.parametrize("width", [80, 160])
@pytest.mark.parametrize(
    "make", [make_plan, make_plan_of_a_cluster, make_plan_of_slices, make_plan_of_pipelines]
)
def test_nothing_is_cut_off_in_a_narrow_terminal(width, make):
    plan = make()
    said = _printed(print_plan, plan, width=width)
    plans = [plan, make_plan_that_misses(), plan, plan]
    compared = _printed(print_comparison, plans, width=width)
    assert "…" not in said + compared
    assert max(map(len, (said + compared).splitlines())) <= width
    (experts,) = re.findall(r"^ *experts .*", said, re.MULTILINE)
    assert "12.6 TFLOP" in experts and "250 ms" in experts
    assert compared.count("7,358,428") == 3 and compared.count("1,610") == 3


def test_bars_are_as_long_as_their_figures():
    assert bar(0.5, 8) == "████"
    assert bar(1 / 16, 8) == "▌"
    assert bar(0, 8) == ""
    assert bar(1.2, 8) == "███████▶"


def test_page_of_one_plan_says_the_same_and_escapes_text():
    page = html_report([make_plan()])
    text = Page(page).text
    assert "Fits: 12.98 GiB of 16.00 GiB" in text
    assert "&lt;each&gt; link" in page
    assert "prefers-color-scheme: dark" in page and "name='viewport'" in page
    assert "side by side" not in text
    for word in ("all-to-all", "619,301,234,567", "estimated", "0123456789abcdef"):
        assert word in text
    hostile = "<script>alert('&')</script>"
    plan = make_plan() | {"model": hostile, "override": hostile, "mesh": hostile}
    plan["collectives"][0] |= {"layer": hostile}
    Page(html_report([plan, plan]))


def test_page_of_several_plans_compares_them():
    page = html_report([make_plan(), make_plan_that_misses()])
    text = Page(page).text
    assert "2 plans side by side" in text and "href='#plan-1'" in page
    assert "no, by 4.00 GiB" in text
    assert "No times: the program does not fit: it misses by 4.00 GiB." in text
    assert "task.&lt;x&gt;: 1" in page
