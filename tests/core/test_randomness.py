"""Random numbers: the published generator, its statistics, and independence of seeds and places."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core import randomness


def test_threefry_known_answers(monkeypatch):
    """Vectors of the Random123 distribution for threefry2x32, 20 and 13 rounds."""

    def words(*values):
        return tuple(tf.constant(v, tf.uint32) for v in values)

    ones = 0xFFFFFFFF
    for rounds, key, counter, expected in [
        (20, (0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        (20, (ones, ones), (ones, ones), (0x1CB996FC, 0xBB002BE7)),
        (20, (0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
        (13, (0, 0), (0, 0), (0x9D1C5EC6, 0x8BD50731)),
        (13, (ones, ones), (ones, ones), (0xFD36D048, 0x2D17272C)),
        (13, (0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xBA3E4725, 0xF27D669E)),
    ]:
        monkeypatch.setattr(randomness, "_ROUNDS", rounds)
        got = randomness._threefry(words(*key), *words(*counter))
        assert tuple(int(g) for g in got) == expected


def test_stacked_seeds_give_what_each_gives_alone():
    seeds = randomness.fold_in(randomness.make_seed(1, 2), tf.range(3))
    together = randomness.bits(seeds, [3, 4, 5]).numpy()
    for i in range(3):
        alone = randomness.fold_in(randomness.make_seed(1, 2), i)
        np.testing.assert_array_equal(seeds[i], alone)
        np.testing.assert_array_equal(together[i], randomness.bits(alone, [4, 5]))


def test_moments():
    seed = randomness.make_seed(3, 7)
    u = randomness.uniform(seed, [500, 400]).numpy()
    assert u.min() >= 0 and u.max() < 1
    np.testing.assert_allclose([u.mean(), u.var()], [1 / 2, 1 / 12], atol=2e-3)
    n = randomness.normal(seed, [500, 400]).numpy()
    np.testing.assert_allclose([n.mean(), n.std()], [0, 1], atol=5e-3)
    t = randomness.truncated_normal(seed, [500, 400]).numpy()
    assert np.abs(t).max() <= 2
    np.testing.assert_allclose([t.mean(), t.std()], [0, 0.8796], atol=5e-3)


def test_dropout_keeps_the_mean_and_is_identity_in_inference():
    seed = randomness.make_seed(1, 1)
    x = tf.ones([200, 500])
    y = randomness.dropout(x, 0.1, seed).numpy()
    np.testing.assert_allclose([(y == 0).mean(), y.mean()], [0.1, 1.0], atol=5e-3)
    assert randomness.dropout(x, 0.1, None) is x
    with pytest.raises(ValueError, match=r"\[0, 1\), got 1"):
        randomness.dropout(x, 1.0, seed)


def test_seeds_and_places_are_independent():
    base = randomness.make_seed(0, 0)
    seeds = [
        base,
        randomness.make_seed(0, 1),
        randomness.make_seed(1, 0),
        randomness.fold_in(base, "a"),
        randomness.fold_in(base, 1),
        randomness.fold_in(base, tf.constant(2)),
    ]
    draws = np.stack([randomness.uniform(s, [4000]).numpy() for s in seeds])
    correlation = np.corrcoef(draws) - np.eye(len(seeds))
    assert np.abs(correlation).max() < 0.06
    u = randomness.uniform(base, [100, 20, 30]).numpy()
    assert len(np.unique(u)) > 0.99 * u.size


def test_numbers_compile_and_need_a_static_shape():
    seed = randomness.make_seed(5, 6)
    compiled = tf.function(lambda s: randomness.bits(s, [3, 5, 2]), jit_compile=True)
    np.testing.assert_array_equal(compiled(seed), randomness.bits(seed, [3, 5, 2]))
    with pytest.raises(ValueError, match="static"):
        randomness.bits(seed, [None, 3])
    assert randomness.bits(seed, []).shape == []
