"""GPU clusters by name, and the figures of their cards."""

import re
from pathlib import Path

import pytest

from lingvo_moe.core.planner.errors import PlanError
from lingvo_moe.core.planner.machines.gpu_cluster import CARDS, Cluster


def test_a_cluster_by_name():
    cluster = Cluster.parse(" H100:32x8 ")
    assert (cluster.name, cluster.card, cluster.nodes, cluster.gpus_per_node) == (
        "h100:32x8",
        CARDS["h100"],
        32,
        8,
    )
    assert cluster.num_devices == 256


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h10:1x8", r"no GPU 'h10' \(did you mean 'h100'"),
        ("", r"no GPU '' \(known: a100, a100-40, b200, h100, h200, l4, l40s\)"),
        ("h100", "expected nodes x GPUs of a node after the card, e.g. h100:32x8"),
        ("h100:8", "expected nodes x GPUs"),
        ("h100:0x8", "expected nodes x GPUs"),
        ("h100:1x8x8", "expected nodes x GPUs"),
        ("h100:onex8", "expected nodes x GPUs"),
        ("a100:5x3", "a node of 3 GPUs; a node has 1, 2, 4 or 8$"),
        ("h100:8x32", "a node of 32 GPUs; .*; the nodes come first: h100:32x8"),
    ],
)
def test_names_that_are_none(name, message):
    with pytest.raises(PlanError, match=message) as e:
        Cluster.parse(name)
    assert f"topology {name!r}" in str(e.value)
    assert "\n" not in str(e.value)


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
