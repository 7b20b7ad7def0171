"""Slot assignment compared with a case by hand and with assigning slots one token at a time."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings, strategies as st

from lingvo_moe.core.moe.routers.slots import assign_slots


def one_at_a_time(index_GSk, wanted_GSk, num_experts, capacity):
    """Returns (positions, kept); the position is -1 where no slot is requested."""
    G, S, ranks = index_GSk.shape
    position = np.full((G, S, ranks), -1)
    kept = np.zeros((G, S, ranks))
    for g in range(G):
        taken = [0] * num_experts
        for rank in range(ranks):
            for s in range(S):
                if wanted_GSk[g, s, rank]:
                    e = index_GSk[g, s, rank]
                    position[g, s, rank] = taken[e]
                    kept[g, s, rank] = taken[e] < capacity
                    taken[e] += 1
    return position, kept


def _slots(index, wanted, num_experts, capacity):
    position, kept = assign_slots(
        tf.constant(index, tf.int32), tf.constant(wanted, tf.float32), num_experts, capacity
    )
    assert (position.dtype, kept.dtype) == (tf.int32, tf.float32)
    return position.numpy(), kept.numpy()


@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 70), st.integers(1, 7)),
    capacity=st.integers(1, 20),
    share=st.sampled_from([0.0, 0.7, 1.0]),
    seed=st.integers(0, 10_000),
    data=st.data(),
)
def test_equals_assigning_slots_one_at_a_time(shape, capacity, share, seed, data):
    G, S, E = shape
    ranks = data.draw(st.integers(1, E))
    rng = np.random.default_rng(seed)
    index = rng.random((G, S, E)).argsort(-1)[..., :ranks]
    wanted = (rng.random(index.shape) < share).astype(np.float32)
    position, kept = _slots(index, wanted, E, capacity)
    want_position, want_kept = one_at_a_time(index, wanted, E, capacity)
    np.testing.assert_array_equal(kept, want_kept)
    asked = wanted > 0
    np.testing.assert_array_equal(position[asked], want_position[asked])


def test_groups_of_open_size_take_the_same_slots():
    """A served model may leave the length of its lines unknown."""
    rng = np.random.default_rng(0)
    index = rng.random((2, 300, 5)).argsort(-1)[..., :2].astype(np.int32)
    wanted = np.ones(index.shape, np.float32)
    open_size = tf.TensorSpec([None, None, 2], tf.int32), tf.TensorSpec([None, None, 2])
    slots = tf.function(
        lambda *args: assign_slots(*args, 5, 90), input_signature=open_size, autograph=False
    )
    for got, want in zip(slots(index, wanted), _slots(index, wanted, 5, 90), strict=True):
        np.testing.assert_array_equal(got, want)


def test_groups_without_tokens():
    position, kept = _slots(np.zeros((2, 0, 2)), np.zeros((2, 0, 2)), 5, 3)
    assert position.shape == kept.shape == (2, 0, 2)


def test_no_window_of_all_blocks_is_compiled():
    """A window of all blocks took a third of the TPU compiler's time."""
    index = tf.zeros([1, 2048, 2], tf.int32)
    slots = tf.function(lambda i, w: assign_slots(i, w, 8, 9), jit_compile=True, autograph=False)
    text = slots.experimental_get_compiler_ir(index, tf.ones(index.shape))(stage="hlo")
    assert "gather(" in text and "reduce-window(" not in text


@pytest.mark.parametrize("tokens", [1_000_000])
def test_counts_are_exact_for_a_million_tokens(tokens):
    index = np.zeros((1, tokens, 1), np.int32)
    position, kept = _slots(index, np.ones_like(index), 2, tokens - 1)
    np.testing.assert_array_equal(position[0, :, 0], np.arange(tokens))
    assert kept.sum() == tokens - 1 and not kept[0, -1, 0]
