"""Lines that join a running batch at any time get the translations that they get alone, and those of the plain search.

Letters: as in test_fast_decoder.py.
"""

from collections.abc import Sequence

import numpy as np
import pytest
import tensorflow as tf
from rows import assert_rows_equal
from searches import Lines, make_model, source

from lingvo_moe.core.decode.flat_beam_search import SearchOptions
from lingvo_moe.core.decode.ranges import Sampling
from lingvo_moe.core.layers.positions import Alibi
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.mt.decoding.fast_decoder import FastDecoder
from lingvo_moe.tasks.mt.decoding.paged_decoder import PagedDecoder
from lingvo_moe.tasks.mt.decoding.running_translations import (
    RunningTranslation,
    TranslationBatch,
    TranslationSteps,
)
from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.decoding.saved_weights import PackedWeights

pytestmark = pytest.mark.slow

V, LONGEST = 300, 30
LENGTHS = [3, 40, 16, 1, 27, 17, 5, 12]
SIZES = {"num_encoder_layers": 2, "num_decoder_layers": 2, "num_experts": 4}


class Runner:
    """A model, its search in batches, and the steps of a running batch."""

    def __init__(self, beam_size: int):
        model, theta = make_model(V, position=Alibi.Params(), **SIZES)
        weights = PackedWeights(model, theta)
        self.options = SearchOptions(beam_size, min(2, beam_size))
        self.lines = Lines(LENGTHS, V)
        self.decoder = FastDecoder(weights, self.options, LONGEST, V)
        steps = PagedDecoder(weights, self.options, LONGEST, V)
        self.steps = TranslationSteps(steps, lambda text: text, self._Rows, self._texts)
        self.plain = tf.function(self._Plain, autograph=False)

    def _Plain(self, ids: tf.Tensor, lengths: tf.Tensor) -> NestedMap:
        return self.decoder.Find(*self._Rows(ids, lengths))

    def _Rows(self, ids: tf.Tensor, lengths: tf.Tensor) -> tuple:
        return source(ids, lengths, LONGEST)

    @staticmethod
    def _texts(ids: tf.Tensor, lengths: tf.Tensor, scores: tf.Tensor) -> tuple:
        del lengths
        words = tf.where(ids > 0, tf.strings.as_string(ids), "")
        return tf.strings.strip(tf.strings.reduce_join(words, -1, separator=" ")), scores

    def Line(self, number: int) -> RunningTranslation:
        """A line that can join."""
        ids = self.lines[number].tolist()
        most = min(len(ids) + 4, LONGEST) * self.options.beam_size
        return RunningTranslation([0], Sampling(), source=ids, most=most)

    def Run(
        self, groups: Sequence[Sequence[int]], rows: int = 16, pages: int = 100
    ) -> dict[int, RunningTranslation]:
        """The lines of groups, of which one more joins before each step."""
        batch = TranslationBatch(self.steps, rows, pages, self.options.beam_size)
        texts = {number: self.Line(number) for group in groups for number in group}
        groups = [*groups]
        while groups or batch.running or batch.waiting:
            for number in groups.pop(0) if groups else ():
                batch.Join(texts[number])
            batch.Step()
        assert batch.free_pages == pages
        return texts


@pytest.fixture(scope="module", params=[3, 1], ids=["beam", "greedy"])
def runner(request) -> Runner:
    return Runner(request.param)


def test_lines_get_the_translations_of_the_plain_search_whenever_they_join(runner):
    want = runner.plain(*map(tf.constant, runner.lines.Rows(range(len(LENGTHS)), 48)))
    joined = runner.Run([[0, 1], [2], [], [3, 4, 5], [6, 7]])
    for number, text in joined.items():
        rows = [[i for i in row if i] for row in want.ids_BKT[number].numpy().tolist()]
        assert text.texts == [" ".join(map(str, row)) for row in rows]
        np.testing.assert_allclose(text.scores, want.scores_BK[number], rtol=1e-5)
    assert len({len(text.texts[0]) for text in joined.values()}) > 3


def test_a_line_is_bit_identical_alone_with_others_and_when_it_had_to_wait(runner):
    """Lines give their pages back and begin again where these are few, and wait where rows are."""
    everyone = [*range(len(LENGTHS))]
    together = runner.Run([everyone])
    few = runner.Run([everyone], pages=5)
    waiting = runner.Run([everyone], rows=2)
    for number in (1, 4, 5):
        alone = runner.Run([[number]])[number]
        for one in (together, few, waiting):
            assert one[number].texts == alone.texts
            assert_rows_equal(one[number].scores, alone.scores)


def test_a_line_that_leaves_changes_no_other(runner):
    batch = TranslationBatch(runner.steps, 4, 20, runner.options.beam_size)
    stays, leaves = runner.Line(4), runner.Line(1)
    batch.Join(leaves)
    batch.Join(stays)
    batch.Step()
    batch.Leave(leaves)
    while not stays.reason:
        batch.Step()
    assert batch.free_pages == 20
    assert stays.texts == runner.Run([[4]])[4].texts
    with pytest.raises(DataError, match=r"a line of 40 tokens needs .* pages, and there are 0"):
        TranslationBatch(runner.steps, 4, 0, runner.options.beam_size).Join(leaves)
