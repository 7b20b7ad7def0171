"""MtModel's search with a shortlist equals a search over all tokens in which the others are forbidden.

Each row is bit-identical whatever rows it runs with.

Letters: B row, S source token, V vocabulary.
"""

import numpy as np
import pytest
import tensorflow as tf
from searches import Lines, make_model, source

from lingvo_moe.core.decode.flat_beam_search import NEVER, FlatBeamSearch, SearchOptions
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import single_device, use_mesh
from lingvo_moe.tasks.mt.decoding.fast_decoder import FastDecoder
from lingvo_moe.tasks.mt.decoding.shortlist import Shortlist
from lingvo_moe.tasks.mt.decoding.shortlist_columns import ShortlistColumns
from lingvo_moe.tasks.text.decoding.saved_weights import PackedWeights

V, LONGEST = 704, 24  # more than a block of steps
LENGTHS = [3, 30, 16, 1, 17, 5, 64, 12]
VOCABS = {"source": b"", "target": b""}


def make_shortlist() -> Shortlist:
    """Makes a shortlist of 0 to 12 candidates a piece; the list of a line may be smaller than the beam."""
    rng = np.random.default_rng(2)
    candidates = [rng.integers(4, V, rng.integers(0, 13)).tolist() for _ in range(V)]
    return Shortlist.Make(candidates, [7, 9, 700], VOCABS)


EVERYTHING = Shortlist.Make([[]] * V, range(V), VOCABS)


class Searcher:
    """A model of one layer a side, and searches with it."""

    def __init__(self, beam_size: int):
        self.model, self.theta = make_model(
            V, hidden_dim=128, num_encoder_layers=1, num_decoder_layers=1, num_experts=0
        )
        self._fast = PackedWeights(self.model, self.theta)
        self.options = SearchOptions(beam_size, min(2, beam_size))
        self.lines = Lines(LENGTHS, V)
        self.traces = 0

    def With(self, shortlist: Shortlist | None):
        """Searches ids [B,S] with lengths [B]."""
        columns = None
        if shortlist:
            columns = ShortlistColumns(shortlist, V, 2 * self.options.beam_size + 3)
        decoder = FastDecoder(self._fast, self.options, LONGEST, V, columns)

        def search(ids: tf.Tensor, lengths: tf.Tensor) -> NestedMap:
            self.traces += 1
            return decoder.Find(*source(ids, lengths, LONGEST))

        kinds = [tf.TensorSpec([None, None], tf.int32), tf.TensorSpec([None], tf.int32)]
        return tf.function(search, input_signature=kinds, autograph=False)

    def Forbidding(self, shortlist: Shortlist, ids: np.ndarray, lengths: np.ndarray) -> NestedMap:
        """The plain search, with logits of -1e9 for tokens outside a row's list."""
        own_BV = np.stack([np.isin(np.arange(V), shortlist.Of(row)) for row in ids])
        search = FlatBeamSearch(LONGEST, self.options, np.arange(V) != 3)

        @tf.function(autograph=False)
        def run(ids: tf.Tensor, lengths: tf.Tensor) -> NestedMap:
            with use_mesh(single_device()):
                src, longest = source(ids, lengths, LONGEST)
                encoded = self.model.Encode(self.theta, src)
                cache = self.model.InitCache(self.theta, encoded, self.options.beam_size, LONGEST)

                def step(ids, cache, time, mask):
                    logits, cache = self.model.ExtendStep(self.theta, ids, cache, time, mask)
                    return tf.where(own_BV[:, np.newaxis], logits, NEVER), cache

                return search.Run(step, cache, longest)

        return run(tf.constant(ids), tf.constant(lengths))


@pytest.fixture(scope="module")
def searcher() -> Searcher:
    return Searcher(4)


@pytest.fixture(scope="module")
def search(searcher):
    return searcher.With(make_shortlist())


@pytest.fixture(scope="module")
def together(searcher, search) -> NestedMap:
    return search(*searcher.lines.Rows([*range(len(LENGTHS)), None], 64)).Transform(
        lambda x: x.numpy()
    )


def test_only_a_row_s_own_tokens_come_out(searcher, together):
    for row, line in enumerate(searcher.lines):
        own = make_shortlist().Of(line)
        assert np.isin(together.ids_BKT[row], [*own, 0]).all()
        assert not np.isin(together.ids_BKT[row], [1, 3]).any()
    assert (together.lengths_BK[-1] == 0).all()
    assert len(set(together.lengths_BK[:, 0].tolist())) > 3  # rows leave at different times


def test_a_row_is_bit_identical_alone_and_with_others(searcher, search, together):
    """Other rows, another number of rows or another padded length make other unions and lengths of lists."""
    more = [([2, 0, 1], 48), ([7, 6, 5, 4], 64), ([3, None, 0, None], 32), ([0] * 32, 16)]
    searcher.lines.CheckAlone(search, together, more)
    assert searcher.traces == 1


def test_everything_in_the_list_is_the_plain_search_bit_for_bit():
    searcher = Searcher(1)
    rows = searcher.lines.Rows([*range(len(LENGTHS)), None], 64)
    want, got = searcher.With(None)(*rows), searcher.With(EVERYTHING)(*rows)
    for name in ("ids_BKT", "lengths_BK", "scores_BK"):
        np.testing.assert_array_equal(got[name], want[name])


def test_it_finds_what_forbidding_the_others_finds(searcher, search):
    ids, lengths = searcher.lines.Rows([0, 4, 2, 3], 32)
    ids[3, 0] = 5
    assert len(make_shortlist().Of(ids[3])) < 30  # fewer than the list holds
    got = search(ids, lengths)
    want = searcher.Forbidding(make_shortlist(), ids, lengths)
    steps = got.ids_BKT.shape[2]
    np.testing.assert_array_equal(got.ids_BKT, want.ids_BKT[:, :, :steps])
    np.testing.assert_array_equal(got.lengths_BK, want.lengths_BK)
    np.testing.assert_allclose(got.scores_BK, want.scores_BK, rtol=1e-4)


def test_lists_are_what_the_shortlist_says():
    shortlist = make_shortlist()
    ids = np.random.default_rng(3).integers(0, V, (5, 9)).astype(np.int32)
    ids[2] = 0
    lists, union_U = ShortlistColumns(shortlist, V).Lists(tf.constant(ids))
    assert lists.tokens.shape[1] % 64 == union_U.shape[0] % 64 == 0
    for row, tokens, at, bias in zip(ids, lists.tokens, lists.at, lists.bias, strict=True):
        own = shortlist.Of(row)
        np.testing.assert_array_equal(tokens, np.pad(own, (0, len(tokens) - len(own))))
        np.testing.assert_array_equal(tf.gather(union_U, at), tokens)
        np.testing.assert_array_equal(bias == 0, np.arange(len(tokens)) < len(own))
