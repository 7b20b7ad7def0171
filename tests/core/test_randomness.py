"""Random numbers: statistics, and independence of seeds and of the layers' order."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core import kernels, randomness
from lingvo_moe.core.kernels import tensorflow


def test_every_bit_of_seed_and_place_changes_every_bit_of_the_result_half_the_time():
    rng = np.random.default_rng(0)
    seeds = rng.integers(-(2**31), 2**31, [4000, 2], dtype=np.int64).astype(np.int32)

    def draw(seeds, row=5, column=37):
        return randomness.bits(tf.constant(seeds), [4000, 8, 64]).numpy()[:, row, column]

    changed = {}
    base = draw(seeds)
    for bit in (0, 7, 19, 31):
        for word in (0, 1):
            flip = np.zeros(2, np.int32)
            flip[word] = np.int32(np.uint32(1 << bit).view(np.int32))
            changed[f"seed word {word}, bit {bit}"] = draw(seeds ^ flip)
    changed |= {f"row bit {b}": draw(seeds, row=5 ^ (1 << b)) for b in (0, 1, 2)}
    changed |= {f"column bit {b}": draw(seeds, column=37 ^ (1 << b)) for b in (0, 3, 5)}
    for what, other in changed.items():
        share = [((base ^ other) >> bit & 1).mean() for bit in range(32)]
        assert np.abs(np.array(share) - 0.5).max() < 0.04, (what, share)


def test_neighbours_are_uncorrelated():
    z = randomness.uniform(randomness.make_seed(11, 3), [64, 4096]).numpy()
    counts = np.bincount((z * 256).astype(int).ravel(), minlength=256)
    assert ((counts - 1024) ** 2 / 1024).sum() < 360  # chi-squared, 255 degrees of freedom
    for dropped in (z, z < 0.1):
        for lag in (1, 2, 8, 64, 1024):
            assert (
                abs(np.corrcoef(dropped[:, :-lag].ravel(), dropped[:, lag:].ravel())[0, 1]) < 0.01
            )
        rows = np.corrcoef(dropped) - np.eye(64)
        assert np.abs(rows).max() < 0.09


def test_stacked_seeds_give_what_each_gives_alone():
    seeds = randomness.fold_in(randomness.make_seed(1, 2), tf.range(3))
    together = randomness.bits(seeds, [3, 4, 5]).numpy()
    for i in range(3):
        alone = randomness.fold_in(randomness.make_seed(1, 2), i)
        np.testing.assert_array_equal(seeds[i], alone)
        np.testing.assert_array_equal(together[i], randomness.bits(alone, [4, 5]))


def test_draws_of_one_shape_are_built_once_for_all_graphs():
    def graphs(count):
        for _ in range(count):
            function = tf.function(lambda seed: randomness.bits(seed, [7, 11, 2]), autograph=False)
            yield function.get_concrete_function(tf.TensorSpec([2], tf.int32)).graph

    before = randomness._traced_bits.cache_info().misses
    drawn = [op for graph in graphs(3) for op in graph.get_operations() if randomness.is_draw(op)]
    assert len(drawn) == 3 and len({op.get_attr("f").name for op in drawn}) == 1
    assert randomness._traced_bits.cache_info().misses == before + 1


def test_a_draw_is_one_operation_of_a_graph_with_the_same_bits():
    @tf.function
    def drawn(seed):
        return [randomness.bits(seed, [3, 5]), randomness.bits(seed + 1, [3, 5])]

    seed = randomness.make_seed(1, 2)
    for got, start in zip(drawn(seed), (seed, seed + 1)):
        np.testing.assert_array_equal(got, randomness.bits(start, [3, 5]))
    operations = [op.name for op in drawn.get_concrete_function(seed).graph.get_operations()]
    assert [n for n in operations if "random_bits" in n] == ["random_bits", "random_bits_1"]


def test_the_order_and_the_number_of_names_matter():
    base = randomness.make_seed(3, 5)

    def fold(*names):
        seed = base
        for name in names:
            seed = randomness.fold_in(seed, name)
        return tuple(seed.numpy())

    chains = [(), ("a",), ("a", "a"), ("a", "b"), ("b", "a"), ("ab",), (1,), (0, 1), (1, 0), (0,)]
    seeds = {fold(*chain) for chain in chains}
    assert len(seeds) == len(chains)
    draws = np.stack([randomness.uniform(tf.constant(s), [4000]).numpy() for s in sorted(seeds)])
    assert np.abs(np.corrcoef(draws) - np.eye(len(seeds))).max() < 0.06


def test_numbers_compile_and_need_a_static_shape():
    seed = randomness.make_seed(5, 6)
    compiled = tf.function(
        lambda s: randomness.bits(s, [3, 5, 2]), jit_compile=True, autograph=False
    )
    np.testing.assert_array_equal(compiled(seed), randomness.bits(seed, [3, 5, 2]))
    with pytest.raises(ValueError, match="static"):
        randomness.bits(seed, [None, 3])
    assert randomness.bits(seed, []).shape == []


def test_dropout_by_the_numbers_of_rows():
    """Rows at other positions keep their draws."""
    seed, rows = randomness.make_seed(5, 6), tf.constant([[6, 0], [3, 3]])
    whole = kernels.dropout(tf.ones([7, 40]), 0.4, seed)
    some = kernels.dropout(tf.ones([2, 2, 40]), 0.4, seed, rows)
    np.testing.assert_array_equal(some, tf.gather(whole, rows))
    assert len(np.unique(whole, axis=0)) == 7
    with kernels.using(tensorflow):
        np.testing.assert_array_equal(kernels.dropout(tf.ones([2, 2, 40]), 0.4, seed, rows), some)
