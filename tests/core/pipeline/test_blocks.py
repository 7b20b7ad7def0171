"""The division of a stack's blocks into parts, and which of the stages' work is padding."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core.layers.normalization import LayerNorm
from lingvo_moe.core.layers.repeat import Repeat
from lingvo_moe.core.pipeline.blocks import StageBlocks, describe_padding, padding
from lingvo_moe.core.pipeline.stage_layout import padded, unpadded


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
