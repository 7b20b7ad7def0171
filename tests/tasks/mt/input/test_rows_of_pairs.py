import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.mt.input.rows_of_pairs import Shape, fill_batch, to_batch


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


def test_two_pairs_by_hand() -> None:
    batch = to_batch([[([7, 8], [9]), ([5], [6, 7])], []], Shape(2, 6, 6))
    assert batch.src.ids.tolist() == [[7, 8, 2, 5, 2, 0], [0] * 6]
    assert batch.src.segment_ids.tolist() == [[1, 1, 1, 2, 2, 0], [0] * 6]
    assert batch.src.segment_pos.tolist() == [[0, 1, 2, 0, 1, 0], [0] * 6]
    assert batch.tgt.ids.tolist() == [[1, 9, 1, 6, 7, 0], [0] * 6]
    assert batch.tgt.labels.tolist() == [[9, 2, 6, 7, 2, 0], [0] * 6]
    assert batch.tgt.segment_ids.tolist() == [[1, 1, 2, 2, 2, 0], [0] * 6]
    assert batch.tgt.segment_pos.tolist() == [[0, 1, 0, 1, 2, 0], [0] * 6]
    assert {array.dtype for array in batch.Flatten()} == {np.dtype(np.int32)}


_IDS = st.lists(st.integers(4, 99), min_size=1, max_size=9)


@given(
    st.lists(st.tuples(_IDS, _IDS), min_size=1, max_size=200),
    st.integers(1, 6),
    st.integers(10, 30),
    st.integers(10, 30),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_nothing_is_lost_doubled_or_misaligned(
    pairs: list, rows: int, source_length: int, target_length: int, pack: bool
) -> None:
    shape = Shape(rows, source_length, target_length, pack)
    stream = iter(pairs)
    # After the pairs come endless fillers with other ids.
    filler = ([3], [3])
    seen, waiting, batches = [], [], 0
    while len(seen) < len(pairs):
        batch, waiting = fill_batch(shape, waiting, lambda: next(stream, filler))
        found = _unpack(batch)
        assert found
        assert len(waiting) <= shape.max_waiting
        seen += [pair for pair in found if pair != filler]
        batches += 1
        assert batches <= len(pairs) + 1
    assert sorted(seen) == sorted(pairs)


def test_rows_are_well_filled() -> None:
    rng = np.random.default_rng(0)

    def draw() -> tuple:
        n = int(rng.gamma(2.0, 5.0)) + 1
        return np.full(min(n, 63), 5), np.full(min(n, 63), 6)

    waiting: list = []
    filled = []
    for _ in range(20):
        batch, waiting = fill_batch(Shape(32, 64, 64), waiting, draw)
        filled.append((batch.src.segment_ids > 0).mean())
    assert np.mean(filled) > 0.93
