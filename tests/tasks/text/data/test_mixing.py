import hashlib

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from lingvo_moe.core.input.permutation import permute
from lingvo_moe.tasks.text.batches.order import WINDOW, PairOrder, shuffled
from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.data.mixing import draw_languages, quotas, temperature_weights


def test_temperature_by_hand():
    pairs = {"a": 32, "b": 1}
    assert temperature_weights(pairs, 1) == pytest.approx({"a": 32 / 33, "b": 1 / 33})
    assert temperature_weights(pairs, 5) == pytest.approx({"a": 2 / 3, "b": 1 / 3})
    assert temperature_weights(pairs, 1e9) == pytest.approx({"a": 0.5, "b": 0.5})
    huge = temperature_weights({"a": 10**15, "b": 1}, 0.05)
    assert huge["a"] == pytest.approx(1.0)
    with pytest.raises(DataError, match="temperature=0"):
        temperature_weights(pairs, 0)


def test_quotas_use_what_small_languages_leave():
    assert quotas({"a": 1000, "b": 1000, "c": 10}, 1e9, 300) == {"c": 10, "a": 145, "b": 145}
    assert quotas({"a": 5, "b": 3}, 5, 100) == {"a": 5, "b": 3}


@given(
    st.dictionaries(st.text("abc", min_size=1, max_size=2), st.integers(1, 10_000), min_size=1),
    st.floats(0.5, 100),
    st.integers(100, 20_000),
)
@settings(max_examples=30, deadline=None)
def test_quotas_stay_within_the_limit(pairs, temperature, limit):
    drawn = quotas(pairs, temperature, limit)
    assert set(drawn) == set(pairs)
    assert all(1 <= drawn[lang] <= n for lang, n in pairs.items())
    assert sum(drawn.values()) <= limit + len(pairs)
    if sum(pairs.values()) <= limit:
        assert drawn == pairs


def test_draws_follow_the_weights():
    weights = np.array([0.7, 0.25, 0.05])
    drawn = np.concatenate([draw_languages(weights, 1, block, 5000) for block in range(8)])
    shares = np.bincount(drawn, minlength=3) / drawn.size
    np.testing.assert_allclose(shares, weights, atol=0.01)
    assert (draw_languages(weights, 1, 3, 100) == draw_languages(weights, 1, 3, 100)).all()
    assert (draw_languages(weights, 1, 3, 100) != draw_languages(weights, 2, 3, 100)).any()


@given(st.integers(1, 3000), st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_permute_is_a_permutation(n, key):
    out = permute(np.arange(n), n, key)
    assert sorted(out) == list(range(n))
    assert permute(np.array(n // 2), n, key) == out[n // 2]


def test_permute_shuffles_well():
    n = 10_000
    a, b = permute(np.arange(n), n, 0, "x"), permute(np.arange(n), n, 1, "x")
    for order in (a, b):
        assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 0.05
        assert (np.diff(order) == 1).mean() < 0.01
    assert (a == b).mean() < 0.01
    assert permute(np.arange(3), 2**40, 7).max() > 2**30  # no memory for the range is needed
    with pytest.raises(ValueError, match=r"\[0, 5\)"):
        permute(np.array([5]), 5, 0)


def test_every_epoch_holds_every_pair_once_in_another_order():
    sizes = {"a": 3000, "b": 11}
    order = PairOrder(sizes, temperature=1e9, seed=5)
    drawn: dict[int, list[int]] = {0: [], 1: []}
    for _ in range(20_000):
        lang, position = next(order)
        drawn[lang].append(position)
    for lang, n in enumerate(sizes.values()):
        epochs = [drawn[lang][i : i + n] for i in range(0, len(drawn[lang]) - n, n)]
        assert len(epochs) >= 3
        assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
        assert epochs[0] != epochs[1]


def test_corpora_are_drawn_by_their_weights():
    """Whatever their sizes: the shares are within four standard errors of those of the weights."""
    sizes, weights = {"old": 5000, "mine": 40, "more": 7}, {"mine": 3, "old": 1, "more": 0.5}
    order = PairOrder(sizes, 5.0, 1, weights=weights)
    drawn = np.bincount([next(order)[0] for _ in range(20_000)]) / 20_000
    shares = np.array([weights[name] for name in sizes]) / 4.5
    assert np.all(np.abs(drawn - shares) < 4 * np.sqrt(shares * (1 - shares) / 20_000))
    for wrong, message in (
        ({"old": 1, "mine": 3}, r"input\.weights=.*give a weight to each of old, mine, more"),
        ({**weights, "mine": 0}, "'mine': 0 must be a positive number"),
        ({**weights, "mine": "3"}, "'mine': '3' must be a positive number"),
    ):
        with pytest.raises(DataError, match=message):
            PairOrder(sizes, 5.0, 1, weights=wrong)


@pytest.mark.parametrize("place", [0, 4095, 4096, 4097])
def test_the_order_resumes(place):
    sizes = {"a": 500, "b": 7}
    whole, resumed = PairOrder(sizes, 5.0, 1), PairOrder(sizes, 5.0, 1)
    for _ in range(place):
        next(whole)
    next(resumed)  # where it stood before does not matter
    resumed.SetState(whole.GetState())
    assert [next(resumed) for _ in range(5000)] == [next(whole) for _ in range(5000)]


def test_an_order_that_resumes_draws_its_own_block_alone(monkeypatch):
    blocks: list[int] = []

    def recording(weights, seed, block, count):
        blocks.append(block)
        return draw_languages(weights, seed, block, count)

    monkeypatch.setattr(f"{PairOrder.__module__}.draw_languages", recording)
    resumed = PairOrder({"a": 500, "b": 7}, 5.0, 1)
    resumed.SetState({"block": 3, "place": 10, "before": [12000, 288]})
    next(resumed)
    assert blocks == [3]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=4 * WINDOW + 1), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_an_epoch_over_shards_holds_every_pair_once(shards, epoch):
    n = sum(shards)
    key = (7, "a", epoch)
    (positions,) = shuffled([(np.arange(n), np.array(shards), key)])
    assert sorted(positions) == list(range(n))
    some = np.arange(n)[:: max(1, n // 7)]
    both = shuffled([(some, np.array(shards), key), (np.arange(5), np.array([5]), (1,))])
    assert (both[0] == positions[some]).all() and (both[1] == permute(np.arange(5), 5, 1)).all()


def test_an_epoch_draws_from_few_shards_at_a_time():
    shards = np.full(40, 1000)
    epochs = shuffled([(np.arange(40_000), shards, (7, "a", epoch)) for epoch in (0, 1)])
    for positions in epochs:
        for begin in range(0, 40_000, WINDOW * 1000):
            window = positions[begin : begin + WINDOW * 1000]
            assert len(np.unique(window // 1000)) == WINDOW
            assert abs(np.corrcoef(window // 1000, np.arange(window.size))[0, 1]) < 0.1
    assert (epochs[0] // 1000 != epochs[1] // 1000).mean() > 0.5
    # Few shards: the whole epoch is one permutation, the same whatever the shards.
    (few,) = shuffled([(np.arange(4000), shards[:4], (7, "a", 0))])
    assert (few == permute(np.arange(4000), 4000, 7, "a", 0)).all()


def test_the_order_is_that_of_earlier_versions():
    """A run goes on in the order in which it began, with whole epochs of few shards and windows of many."""
    digest = hashlib.blake2b(digest_size=8)
    for sizes, shards in (
        ({"a": 3000, "b": 11}, None),
        ({"a": 2600, "b": 290}, {"a": [100] * 26, "b": [29] * 10}),
    ):
        order = PairOrder(sizes, temperature=3.0, seed=17, shards=shards)
        for _ in range(10_000):
            digest.update(repr(next(order)).encode())
    assert digest.hexdigest() == "e41bf54c805a103c"
