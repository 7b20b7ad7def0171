"""Cutting a sequence of layers by FLOPs: GPipe's rule and the best contiguous cut, against brute force."""

import itertools

import pytest
from hypothesis import given, strategies as st
from pipeline_toys import cells

from lingvo_moe.core.pipeline.cells import FeatureExtractionLayer
from lingvo_moe.core.pipeline.partition import (
    PartitionError,
    PartitionSequentialLayers,
    histogram_partition,
    optimal_partition,
    partition_of,
)

COSTS = st.lists(st.integers(0, 50), min_size=1, max_size=8)


def _all_cuts(costs, num):
    for inner in itertools.combinations(range(1, len(costs)), num - 1):
        bounds = (0, *inner, len(costs))
        yield [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]


def test_the_example_of_the_source():
    costs = [10, 40, 30, 10, 20, 50, 10]
    found = histogram_partition(costs, 3)
    assert found.Parts(costs) == [[10, 40], [30, 10, 20], [50, 10]]
    assert found.costs == (50, 60, 60)
    assert found.imbalance == pytest.approx(60 * 3 / 170)


@given(COSTS, st.data())
def test_the_optimal_cut_is_that_of_brute_force(costs, data):
    num = data.draw(st.integers(1, len(costs)))
    found = optimal_partition(costs, num)
    assert max(found.costs) == min(max(cut) for cut in _all_cuts(costs, num))
    parts = found.Parts(costs)
    assert list(itertools.chain(*parts)) == costs and all(parts) and len(parts) == num
    assert found.costs == tuple(map(sum, parts))
    assert found.imbalance >= 1


@given(COSTS, st.data())
def test_gpipes_rule_puts_layers_where_their_cumulative_cost_is(costs, data):
    num = data.draw(st.integers(1, len(costs)))
    total = sum(costs)
    wanted = [[] for _ in range(num)]
    for cost, so_far in zip(costs, itertools.accumulate(costs)):
        wanted[min(so_far * num // total if total else 0, num - 1)].append(cost)
    if all(wanted):
        assert histogram_partition(costs, num).Parts(costs) == wanted
        assert max(histogram_partition(costs, num).costs) >= max(
            optimal_partition(costs, num).costs
        )
        return
    with pytest.raises(PartitionError, match=r"gives part \d+ no layer, .*; use rule='optimal'"):
        histogram_partition(costs, num)


def test_layers_become_cells_with_the_sequence_opened():
    nested = FeatureExtractionLayer.Params().Set(sub=cells()[1:3])
    layers = [cells()[0], nested, cells()[3]]
    found = PartitionSequentialLayers(layers, 2, (8, 5), rule="optimal")
    assert [p.cls for p in found] == [FeatureExtractionLayer] * 2
    assert [p.name for p in found] == ["d0", "d1"]
    names = [[sub.name for sub in p.sub] for p in found]
    assert names == [["cell_000"], ["cell_001", "cell_002", "cell_003"]]
    assert partition_of(found, (8, 5)).costs == (2 * 8 * 35, 2 * 8 * (21 + 18 + 12))
    assert layers[0].name == "c0"  # The caller's Params stay as they are.
