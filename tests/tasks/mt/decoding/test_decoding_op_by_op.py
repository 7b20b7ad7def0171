"""MtModel's search by TensorFlow's own kernels: what XLA's finds, and for each row the same to the bit
whatever rows it runs with.

Letters: B row, S source token, T target token, J hypothesis.
"""

import numpy as np
import pytest
import tensorflow as tf
from searches import Lines, make_model, source

from lingvo_moe.core.decode.flat_beam_search import SearchOptions
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.op_by_op import running_op_by_op
from lingvo_moe.core.sharding import single_device, use_mesh
from lingvo_moe.tasks.mt.decoding.decode_step import Decoder

V, LONGEST = 700, 36  # more than two blocks of steps
LENGTHS = [3, 47, 16, 1, 30, 31, 17, 5, 64, 12]


class Searcher:
    """A model of two layers a side, and searches with it."""

    def __init__(self, num_experts: int, beam_size: int, num_kv_heads: int = 0):
        self.model, self.theta = make_model(
            V,
            hidden_dim=2048,  # rows of such products are rounded otherwise where they are alone
            num_kv_heads=num_kv_heads,
            num_encoder_layers=2,
            num_decoder_layers=2,
            num_experts=num_experts,
        )
        with use_mesh(single_device()):
            self.arranged = self.model.ForInference(self.theta)
        options = SearchOptions(beam_size, min(2, beam_size))
        self.beam_size = beam_size
        self.decoder = Decoder(self.model, options, LONGEST, V - 7)
        kinds = [tf.TensorSpec([None, None], tf.int32), tf.TensorSpec([None], tf.int32)]
        self.traces = 0
        self.op_by_op = tf.function(self._OpByOp, input_signature=kinds, autograph=False)
        self.xla = tf.function(self._Xla, jit_compile=True, autograph=False)
        self.lines = Lines(LENGTHS, V)

    def _OpByOp(self, ids: tf.Tensor, lengths: tf.Tensor) -> NestedMap:
        self.traces += 1
        with running_op_by_op():
            return self._Search(self.arranged, ids, lengths)

    def _Xla(self, ids: tf.Tensor, lengths: tf.Tensor) -> NestedMap:
        return self._Search(self.theta, ids, lengths)

    def _Search(self, theta: NestedMap, ids: tf.Tensor, lengths: tf.Tensor) -> NestedMap:
        with use_mesh(single_device()):
            return self.decoder.Search(theta, *source(ids, lengths, LONGEST))


@pytest.fixture(
    scope="module",
    params=[(0, 4), (4, 3), (0, 1), (0, 4, 1), (0, 1, 1)],
    ids=["dense_beam_4", "experts_beam_3", "dense_greedy", "multi_query", "multi_query_greedy"],
)
def searcher(request) -> Searcher:
    return Searcher(*request.param)


@pytest.fixture(scope="module")
def together(searcher) -> NestedMap:
    rows = [*range(len(LENGTHS)), None]
    return searcher.op_by_op(*searcher.lines.Rows(rows, 64)).Transform(lambda x: x.numpy())


def test_it_finds_what_xla_finds(searcher, together):
    want = searcher.xla(*searcher.lines.Rows([*range(len(LENGTHS)), None], 64))
    steps = together.ids_BKT.shape[2]
    np.testing.assert_array_equal(together.ids_BKT, want.ids_BKT[:, :, :steps])
    np.testing.assert_array_equal(together.lengths_BK, want.lengths_BK)
    np.testing.assert_allclose(together.scores_BK, want.scores_BK, rtol=1e-5)
    assert (together.lengths_BK[-1] == 0).all()
    assert (together.ids_BKT < V - 7).all()
    assert not np.isin(together.ids_BKT, [1, 3]).any()
    assert len(set(together.lengths_BK[:, 0].tolist())) > 4  # rows leave at different blocks


def test_a_row_is_the_same_to_the_bit_alone_and_with_others(searcher, together):
    """Other rows, another number of them, another padded length: same tokens, same scores."""
    more = [([2, 0, 1], 48), ([9, 8, 7, 6, 5], 64), ([3, None, 0, None], 32)]
    searcher.lines.CheckAlone(searcher.op_by_op, together, more)
    assert searcher.traces == 1


def test_arranged_weights_give_what_the_weights_give(searcher):
    """The whole pass over both sides, cross-attention to a memory that is not kept included."""
    ids, lengths = searcher.lines.Rows([0, 1, 2], 48)
    real = (np.arange(48) < lengths[:, None]).astype(np.int32)
    side = NestedMap(ids=ids, segment_ids=real, segment_pos=np.arange(48) * real, labels=ids)
    batch = NestedMap(src=side, tgt=side).Transform(lambda x: tf.constant(x, tf.int32))
    with use_mesh(single_device()):
        want = searcher.model.LogProbs(searcher.theta, batch)
        with running_op_by_op():
            got = searcher.model.LogProbs(searcher.arranged, batch)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert np.abs(want).max() > 1
