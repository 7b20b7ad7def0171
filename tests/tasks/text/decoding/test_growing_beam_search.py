"""The search in blocks of steps compared with the plain one, and its top-k with a sort."""

import numpy as np
import pytest
import tensorflow as tf
from toy_search_model import D, ToyModel, assert_plain

from lingvo_moe.core.decode.flat_beam_search import NEVER, SearchOptions
from lingvo_moe.core.kernels.weights import FEWEST_ROWS
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.text.decoding.growing_beam_search import BLOCK, GrowingBeamSearch, largest


class GrowingToyModel(ToyModel):
    """A ToyModel whose cache may have any number of rows and steps: its rows' numbers are in the cache."""

    def Cache(self, beam_size: int) -> NestedMap:
        return NestedMap(
            key_BLX=tf.zeros([self.rows, BLOCK, beam_size * D]), row_B=tf.range(self.rows)
        )

    LETTERS = NestedMap(key_BLX="BLX", row_B="B")

    def Step(self, ids_BJ, cache, time, mask_BJS):
        shape = tf.shape(cache.key_BLX)
        J = ids_BJ.shape[1]
        new_BJD = tf.gather(self.token_VD, ids_BJ) * tf.gather(self.time_TD, time)
        here_L1 = (tf.range(shape[1]) == time)[:, tf.newaxis]
        key_BLX = tf.where(here_L1, tf.reshape(new_BJD, [-1, 1, J * D]), cache.key_BLX)
        key_BSD = tf.reshape(key_BLX, [shape[0], -1, D])
        state_BJD = tf.tanh(tf.einsum("BJS,BSD->BJD", tf.cast(mask_BJS, tf.float32), key_BSD))
        out_BDV = tf.gather(self.out_BDV, cache.row_B)
        logits_BJV = tf.einsum("BJD,BDV->BJV", state_BJD, out_BDV)
        return self.Logits(logits_BJV, cache), NestedMap(cache, key_BLX=key_BLX)

    def Logits(self, logits_BJV, cache):
        return logits_BJV


def run(model, max_lengths, options, allowed=None) -> NestedMap:
    """Runs the search with a number of rows that is unknown while tracing."""

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int32)], autograph=False)
    def find(max_lengths_B):
        search = GrowingBeamSearch(model.max_length, options, allowed)
        cache = model.Cache(options.beam_size)
        return dict(search.Run(model.Step, cache, max_lengths_B, model.LETTERS))

    out = find(tf.constant(max_lengths, tf.int32))
    return NestedMap({k: v.numpy() for k, v in out.items()})


def check(model, max_lengths, options, allowed=None) -> NestedMap:
    got = run(model, max_lengths, options, allowed)
    assert_plain(got, model, max_lengths, options, allowed)
    return got


def test_equals_plain_beam_search_over_blocks():
    """Rows end before, at and after the ends of blocks; some have length 0."""
    max_lengths = [40, 3, 0, BLOCK - 1, 33, BLOCK, 12, 2 * BLOCK - 1, BLOCK + 1, 40]
    model = GrowingToyModel(3, len(max_lengths), 30, 40)
    got = check(model, max_lengths, SearchOptions(beam_size=5, top_k=2))
    assert got.ids_BKT.shape[2] == 40
    lengths = set(got.lengths_BK[:, 0].tolist())
    assert min(lengths - {0}) < BLOCK < max(lengths)


@pytest.mark.parametrize("vocab, beam_size", [(4, 4), (9, 1), (30, 3)])
def test_equals_plain_beam_search(vocab, beam_size):
    """A vocabulary may also have fewer tokens than there are candidates."""
    max_lengths = np.random.default_rng(vocab).integers(0, 21, 12)
    model = GrowingToyModel(vocab, len(max_lengths), vocab, 20)
    check(model, max_lengths, SearchOptions(beam_size=beam_size, top_k=beam_size))


@pytest.mark.parametrize("beam_size, max_lengths", [(1, [20]), (3, [3, 40, 0, 20, 4, 2])])
def test_products_have_no_fewer_than_so_many_rows(beam_size, max_lengths):
    """There is a single row, or the rows that are left when others have ended."""

    class Counting(GrowingToyModel):
        def Logits(self, logits_BJV, cache):
            hypotheses = tf.shape(logits_BJV)[0] * beam_size
            enough = tf.debugging.assert_greater_equal(hypotheses, FEWEST_ROWS)
            with tf.control_dependencies([enough]):
                return tf.identity(logits_BJV)

    model = Counting(3, len(max_lengths), 30, 40)
    check(model, max_lengths, SearchOptions(beam_size=beam_size))


def test_ties_go_to_the_lower_hypothesis_and_token():
    class Uniform(GrowingToyModel):
        def Logits(self, logits_BJV, cache):
            return tf.zeros_like(logits_BJV)

        def Score(self, row, prefix):
            return np.zeros(self.vocab, np.float32)

    for beam_size, vocab in ((3, 40), (2, 64 * 24)):  # the last one by groups
        options = SearchOptions(beam_size=beam_size, top_k=beam_size, length_alpha=0.0)
        check(Uniform(0, 2, vocab, 4), [4, 2], options)


@pytest.mark.parametrize("apart", [3, 20], ids=["most forbidden", "few forbidden"])
def test_only_allowed_tokens_come_out(apart):
    allowed = np.arange(60) % apart == 1
    if apart == 20:
        allowed = ~allowed
    model = GrowingToyModel(7, 3, 60, 10)
    got = check(model, [10, 10, 4], SearchOptions(beam_size=3, top_k=3), allowed)
    assert allowed[list(set(got.ids_BKT.flatten()) - {0, 2})].all()


def test_a_model_that_breaks_still_ends():
    """NaN logits of a row give no hypothesis, no endless loop and no NaN score; the other row is right."""

    class Breaks(GrowingToyModel):
        def Logits(self, logits_BJV, cache):
            broken_B = cache.row_B == 1
            return tf.where(broken_B[:, tf.newaxis, tf.newaxis], np.nan, logits_BJV)

    options = SearchOptions(beam_size=2)
    model = Breaks(1, 2, 8, 20)
    got = run(model, [20, 20], options)
    assert (got.lengths_BK[1, 0], got.scores_BK[1, 0]) == (0, np.float32(NEVER))
    assert_plain(got, model, [20], options)


@pytest.mark.parametrize("mean", [0.2, 2.0, 1e6], ids=["many ties", "some ties", "hardly any"])
def test_the_largest_of_groups_are_the_largest_of_all(mean):
    """Few values are large, so that groups differ in their maxima and have equal lower values."""
    x = np.random.default_rng(1).exponential(mean, [50, 64 * 48]).astype(np.int32)
    x = x.astype(np.float32)
    x[1] = -np.inf
    x[2, ::3] = -np.inf
    for count in (1, 2, 11, 12):
        best, at = largest(tf.constant(x), count)
        order = np.argsort(-x, axis=1, kind="stable")[:, :count]
        np.testing.assert_array_equal(at, order)
        np.testing.assert_array_equal(best, np.take_along_axis(x, order, 1))
