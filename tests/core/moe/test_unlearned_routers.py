"""Routers without weights: by a hash of the token, by a hash of its vector, and at random.

Compared with cases by hand and with loops.

Letters: G group, S token in group, k choice rank, E expert, M model, V vocabulary.
"""

import numpy as np
import pytest
import tensorflow as tf
from router_testing import SEED, check, route, router

from lingvo_moe.core.config.hyperparams import ParamError
from lingvo_moe.core.initializers import check_initial_values
from lingvo_moe.core.moe.routers.unlearned import spread
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.randomness import make_seed
from lingvo_moe.tasks.mt.reports.expert_tables import balanced

RNG = np.random.default_rng(0)


def test_modular_hash_by_hand():
    """First choice: token mod 4; second: 1 + (token div 4) mod 3 further. Two slots; position 3 is padding."""
    ids = [[5, 1, 9, 5, 2, 13]]
    paddings = [[0, 0, 0, 1, 0, 0]]
    layer = router("hash", 8, 4, table="modular", k=2)
    routing = route(layer, np.zeros((1, 6, 8)), paddings, 2, context={"ids": ids}, seed=SEED)
    check(routing, paddings)
    index = routing.expert_index.numpy()[0]
    assert index.tolist() == [[1, 3], [1, 2], [1, 0], [1, 3], [2, 3], [1, 2]]
    # First choices: tokens 0 and 1 fill expert 1; tokens 2 and 5 find it full. Expert 2 has token 4.
    # Second choices: expert 3 takes 0 and 4, expert 2 (one slot left) takes 1 and not 5, expert 0 takes 2.
    assert routing.kept.numpy()[0].tolist() == [[1, 1], [1, 1], [0, 1], [0, 0], [1, 1], [0, 0]]
    assert routing.position.numpy()[0, [0, 1, 2, 4]].tolist() == [[0, 0], [1, 1], [2, 0], [0, 1]]
    np.testing.assert_array_equal(routing.gate, routing.kept * 0.5)
    assert routing.aux_loss == 0


@pytest.mark.parametrize(("num_experts", "k"), [(4, 1), (5, 2), (6, 3), (4, 4), (7, 5)])
def test_every_rank_is_dealt_out_evenly_and_experts_differ(num_experts, k):
    V = 53
    index = spread(tf.range(V), k, num_experts).numpy()
    assert all(len(set(row)) == k for row in index.tolist())
    for rank in range(k):
        counts = np.bincount(index[:, rank], minlength=num_experts)
        assert counts.max() - counts.min() <= 1, rank


def test_a_table_of_a_file_begins_the_weights_and_is_not_needed_again(tmp_path):
    V, E = 12, 4
    path = tmp_path / "encoder.npy"
    params = {"table": "file", "table_file": str(path), "vocab_size": V}
    layer = router("hash", 8, E, **params)
    ids = np.arange(V)[np.newaxis]
    x, none = np.zeros((1, V, 8)), np.zeros((1, V))
    damaged = b"\x93NUMPY\x01\x00\x10\x00{'descr': 5, ]]]\n"
    for wrong in (None, damaged, np.zeros([2, V], np.int32), np.zeros([1, V])):
        if isinstance(wrong, bytes):
            path.write_bytes(wrong)
        elif wrong is not None:
            np.save(path, wrong)
        with pytest.raises(ParamError, match=r"router.table_file=.*int32 \[1, 12\]"):
            layer.InitTheta(make_seed(1, 0))
        with pytest.raises(ParamError, match=r"router.table_file=.*int32 \[1, 12\]"):
            check_initial_values(layer.VariableSpecs().Flatten())
    with pytest.raises(ParamError, match=r"router.table_file='': table='file' needs"):
        router("hash", 8, E, **{**params, "table_file": ""})
    table_LV = RNG.permutation(V).astype(np.int32)[np.newaxis]
    np.save(path, table_LV)
    theta = layer.InitTheta(make_seed(1, 0))
    path.unlink()
    layer = router("hash", 8, E, **params)
    routing = route(layer, x, none, None, context={"ids": ids}, theta=theta)
    np.testing.assert_array_equal(routing.expert_index[..., 0], table_LV % E)
    (spec,) = layer.VariableSpecs().Flatten()
    table_LV = np.concatenate([table_LV, table_LV[:, ::-1]])
    np.save(path, table_LV)
    np.testing.assert_array_equal(spec.Stacked(2, None).Init(make_seed(1, 0)), table_LV)


def test_a_table_follows_the_counts_until_an_expert_is_full():
    """Three experts share 30 tokens; ids 4 and 5 do not occur."""
    counts_VE = np.array([[1, 8, 0], [0, 7, 1], [6, 0, 0], [0, 4, 3], [0, 0, 0], [0, 0, 0]])
    numbers_V = balanced(counts_VE)
    # 0 and 1 fill expert 1; 2 goes to 0; 3 would go to 1, then to 2. The others have the fewest ids.
    assert (numbers_V % 3).tolist() == [1, 1, 0, 2, 0, 2]
    assert len(set(numbers_V.tolist())) == 6


def test_the_table_of_a_layer_is_a_permutation_that_no_other_layer_has():
    V, E = 40, 4
    layer = router("hash", 8, E, vocab_size=V)
    (spec,) = layer.VariableSpecs().Flatten()
    assert not spec.trainable
    tables_LV = spec.Stacked(3, None).Init(make_seed(1, 0)).numpy()
    assert (np.sort(tables_LV) == np.arange(V)).all()
    assert len({tuple(table_V % E) for table_V in tables_LV}) == 3
    ids = np.arange(V).reshape(1, V)
    x, none = np.zeros((1, V, 8)), np.zeros((1, V))
    theta = NestedMap(table=tables_LV[2])
    first = route(layer, x, none, None, context={"ids": ids}, theta=theta).expert_index.numpy()
    assert first[0, :, 0].tolist() == (tables_LV[2] % E).tolist()
    assert np.bincount(first.ravel()).tolist() == [10] * 4


def test_random_hash_is_a_fixed_balanced_table():
    V, E = 40, 4
    layer = router("hash", 8, E, vocab_size=V, table="random")
    ids = np.arange(V).reshape(1, V)
    x, none = np.zeros((1, V, 8)), np.zeros((1, V))
    first = route(layer, x, none, None, context={"ids": ids}).expert_index.numpy()
    assert np.bincount(first.ravel()).tolist() == [10] * 4
    again = route(layer, x + 1, none, None, context={"ids": ids[:, ::-1]}).expert_index.numpy()
    np.testing.assert_array_equal(first[:, ::-1], again)  # nothing but the token decides
    assert (first.ravel() != np.arange(V) % E).any()
    other = router("hash", 8, E, vocab_size=V, table="random", table_seed=1)
    other = route(other, x, none, None, context={"ids": ids}).expert_index.numpy()
    assert (first != other).any()


def test_cross_polytope_against_a_loop():
    M, E, k = 6, 8, 3
    layer = router("lsh", M, E, k=k)
    x = RNG.normal(size=(2, 9, M)).astype(np.float32)
    paddings = (RNG.random((2, 9)) < 0.2).astype(np.float32)
    routing = route(layer, x, paddings, 3, seed=SEED)
    check(routing, paddings)
    projected = x @ layer.Projections().numpy()
    for g, s in np.ndindex(2, 9):
        corners = [*projected[g, s], *-projected[g, s]]
        want = sorted(range(E), key=lambda e: -corners[e])[:k]
        assert routing.expert_index.numpy()[g, s].tolist() == want


def test_hyperplanes_by_hand(monkeypatch):
    """Projections are the coordinates; bits are their signs. The second choice flips the bit of the nearest plane."""
    layer = router("lsh", 3, 8, hash="hyperplanes", k=3)
    monkeypatch.setattr(layer, "Projections", lambda: tf.eye(3))
    x = [[[1.0, -2.0, 0.5], [-1.0, 0.1, 3.0]]]
    index = route(layer, x, [[0, 0]], None).expert_index.numpy()[0]
    # (1, 0, 1) is 5; the third is nearest: 5 ^ 4, then the first: 5 ^ 1. (0, 1, 1) is 6: 6 ^ 2, 6 ^ 1.
    assert index.tolist() == [[5, 1, 4], [6, 4, 7]]


def test_random_draws_every_set_alike_and_anew():
    E, k, S = 4, 2, 3000
    layer = router("random", 2, E, k=k)
    x, none = np.zeros((2, S, 2)), np.zeros((2, S))
    index = route(layer, x, none, None, seed=SEED).expert_index.numpy()
    check(route(layer, x[:, :20], none[:, :20], 3, seed=SEED), none[:, :20])
    pairs = np.bincount((index[..., 0] * E + index[..., 1]).ravel(), minlength=E * E)
    pairs = pairs.reshape(E, E)
    assert not pairs.diagonal().any()
    expected = 2 * S / (E * (E - 1))
    assert (np.abs(pairs[~np.eye(E, dtype=bool)] - expected) < 5 * expected**0.5).all()
    assert (index != route(layer, x, none, None, seed=make_seed(3, 5)).expert_index.numpy()).any()


def test_random_in_inference_is_decided_by_the_token():
    layer = router("random", 2, 4, k=2)
    ids = [[5, 1, 9, 5, 2, 13]]
    routing = route(layer, np.zeros((1, 6, 2)), np.zeros((1, 6)), None, context={"ids": ids})
    index = routing.expert_index.numpy()[0].tolist()
    assert index == [[1, 3], [1, 2], [1, 0], [1, 3], [2, 3], [1, 2]]
