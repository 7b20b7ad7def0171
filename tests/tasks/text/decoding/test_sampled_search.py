"""Drawn texts: their tokens have the model's probabilities, and their scores are those of these tokens."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core.decode.flat_beam_search import SearchOptions
from lingvo_moe.core.decode.ranges import Sampling
from lingvo_moe.core.decode.sampling import LETTERS
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.text.decoding.noise import BLANK, Noise, read_noise
from lingvo_moe.tasks.text.decoding.sampled_search import SampledSearch, settings_of

_LOGITS = np.log([0.2, 0.1, 0.2, 0.1, 0.3, 0.1])  # PAD, BOS, EOS, and three words
_ROWS, _J, _LONGEST = 500, 3, 6


@tf.function(autograph=False, input_signature=[
    tf.TensorSpec([None]), tf.TensorSpec([None], tf.int32), tf.TensorSpec([None]), tf.TensorSpec([None, 2], tf.int32)
])  # fmt: skip
def _search(temperature_B, top_k_B, top_p_B, seed_B2):
    options = SearchOptions(beam_size=1, length_alpha=0.0)
    search = SampledSearch(_LONGEST, options, np.arange(6) != 5)  # the last word is forbidden

    def step(ids, cache, time, mask):
        logits = tf.constant(_LOGITS, tf.float32)
        return tf.tile(logits[tf.newaxis, tf.newaxis], [tf.shape(ids)[0], 1, 1]), cache

    settings = NestedMap(temperature=temperature_B, top_k=top_k_B, top_p=top_p_B, seed=seed_B2)
    cache, letters = NestedMap(settings=settings), NestedMap(settings=LETTERS)
    return search.Run(step, cache, tf.fill(tf.shape(top_k_B), _LONGEST), letters)


def _run(sampling: Sampling, rows: int = _ROWS) -> NestedMap:
    """_J texts for each of the rows, [rows, _J, ...]."""
    s = settings_of(sampling, tf.range(rows * _J) * 7919)
    found = NestedMap(_search(s.temperature, s.top_k, s.top_p, s.seed))
    del found.steps
    return found.Transform(lambda x: x.numpy().reshape(rows, _J, *x.shape[2:]))


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_tokens_have_the_models_probabilities_and_texts_their_scores(temperature):
    found = _run(Sampling(temperature=temperature))
    allowed = np.exp(_LOGITS[[2, 3, 4]] / temperature)
    first = found.ids_BKT[:, :, 0].ravel()
    shares = [np.mean(first == token) for token in (2, 3, 4)]
    np.testing.assert_allclose(shares, allowed / allowed.sum(), atol=4 * 0.5 / 1500**0.5)
    for ids, length, score, log_probs in zip(
        found.ids_BKT.reshape(-1, _LONGEST),
        found.lengths_BK.ravel(),
        found.scores_BK.ravel(),
        found.log_probs_BKT.reshape(-1, _LONGEST),
    ):
        assert ids[length - 1] == 2 and set(ids[: length - 1]) <= {3, 4} and not ids[length:].any()
        # By the model, also where it had no choice: at the limit of length.
        assert score == pytest.approx(_LOGITS[ids[:length]].sum(), abs=1e-4)
        np.testing.assert_allclose(log_probs[:length], _LOGITS[ids[:length]], atol=1e-5)
    assert (found.lengths_BK == _LONGEST).any() and (found.lengths_BK == 1).any()


def test_texts_of_a_row_are_independent_and_depend_on_the_seed_alone():
    one, again = (_run(Sampling(temperature=1.0, seed=5)) for _ in range(2))
    np.testing.assert_array_equal(one.ids_BKT, again.ids_BKT)
    few = _run(Sampling(temperature=1.0, seed=5), rows=3)
    np.testing.assert_array_equal(one.ids_BKT[:3], few.ids_BKT)
    other = _run(Sampling(temperature=1.0, seed=6))
    assert (one.ids_BKT != other.ids_BKT).any(2).mean() > 0.5
    # By their sum of squared probabilities 0.33 + ... of two texts are equal; copies would all be.
    same = (one.ids_BKT[:, 0] == one.ids_BKT[:, 1]).all(1).mean()
    assert same < 0.4


def test_the_likeliest_alone_is_greedy():
    found = _run(Sampling(temperature=3.0, top_k=1))
    assert (found.ids_BKT == [4] * (_LONGEST - 1) + [2]).all()


def test_noise_is_of_the_shares_that_were_asked_for():
    words = [f"w{i}" for i in range(20_000)]
    text = " ".join(words)
    assert Noise(0, 0, 0)(text) == text and Noise(0, 0, 0)("") == ""
    found = Noise(0.1, 0, 0)(text).split()
    assert len(found) == pytest.approx(18_000, abs=200) and found == sorted(
        found, key=lambda w: int(w[1:])
    )
    assert Noise(0, 0.2, 0)(text).split().count(BLANK) == pytest.approx(4_000, abs=200)
    moved = [int(word[1:]) - i for i, word in enumerate(Noise(0, 0, 3)(text).split())]
    assert max(map(abs, moved)) == 3 and np.mean(np.abs(moved)) > 0.5
    assert Noise(1, 0, 0)("one word") == "one"
    assert Noise(0.5, 0, 3, 1)(text) == Noise(0.5, 0, 3, 1)(text) != Noise(0.5, 0, 3, 2)(text)
    assert read_noise("0.1,0.2,3") == (0.1, 0.2, 3)
    for wrong in ("", "1,2", "0.1,0.1,x", "2,0,0", "0,0,-1", "nan,0,0"):
        with pytest.raises(ValueError, match="must be"):
            read_noise(wrong)
