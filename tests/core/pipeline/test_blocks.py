"""The division of layers into parts: blocks of a stack, what padding costs, cells by their costs, noise of cells."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, strategies as st
from pipeline_toys import WithExtras, cells

from lingvo_moe.core.layers.normalization import LayerNorm
from lingvo_moe.core.layers.repeat import Repeat
from lingvo_moe.core.pipeline.blocks import StageBlocks, describe_padding, padding
from lingvo_moe.core.pipeline.cells import FeatureExtractionLayer
from lingvo_moe.core.pipeline.partition import (
    PartitionError,
    PartitionSequentialLayers,
    histogram_partition,
    optimal_partition,
    partition_of,
)
from lingvo_moe.core.pipeline.stage_layout import padded, unpadded
from lingvo_moe.core.randomness import make_seed


@pytest.mark.parametrize(("num", "stages", "repeats", "counts"), [
    (9, 2, 1, [5, 4]),
    (9, 4, 1, [3, 2, 2, 2]),
    (8, 4, 1, [2, 2, 2, 2]),
    (7, 2, 2, [2, 2, 2, 1]),
    (1663, 128, 1, [13] * 127 + [12]),  # the largest model of GPipe's table 1
])  # fmt: skip
def test_parts_differ_by_at_most_one_block(num, stages, repeats, counts):
    blocks = StageBlocks(num, stages, repeats)
    assert blocks.counts.tolist() == counts
    assert blocks.equal == (len(set(counts)) == 1)
    own = np.split(np.arange(num), np.cumsum(counts)[:-1])
    assert blocks.firsts.tolist() == [part[0] for part in own]
    if blocks.equal:
        return
    rows = padded(tf.range(num), blocks)
    for row, part in zip(np.reshape(rows, [len(counts), -1]), own, strict=True):
        assert row.tolist() == [*part, *[part[-1]] * (max(counts) - len(part))]
    np.testing.assert_array_equal(unpadded(rows, blocks), np.arange(num))


def test_parts_may_end_anywhere():
    blocks = StageBlocks(7, 3, ends=(1, 5, 7))
    assert (blocks.counts.tolist(), blocks.firsts.tolist()) == ([1, 4, 2], [0, 1, 5])
    rows = padded(tf.range(7), blocks)
    assert rows.numpy().tolist() == [0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 6, 6]
    np.testing.assert_array_equal(unpadded(rows, blocks), np.arange(7))
    assert not blocks.equal and StageBlocks(6, 3, ends=(2, 4, 6)).equal
    assert "3 stages of 4 blocks" in describe_padding([("decoder", 7)], 3, 1, (1, 5, 7))


def test_padding_is_described():
    assert padding([StageBlocks(9, 4), StageBlocks(8, 4)]) == pytest.approx(3 / 20)
    assert describe_padding([("encoder", 9), ("decoder", 8)], 4, 1) == (
        "4 stages of 3 blocks have the 9 blocks of the encoder: 15% of the stages' blocks are padding"
    )
    assert describe_padding([("encoder", 7)], 2, 2) == (
        "2 stages of 2 x 2 blocks have the 7 blocks of the encoder: 12.5% of the stages' blocks are padding"
    )
    assert not describe_padding([("encoder", 8), ("decoder", 8)], 4, 1)


@pytest.mark.parametrize(
    ("length", "dim", "split"),
    [(4, 6, ("stage", None)), (3, 6, (None, "stage")), (3, 5, (None, None))],
)
def test_weights_of_unequal_parts_are_sharded_along_another_dimension(length, dim, split):
    body = LayerNorm.Params().Set(model_dim=dim)
    stack = Repeat.Params().Set(name="stack", body=body, num_repeats=length, parts=2)
    specs = stack.Set(weight_split={"L": "stage"}).Instantiate().VariableSpecs().Flatten()
    assert {(spec.shape, spec.split) for spec in specs} == {((length, dim), split)}


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


SEED = make_seed(1, 2)


def _layer(**params):
    p = FeatureExtractionLayer.Params().Set(name="d0", sub=cells())
    return p.Set(**params).Instantiate()


def test_layers_follow_each_other_and_one_output_is_a_tensor():
    layer = _layer()
    theta = layer.InitTheta(SEED)
    assert sorted(theta) == ["c0", "c1", "c2", "c3"]
    x = want = tf.ones([3, 5])
    for name in theta:
        want = layer.children[name].FProp(theta[name], want)
    np.testing.assert_array_equal(layer.FProp(theta, x), want)
    meta = FeatureExtractionLayer.FPropMeta(layer.p, (3, 5))
    assert meta.out_shapes == ((3, 2),)
    assert meta.flops == 2 * 3 * (35 + 21 + 18 + 12)


def test_extras_are_joined_and_seeds_are_those_of_names():
    layer = _layer(sub=cells(WithExtras))
    theta = layer.InitTheta(SEED)
    (y,), extras = layer.FPropWithExtras(theta, (tf.ones([3, 5]),), SEED)
    names = [path for path, _ in extras.FlattenItems()]
    own = [f"c{i}.loss" for i in range(4)]
    assert names == own + [f"updates.d0.c{i}.average" for i in range(4)]
    (again,), _ = layer.FPropWithExtras(theta, (tf.ones([3, 5]),), SEED)
    np.testing.assert_array_equal(y, again)
    assert not np.allclose(y, layer.FProp(theta, tf.ones([3, 5])))
