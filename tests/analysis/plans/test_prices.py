"""The cost of steps."""

import pytest

from lingvo_moe.analysis.plans import figures, sections
from lingvo_moe.analysis.plans.machines.base_machine import PlanError
from lingvo_moe.analysis.plans.prices import check_prices, priced, read_prices
from tests.made_up_plans import make_plan, make_plan_of_a_cluster, make_plan_that_misses


def test_a_step_and_the_budget_cost_chip_hours():
    time = priced(make_plan(), {"v3": 2.0})["time"]
    assert time["step_cost"] == pytest.approx(1024 * 0.57 / 3600 * 2)  # 1,024 chips of two cores
    assert time["budget_cost"] == pytest.approx(1610 * 24 * 2)
    assert time["budget_cost"] == pytest.approx(time["step_cost"] * 1e12 / 4_194_304, rel=1e-3)
    assert priced(make_plan(), {"v4": 2.0}) == make_plan()
    assert "step_cost" in priced(make_plan_of_a_cluster(), {"h100": 3.0})["time"]
    assert priced(make_plan_that_misses(), {"v3": 2.0}) == make_plan_that_misses()


def test_reports_show_costs_where_there_is_a_price():
    plan = priced(make_plan(), {"v3": 2.0})
    shown = {label: value for label, value, _ in figures.headline(plan)}
    assert shown["cost of a step"] == "0.324" and shown["cost of 1T tokens"] == "77,280"
    table = sections.compared([make_plan(), plan])
    headings = [column.heading for column in table.columns]
    assert headings[-2:] == ["cost of a step", "cost in all"]
    assert [row[-2:] for row in table.rows] == [["–", "–"], ["0.324", "77,280"]]
    assert len(sections.compared([make_plan()]).columns) == len(headings) - 2


def test_prices_that_cannot_be_are_refused():
    assert read_prices("v5p:4.2, H100:3") == (("v5p", 4.2), ("h100", 3.0))
    for text, told in (
        ("v5p", "'v5p' is no price"),
        ("v5p:-1", "is no price"),
        ("v5p:nan", "is no price"),
        ("v5p:1,v5p:2", "two prices of v5p"),
    ):
        with pytest.raises(ValueError, match=told):
            read_prices(text)
    with pytest.raises(PlanError, match=r"no plan is for v5p \(did you mean 'v5e'\?\)"):
        check_prices({"v5p": 4.2}, ["v5e", "h100"])
