"""Flat beam search compared with a plain one, over models that depend on the whole prefix."""

import numpy as np
import tensorflow as tf
from hypothesis import given, settings, strategies as st
from numpy_beam_search import BOS, EOS, PAD
from refusals import refuses
from toy_search_model import ToyModel, assert_plain

from lingvo_moe.core.decode.flat_beam_search import NEVER, FlatBeamSearch, SearchOptions
from lingvo_moe.core.nested_map import NestedMap


def searching(model, options, allowed=None, step=None, compiled=True):
    """(the largest length of each row) -> what the search finds, as NumPy arrays."""

    def search(max_lengths_B):
        found = FlatBeamSearch(model.max_length, options, allowed)
        return dict(found.Run(step or model.Step, model.Cache(options.beam_size), max_lengths_B))

    if compiled:
        search = tf.function(search, jit_compile=True, autograph=False)

    def run(max_lengths):
        out = search(tf.constant(max_lengths, tf.int32))
        return NestedMap({k: v.numpy() for k, v in out.items()})

    return run


def check(model, max_lengths, options, allowed=None, compiled=True) -> NestedMap:
    got = searching(model, options, allowed, compiled=compiled)(max_lengths)
    assert_plain(got, model, max_lengths, options, allowed)
    return got


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    vocab=st.sampled_from([4, 5, 9, 30]),
    beam_size=st.integers(1, 5),
    alpha=st.sampled_from([0.0, 0.6, 1.0, 2.0]),
    max_lengths=st.lists(st.integers(0, 7), min_size=1, max_size=4),
    data=st.data(),
)
def test_equals_plain_beam_search(seed, vocab, beam_size, alpha, max_lengths, data):
    top_k = data.draw(st.integers(1, beam_size))
    model = ToyModel(seed, len(max_lengths), vocab, 7)
    options = SearchOptions(beam_size=beam_size, top_k=top_k, length_alpha=alpha)
    check(model, max_lengths, options, compiled=False)  # each would take a second


def test_equals_plain_beam_search_when_long():
    model = ToyModel(3, 4, 50, 40)
    check(model, [40, 31, 2, 40], SearchOptions(beam_size=6, top_k=6))


def test_early_stop_saves_steps_and_changes_nothing():
    """The reference never stops early and finds nothing more."""
    max_lengths = [30, 30, 30]
    model = ToyModel(5, 3, 9, 30, scale=3.0)
    options = [SearchOptions(beam_size=4, top_k=k) for k in (1, 4)]
    steps = [check(model, max_lengths, each).steps for each in options]
    assert steps[0] < steps[1] <= 30


def test_ties_go_to_the_lower_hypothesis_and_token():
    class Uniform(ToyModel):
        def Step(self, ids_BJ, cache, time, mask_BJS):
            return tf.zeros([*ids_BJ.shape, self.vocab]), cache

        def Score(self, row, prefix):
            return np.zeros(self.vocab, np.float32)

    for beam_size in (1, 2, 3, 5):
        model = Uniform(0, 2, 40, 6)
        options = SearchOptions(beam_size=beam_size, top_k=beam_size, length_alpha=0.0)
        check(model, [6, 4], options, compiled=False)


def test_only_allowed_tokens_come_out():
    model = ToyModel(7, 3, 20, 10)
    allowed = np.arange(20) % 3 == 1
    got = check(model, [10, 10, 10], SearchOptions(beam_size=3, top_k=3), allowed)
    used = set(got.ids_BKT.flatten()) - {PAD, EOS}
    assert used
    assert all(t % 3 == 1 and t != BOS for t in used)


def test_rows_do_not_disturb_each_other():
    """A row gives bit-identical results alone and among others, also if some of those are skipped."""
    options = SearchOptions(beam_size=3, top_k=2)
    model = ToyModel(9, 4, 15, 12)
    run = searching(model, options)
    together = run([12, 0, 5, 12])
    assert (together.ids_BKT[1] == PAD).all()
    assert (together.lengths_BK[1] == 0).all()
    for others in ([0, 0, 5, 0], [3, 9, 5, 1]):
        again = run(others)
        np.testing.assert_array_equal(again.ids_BKT[2], together.ids_BKT[2])
        np.testing.assert_array_equal(again.scores_BK[2], together.scores_BK[2])
    assert run([0, 0, 0, 0]).steps == 0


def test_a_model_that_breaks_still_ends():
    """NaN logits give no hypothesis, no endless loop and no NaN score."""
    model = ToyModel(1, 2, 8, 6)

    def step(ids_BJ, cache, time, mask_BJS):
        logits_BJV, cache = model.Step(ids_BJ, cache, time, mask_BJS)
        return logits_BJV * tf.constant([np.nan, 1.0])[:, tf.newaxis, tf.newaxis], cache

    got = searching(model, SearchOptions(beam_size=2), step=step)([6, 6])
    assert got.lengths_BK[0, 0] == 0
    assert got.scores_BK[0, 0] == np.float32(NEVER)
    assert got.lengths_BK[1, 0] > 0


@refuses(
    ValueError,
    ({"beam_size": 0}, "beam_size=0: must be an integer from 1 to 1000"),
    ({"beam_size": 2, "top_k": 3}, "top_k=3: must be an integer from 1 to 2"),
    ({"length_alpha": -0.1}, "length_alpha=-0.1: must be a number in"),
    ({"length_alpha": float("nan")}, "length_alpha=nan: must be a number in"),
)
def test_options_that_make_no_sense(bad):
    SearchOptions(**bad)
