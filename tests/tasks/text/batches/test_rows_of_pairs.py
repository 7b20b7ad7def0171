import itertools
from collections.abc import Iterator

import numpy as np
from hypothesis import given, settings, strategies as st

from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.text.batches.rows_of_pairs import Shape, Sized, fill_batch, to_batch


def _unpack(batch: NestedMap) -> list[tuple[list[int], list[int]]]:
    """Returns the pairs of a batch, read through segments and positions, which it checks."""
    pairs = []
    src, tgt = batch.src, batch.tgt
    for row in range(src.ids.shape[0]):
        count = src.segment_ids[row].max()
        assert tgt.segment_ids[row].max() == count
        for side in (src, tgt):
            segments = side.segment_ids[row]
            padding = segments == 0
            for name in side:
                assert (side[name][row][padding] == 0).all()
            # 1, 2, ... in order, then padding to the end.
            filled = segments[~padding]
            assert (np.diff(filled) >= 0).all()
            assert (segments[: filled.size] != 0).all()
        for segment in range(1, count + 1):
            s, t = src.segment_ids[row] == segment, tgt.segment_ids[row] == segment
            assert src.segment_pos[row][s].tolist() == list(range(s.sum()))
            assert tgt.segment_pos[row][t].tolist() == list(range(t.sum()))
            source, inputs, labels = src.ids[row][s], tgt.ids[row][t], tgt.labels[row][t]
            assert source[-1] == 2
            assert inputs[0] == 1
            assert labels[-1] == 2
            assert inputs[1:].tolist() == labels[:-1].tolist()
            pairs.append((source[:-1].tolist(), labels[:-1].tolist()))
    return pairs


def _sized(pair: tuple) -> Sized:
    source, target = pair
    return len(source), len(target), pair


_IDS = st.lists(st.integers(4, 99), min_size=1, max_size=9)


@given(
    st.lists(st.tuples(_IDS, _IDS), min_size=1, max_size=200),
    st.integers(1, 6),
    st.integers(10, 30),
    st.integers(10, 30),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_nothing_is_lost_doubled_or_misaligned(pairs, rows, source_length, target_length, pack):
    shape = Shape(rows, source_length, target_length, pack)
    # After the pairs come endless fillers with other ids.
    filler = ([3], [3])
    stream = map(_sized, itertools.chain(pairs, itertools.repeat(filler)))
    seen, waiting, batches = [], [], 0
    while len(seen) < len(pairs):
        filled, waiting = fill_batch(shape, waiting, stream)
        found = _unpack(to_batch(filled, shape))
        assert found
        assert len(waiting) <= shape.max_waiting
        seen += [pair for pair in found if pair != filler]
        batches += 1
        assert batches <= len(pairs) + 1
    assert sorted(seen) == sorted(pairs)


def test_rows_are_well_filled():
    rng = np.random.default_rng(0)

    def drawn() -> Iterator[Sized]:
        while True:
            n = min(int(rng.gamma(2.0, 5.0)) + 1, 63)
            yield n, n, n

    waiting: list = []
    filled, pairs = [], drawn()
    for _ in range(20):
        rows, waiting = fill_batch(Shape(32, 64, 64), waiting, pairs)
        filled.append(np.mean([sum(n + 1 for n in row) / 64 for row in rows]))
    assert np.mean(filled) > 0.93


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), max_size=300),
    st.integers(1, 40),
    st.integers(21, 70),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_a_pair_goes_into_the_first_row_with_space(pairs, rows, length, pack):
    shape = Shape(rows, length, length + 3, pack)
    filled, waiting = fill_batch(shape, [], ((s, t, (s, t)) for s, t in pairs))
    expected, left = [[] for _ in range(rows)], []
    for pair in pairs:
        room = [
            (length - sum(s + 1 for s, _ in row), length + 3 - sum(t + 1 for _, t in row))
            for row in expected
        ]
        if pack and (all(min(side) < 2 for side in room) or len(left) == shape.max_waiting):
            break
        fits = (
            row
            for row, (s, t) in zip(expected, room)
            if (s > pair[0] and t > pair[1] if pack else not row)
        )
        (next(fits, left)).append(pair)
    if not pack:
        left = []
    assert filled == expected and [pair for *_, pair in waiting] == left
