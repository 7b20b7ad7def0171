"""Sampling compared with its definition in NumPy, and with the probabilities that it should have."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core.decode.sampling import above, sample
from lingvo_moe.core.nested_map import NestedMap

V = 12


def _settings(rows, temperature=1.0, top_k=0, top_p=1.0, seed=0):
    return NestedMap(
        temperature=tf.fill([rows], temperature),
        top_k=tf.fill([rows], top_k),
        top_p=tf.fill([rows], top_p),
        seed=tf.stack([tf.fill([rows], seed), tf.range(rows)], 1),
    )


def _probabilities(logits, temperature, top_k, top_p):
    """Probabilities by the definition: the largest first, cut off, and the rest sums to one."""
    order = np.argsort(-logits)
    p = np.exp(logits[order] / temperature)
    p[top_k or V :] = 0
    p /= p.sum()
    number = np.searchsorted(np.cumsum(p), top_p) + 1 if top_p < 1 else V
    p[number:] = 0
    found = np.zeros(V)
    found[order] = p / p.sum()
    return found


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.5, 3, 1.0), (2.0, 0, 0.7), (1.5, 6, 0.8), (1.0, 1, 1.0), (1.0, 99, 1e-6)],
)
def test_tokens_have_their_probabilities(temperature, top_k, top_p):
    rows = 20_000
    logits = np.random.RandomState(0).randn(V).astype(np.float32)
    settings = _settings(rows, temperature, top_k, top_p)
    drawn = sample(tf.tile(logits[np.newaxis], [rows, 1]), settings, tf.constant(3)).numpy()
    want = _probabilities(logits, temperature, top_k, top_p)
    got = np.bincount(drawn, minlength=V) / rows
    assert (got[want == 0] == 0).all()
    # Five standard deviations, of some hundred comparisons.
    np.testing.assert_array_less(np.abs(got - want), 5 * np.sqrt(want / rows) + 1e-9)


def test_a_row_draws_the_same_alone_and_other_steps_and_seeds_draw_others():
    logits = tf.constant(np.random.RandomState(1).randn(64, V), tf.float32)
    draw = lambda step, **kwargs: sample(logits, _settings(64, **kwargs), tf.constant(step)).numpy()  # noqa: E731
    first = draw(0)
    one = _settings(64).Transform(lambda x: x[5:6])
    assert sample(logits[5:6], one, tf.constant(0)).numpy() == first[5]
    assert (draw(1) != first).mean() > 0.5 and (draw(0, seed=1) != first).mean() > 0.5
    best = np.argmax(logits, 1)
    np.testing.assert_array_equal(draw(0, temperature=0.0, top_k=5), best)
    mixed = NestedMap(_settings(64), temperature=tf.where(tf.range(64) < 9, 0.0, 1.0))
    got = sample(logits, mixed, tf.constant(0)).numpy()
    np.testing.assert_array_equal(got, [*best[:9], *first[9:]])


def test_min_p_leaves_the_tokens_with_that_share_of_the_largest_probability():
    logits = np.float32([[0.0, -1.0, -2.0, -3.0]] * 4)
    min_p, temperature = np.float32([0.0, 0.3, 0.3, 1.0]), np.float32([1.0, 1.0, 2.0, 0.0])
    left = np.isfinite(above(tf.constant(logits), min_p, temperature).numpy())
    want = [[True] * 4, [True, True, False, False], [True, True, True, False], [True] + [False] * 3]
    np.testing.assert_array_equal(left, want)


def test_a_temperature_too_cold_for_float32_draws_the_likeliest_token():
    logits = tf.tile([[-np.inf, 49.0, 50.0]], [64, 1])
    for cut in ({}, {"top_k": 2}, {"top_p": 0.99}):
        assert (sample(logits, _settings(64, 1e-37, **cut), tf.constant(0)).numpy() == 2).all()
