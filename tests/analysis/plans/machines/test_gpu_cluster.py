"""GPU clusters by name, and the figures of their cards."""

import re
from pathlib import Path

import pytest

from lingvo_moe.analysis.plans.machines.gpu_cluster import CARDS


@pytest.mark.parametrize("card", CARDS.values(), ids=str)
def test_the_figures_of_a_card_agree_with_each_other(card):
    assert CARDS[card.name] is card
    peaks = card.peak_flops
    assert peaks["bfloat16"] >= 1.9 * peaks["tf32"]
    assert peaks["tf32"] > peaks["float32"]
    # Inside a node data goes at least as fast as out of it, and everywhere more slowly than in a GPU's own memory.
    assert card.nic_bandwidth < card.node_bandwidth < card.hbm_bandwidth
    if card.nvlink_bandwidth:
        assert card.nvlink_bandwidth > card.pcie_bandwidth
    else:
        assert card.node_bandwidth == card.pcie_bandwidth
    assert card.source.startswith("NVIDIA ")
    assert "network: assumed" in card.source


def test_the_page_on_gpus_has_these_figures():
    page = (Path(__file__).parents[4] / "docs" / "gpus.md").read_text("utf-8")
    rows = re.findall(
        r"^\| `([a-z0-9-]+)` \| ([^|`]+) \| ([^|]+) \| ([^|]+) \|$", page, re.MULTILINE
    )
    expected = [
        (name, *(f"{v / 1e9:g}" if v else "–" for v in rates))
        for name, card in CARDS.items()
        for rates in [(card.nvlink_bandwidth, card.pcie_bandwidth, card.nic_bandwidth)]
    ]
    assert rows == expected
