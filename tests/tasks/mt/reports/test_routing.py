"""The routing report: the mutual information of expert and language, and the table of layers."""

import numpy as np
import pytest

from lingvo_moe.tasks.mt.reports.routing import LayerRouting, RoutingReport, mutual_information
from lingvo_moe.tasks.mt.reports.routing_page import section, table_of


def test_information_by_hand():
    # Each language has two experts of its own: of the three bits of an expert, the language determines two.
    own = 10_000 * np.kron(np.eye(4, dtype=int), [1, 1])
    assert mutual_information(own) == pytest.approx(2.0, abs=1e-3)
    assert mutual_information(np.full((4, 8), 10_000)) == pytest.approx(0.0, abs=1e-3)
    # H(3/8, 5/8) - (H(1/4) + H(1/2)) / 2 = 0.954434 - (0.811278 + 1) / 2, however many tokens each has.
    mixed = np.array([[10_000, 30_000], [500_000, 500_000]])
    assert mutual_information(mixed) == pytest.approx(0.048795, abs=1e-3)
    assert mutual_information(np.zeros((2, 3), int)) == 0.0


def test_few_tokens_of_chance_tell_nothing():
    rng = np.random.default_rng(0)
    few = np.stack([np.bincount(rng.integers(0, 8, 100), minlength=8) for _ in range(60)])
    share = few / few.sum(1, keepdims=True)
    logs = np.log2(np.where(share > 0, share, 1) / share.mean(0))
    assert (share * logs).sum(1).mean() > 0.04  # what counting alone would say
    assert mutual_information(few) < 0.005


def _layer(**kwargs) -> LayerRouting:
    tokens = np.array([4, 2])
    chosen = np.array([[4, 4, 0], [0, 4, 0]])
    return LayerRouting("encoder/layer_1", "SoftRouter", tokens, chosen, 0 * tokens, **kwargs)


def test_the_table_and_the_section():
    ranked = _layer(
        first_UE=np.array([[4, 0, 0], [0, 2, 0]]),
        entropy_U=np.array([2.0, 1.0]),
        training={
            "over_capacity_ratio": 0.06,
            "over_capacity_1_ratio": 0.01,
            "over_capacity_2_ratio": 0.123,
            "effective_capacity": 2.25,
        },
    )
    unranked = _layer(training={"over_capacity_ratio": 0.5})
    about = {"model": "mt.M4Tiny", "params_override": "", "step": 7, "num_experts": 3}
    report = RoutingReport(about, {"de": 3, "sw": 1}, [ranked, unranked])
    table = table_of(report)
    heads, rows = [column.heading for column in table.columns], table.rows
    assert heads[5:7] == ["gate entropy\n(most 1.10)", "language, bits\n(most 1.00)"]
    name, router, *figures = rows[0]
    assert (name, router) == ("encoder/layer_1", "Soft")
    assert figures == ["2.00", "2.00 x", "1", "0.50", "1.00", "1.0 + 12.3", "2.25"]
    assert rows[1][5] == "-" and rows[1][7:] == ["50.0", "-"]
    page = section(report)
    assert page.count("<figure class='drawing wide'><svg") == 2
    assert "At step 7, over 4 held-out pairs of 2 languages; 3 experts." in " ".join(page.split())
